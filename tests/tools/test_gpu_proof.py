"""The proof's own ways: deadlines, crashes, what is skipped, and the page that is made of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tools.gpu_proof import __main__ as command
from tools.gpu_proof import proof
from tools.gpu_proof.configurations import PREDICTED, ROWS, kendall, summary
from tools.gpu_proof.numerics import read_report
from tools.gpu_proof.page import rendered, status_line
from tools.gpu_proof.proof import Card, Stage, prove, read

CARD = Card("cpu", "a card", "2.0", free_gb=10.0, total_gb=20.0)
_HERE = "tests.tools.broken_stages:"


def run(groups, file: Path, **changes) -> list[str]:
    said: list[str] = []
    given = {"limit_s": 300.0, "quick": False, "again": False, "say": said.append} | changes
    prove(groups, CARD, file, **given)
    return said


def test_stages_that_go_wrong_leave_the_results_of_the_others(tmp_path):
    file = tmp_path / "proof.json"
    names = ("hangs", "crashes", "raises", "runs_out_of_memory", "finds_fault")
    broken = [Stage(name, _HERE + name, 8.0 if name == "hangs" else 60.0) for name in names]
    run(
        [[Stage("first", _HERE + "good", 60.0)], broken, [Stage("last", _HERE + "good", 60.0)]],
        file,
    )
    stages = read(file)["stages"]
    assert {name: entry["status"] for name, entry in stages.items()} == {
        "first": "passed", "hangs": "deadline", "crashes": "failed", "raises": "failed",
        "runs_out_of_memory": "failed", "finds_fault": "failed", "last": "passed",
    }  # fmt: skip
    assert stages["first"]["found"] == {"answer": 42, "told": None}
    assert stages["last"]["found"] == {"answer": 42, "told": 42}
    assert stages["hangs"]["found"] == {"so_far": 1}
    assert stages["hangs"]["reason"].startswith("did not end within 8 s")
    assert stages["crashes"]["reason"].startswith("was killed by SIGSEGV")
    assert stages["raises"]["reason"].endswith("ValueError: that was wrong")
    assert "Unable to allocate" in stages["runs_out_of_memory"]["reason"]
    assert (
        stages["finds_fault"] | {"found": {"seen": 3}, "reason": "3 is not 4"}
        == (stages["finds_fault"])
    )


def test_who_stops_the_proof_keeps_what_has_been_found(tmp_path):
    file = tmp_path / "proof.json"

    def stop() -> None:
        while not (file.exists() and "first" in file.read_text()):
            time.sleep(0.05)
        time.sleep(4)
        os.kill(os.getpid(), signal.SIGINT)

    first, hangs = Stage("first", _HERE + "good", 60.0), Stage("hangs", _HERE + "hangs", 60.0)
    # Who runs tests in the background has it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=stop, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            run([[first], [hangs], [Stage("never", _HERE + "good", 60.0)]], file)
    finally:
        signal.signal(signal.SIGINT, before)
    stages = read(file)["stages"]
    assert list(stages) == ["first", "hangs"]
    assert stages["hangs"]["reason"].startswith("was stopped")
    assert stages["hangs"]["found"] == {"so_far": 1}


def test_a_stage_that_has_passed_is_not_run_again_for_the_same_sources_card_and_torch(
    tmp_path, monkeypatch
):
    file = tmp_path / "proof.json"
    stages = [[Stage("first", _HERE + "good", 60.0)]]
    assert run(stages, file)[0].startswith("first: passed")
    assert run(stages, file) == ["first: has passed before"]
    assert run(stages, file, again=True)[0].startswith("first: passed")
    monkeypatch.setattr(proof, "digest", lambda: "other sources")
    assert run(stages, file)[0].startswith("first: passed")


def test_a_stage_that_needs_more_memory_than_is_free_is_skipped_with_the_reason(tmp_path):
    file = tmp_path / "proof.json"
    (said,) = run([[Stage("large", _HERE + "good", 60.0, needs_gb=12)]], file)
    assert said == ("large: skipped, needs 12 GB of device memory, and 10.0 of 20.0 GB are free")
    assert read(file)["stages"]["large"]["status"] == "skipped"


def test_without_a_gpu_nothing_runs_and_the_code_is_2(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "look", lambda *, rehearse: None)
    assert command.main([]) == 2
    assert capsys.readouterr().out == (
        "torch sees no GPU on this machine, so nothing was run. Try make gpu-proof "
        "ARGS=--rehearse, which runs all stages on the CPU.\n"
    )
    assert not list(tmp_path.iterdir())


def test_an_unknown_stage_is_refused_with_the_names_of_all(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--stages", "kernel"])
    assert ended.value.code == 2
    assert "--stages kernel: there are card, launches," in capsys.readouterr().err


def test_a_part_ends_in_time_and_says_what_it_has_left_out(tmp_path):
    file = tmp_path / "proof.json"
    hangs, last = Stage("hangs", _HERE + "hangs", 60.0), Stage("last", _HERE + "good", 60.0)
    said = run([[hangs], [last]], file, limit_s=12.0)
    assert said[0].startswith("hangs: deadline in 12.")
    assert said[1] == "last: skipped, the 12 s of its part are over"
    names = [stage.name for group in command.GROUPS for stage in group]
    assert len(names) == len(set(names))
    assert 2 * command.PART_S <= 540


def test_the_cheapest_stages_rehearse_on_a_cpu(tmp_path):
    file = tmp_path / "proof.json"
    words = ["--rehearse", "--stages", "card,configurations", "--out", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu_proof", *words],
        cwd=proof.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[0].startswith("CPU (rehearsal), torch ")
    found = read(file)["stages"]["configurations"]["found"]
    assert len(found["rows"]) == 5
    assert set(found["rows"]) < set(ROWS)
    for row in found["rows"].values():
        assert row["step_s"] > 0
        assert row["model_flops"] > 0
    # What was rehearsed makes no page.
    page = tmp_path / "gpu.md"
    assert command.main(["--page", str(page), "--out", str(file)]) == 2
    assert not page.exists()


def test_a_copy_without_history_knows_its_commit_while_its_sources_are_the_same(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(proof, "WHEELS", tmp_path)
    own = proof.commit_name()
    (tmp_path / "COMMIT").write_text(f"a1b2c3 {proof.digest()}\n")
    assert proof.commit_name() == "a1b2c3"
    (tmp_path / "COMMIT").write_text("a1b2c3 0123456789abcdef\n")
    assert proof.commit_name() == own


def test_every_row_has_a_prediction_that_was_made_before():
    for card, rows in json.loads(PREDICTED.read_text()).items():
        assert list(rows) == list(ROWS), card
        for row in rows.values():
            assert 0.01 < row["step_s"] < 10
            assert 1e9 < row["peak_bytes"] < 1e11


def test_errors_and_order_of_predictions():
    assert kendall([1, 2, 3], [10, 20, 30]) == 1.0
    assert kendall([1, 2, 3], [30, 20, 10]) == -1.0
    assert kendall([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / 3)
    rows = {
        "a": {"predicted": {"step_s": 1.0, "peak_bytes": 10}, "step_s": 2.0, "peak_bytes": 8},
        "b": {"predicted": {"step_s": 2.0, "peak_bytes": 10}, "step_s": 2.5},
        "c": {"predicted": {"step_s": 2.0, "peak_bytes": 10}, "error": "out of memory"},
    }
    found = summary(rows)
    assert found["worst_time_error"] == -0.5
    assert found["median_size_of_time_error"] == pytest.approx(0.35)
    assert found["worst_memory_error"] == 0.25


def test_the_report_of_pytest_is_read(tmp_path):
    file = tmp_path / "report.xml"
    file.write_text(
        '<testsuites><testsuite><testcase classname="tests.gpu.test_a" name="one" time="1.5"/>'
        '<testcase classname="tests.gpu.test_a" name="two" time="0.1">'
        '<failure message="assert 1 == 2">the trace</failure></testcase>'
        '<testcase classname="tests.gpu.test_a" name="three" time="0">'
        '<skipped message="no GPU"/></testcase></testsuite></testsuites>'
    )
    assert read_report(file) == {
        "test_a::one": {"outcome": "passed", "took_s": 1.5},
        "test_a::two": {
            "outcome": "failed", "took_s": 0.1, "says": "assert 1 == 2\nthe trace",
        },
        "test_a::three": {"outcome": "skipped", "took_s": 0.0, "says": "no GPU\n"},
    }  # fmt: skip


def test_the_page_is_made_of_the_file():
    stages = read(proof.ROOT / "docs/evidence/gpu.json")["stages"]
    assert (proof.ROOT / "docs/evidence/gpu.md").read_text() == rendered(stages)


def test_the_page_tells_failures_too(golden):
    entry = {
        "commit": "abc", "card": "NVIDIA H100", "torch": "2.11.0", "began": "2026-11-01 10:00",
        "took_s": 12.3, "reason": "",
    }  # fmt: skip
    stages = {
        "card": entry | {"status": "passed", "found": {"python": "3.12", "context_bytes": 5e8}},
        "numerics": entry
        | {
            "status": "failed",
            "reason": "1 test failed",
            "found": {
                "tests": {
                    "test_a::one": {"outcome": "passed"},
                    "test_a::two": {"outcome": "failed", "says": "assert 1 == 2"},
                }
            },
        },
        "configurations": entry
        | {
            "status": "deadline",
            "reason": "did not end within 75 s",
            "found": {
                "hardware": "h100",
                "rows": {
                    "base": {
                        "predicted": {"step_s": 0.4, "peak_bytes": 3e10},
                        "step_s": 0.5, "peak_bytes": 3.1e10,
                    },
                    "mixed": {
                        "predicted": {"step_s": 0.4, "peak_bytes": 3e10}, "error": "out of memory",
                    },
                },
            },
        },
        "ipc": entry | {"status": "passed", "found": {"message_1024_s": 2.5e-5}},
    }  # fmt: skip
    golden("gpu_page", rendered(stages))
    assert " ".join(status_line(stages).split()) == (
        "**On one GPU** (NVIDIA H100, 2026-11-01) 2 of 4 stages of "
        "[the proof](docs/evidence/gpu.md) passed. Nothing has run on several GPUs; everything "
        "below was measured on CPUs, or predicted ([limits](docs/limits.md))."
    )
