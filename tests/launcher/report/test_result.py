import errno
import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.report.result import metrics_mapping, versions, write_result
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.metrics import measure

COSTS = UniformCosts(grad_reduce=8)


def test_keys_keep_the_order_in_which_they_were_given(tmp_path):
    path = tmp_path / "result.json"
    write_result(path, {"status": "done", "pp": 4, "bubble_ratio": 0.25, "a": [1, None, True]})
    assert path.read_text(encoding="ascii") == (
        '{\n  "status": "done",\n  "pp": 4,\n  "bubble_ratio": 0.25,\n'
        '  "a": [\n    1,\n    null,\n    true\n  ]\n}\n'
    )


def test_nan_and_infinities_become_null_at_any_depth(tmp_path):
    path = tmp_path / "result.json"
    write_result(path, {"loss_last": math.nan, "deep": {"peaks": (1.0, math.inf, -math.inf)}})
    assert json.loads(path.read_text()) == {"loss_last": None, "deep": {"peaks": [1.0, None, None]}}


def test_paths_are_written_as_text(tmp_path):
    path = tmp_path / "result.json"
    write_result(path, {"checkpoint": Path("/runs/1")})
    assert json.loads(path.read_text()) == {"checkpoint": "/runs/1"}


def test_a_value_that_json_cannot_say_is_refused_by_name_and_nothing_is_written(tmp_path):
    path = tmp_path / "result.json"
    with pytest.raises(TypeError, match=r"plans\[1\]\.memory is a object"):
        write_result(path, {"plans": [{"memory": 1}, {"memory": object()}]})
    with pytest.raises(TypeError, match="key 3 in plans"):
        write_result(path, {"plans": {3: 1}})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_made(tmp_path):
    path = tmp_path / "runs" / "1" / "result.json"
    write_result(path, {"status": "failed"})
    assert json.loads(path.read_text()) == {"status": "failed"}


def test_the_file_has_the_mode_that_the_umask_gives(tmp_path):
    path = tmp_path / "result.json"
    write_result(path, {})
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_failing_rename_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_result(path, {"status": "old"})

    def fail(self, target):
        raise OSError(errno.EIO, "no rename today")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no rename today"):
        write_result(path, {"status": "new"})
    assert json.loads(path.read_text()) == {"status": "old"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_process_that_dies_between_write_and_rename_leaves_the_old_file(tmp_path):
    path = tmp_path / "result.json"
    write_result(path, {"status": "old"})
    died = f"""
import os
from pathlib import Path
from launcher.report.result import write_result
Path.replace = lambda self, target: os._exit(77)
write_result(Path({str(path)!r}), {{"status": "new"}})
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", died], cwd=Path.cwd())
    assert done.returncode == 77
    assert json.loads(path.read_text()) == {"status": "old"}
    (litter,) = set(tmp_path.iterdir()) - {path}
    assert json.loads(litter.read_text()) == {"status": "new"}


def test_the_content_is_on_disk_before_the_rename(tmp_path, monkeypatch):
    calls = []
    fsync, rename = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("fsync"), fsync(handle)))
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (calls.append("rename"), rename(self, to))
    )
    write_result(tmp_path / "result.json", {"status": "done"})
    assert calls == ["fsync", "rename", "fsync"]


def test_a_simulated_step_has_exactly_the_keys_of_the_contract(tmp_path):
    program = compile_program(schedule="foldx_fifo", pp=2, num_microbatches=4)
    mapping = metrics_mapping(measure(simulate(program, COSTS), COSTS))
    assert set(mapping) == {
        "makespan",
        "period",
        "bubble_ratio",
        "lower_bound",
        "binding_bound",
        "bound_gap",
        "gap_to_ideal",
        "peak_activations",
        "peak_memory_bytes",
        "exposed_grad_reduce",
        "throughput",
        "num_messages",
        "weight_copies",
        "synchronous",
        "costs",
        "time_unit",
    }
    assert mapping["makespan"] == 19.5
    assert mapping["peak_activations"] == [2.5, 1.5]
    assert mapping["peak_memory_bytes"] is None
    write_result(tmp_path / "result.json", mapping)
    assert json.loads((tmp_path / "result.json").read_text()) == mapping


def test_versions_are_read_without_importing_anything_heavy():
    probe = """
import json, sys
from launcher.report.result import versions
import launcher.report.ascii, launcher.report.html, launcher.report.predicted
import launcher.report.summary, launcher.report.predicted
found = versions()
heavy = [n for n in ("torch", "lightning", "hydra", "omegaconf", "wandb") if n in sys.modules]
print(json.dumps([found, heavy]))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", probe], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found, heavy = json.loads(done.stdout)
    assert heavy == []
    assert found == versions()
    assert set(found) == {"python", "foldpipe-launcher", "torch", "lightning", "hydra-core"}
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"] is not None


def test_versions_and_staleness_are_those_of_schedules_without_a_flush():
    def keys(schedule):
        program = compile_program(schedule=schedule, pp=2, num_microbatches=2)
        return set(metrics_mapping(measure(simulate(program, COSTS), COSTS)))

    late = keys("pipedream_2bw")
    assert late - keys("1f1b") == {"weight_versions", "gradient_sums", "staleness"}
