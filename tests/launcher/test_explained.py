from __future__ import annotations

import json
import sys

import pytest

from strategies.costs.uniform import UniformCosts
from tests.launcher.command_line import launch_here, refused_here
from tests.strategies.referee.trace.made_trace import known, write

SLOW = UniformCosts(forward=(1.0, 2.0, 1.0), backward=(2.0, 4.0, 2.0), p2p=0.01)
DIR = "hydra.run.dir=run"


def test_a_slow_rank_is_named_with_what_others_waited_for(tmp_path):
    before = "torch" in sys.modules
    paths = write(tmp_path, known("1f1b", 3, 6, SLOW), steps=2, offsets={2: 0.5})
    done = launch_here(["explain", *(path.name for path in paths), DIR], tmp_path)
    assert done.code == 0, done.errors
    assert "slow: rank 1, a microbatch takes 2.00 times" in done.output
    assert "clocks moved, as 48 messages say: rank 2 by -500." in done.output
    assert "rank 0, before 0B0" in done.output and "of rank 1" in done.output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["mode"], result["slow_rank"], result["slow_stage"]) == ("explain", 1, 1)
    assert len(result["steps_s"]) == 2 and result["without_slow_s"] < result["same_order_s"]
    assert result["alternatives"][0]["step_time"] <= result["same_order_s"]
    assert result["waits"][0]["blamed"]
    for name in ("timeline.html", "trace.json", "schedule.csv"):
        assert (tmp_path / "run" / name).is_file()
    assert ("torch" in sys.modules) == before


def test_a_folder_does_as_well(tmp_path):
    (tmp_path / "traces").mkdir()
    timeline = known("interleaved_1f1b", 2, 4, UniformCosts(2.0, 4.0), 2)
    write(tmp_path / "traces", timeline, style="kernels", zipped=True)
    done = launch_here(["mode=explain", "trace=[traces]", DIR], tmp_path)
    assert done.code == 0, done.errors
    assert "2 ranks, 4 stages, 4 microbatches" in done.output
    assert "no rank is slower" in done.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["explain"], "Try python -m launcher explain rank0.json.gz"),
        (["mode=explain"], "Try trace=[rank0.json.gz,rank1.json.gz]"),
        (["explain", "nowhere.json"], "trace=nowhere.json does not exist"),
        (["explain", "."], "a folder without a trace"),
        (["explain", "x.json", "pp=2"], "Try without pp=2."),
        (["explain", "x.json"], "it is no JSON"),
        (["explain", "x.json", "schedule.file=x.csv"], "Try without schedule.file=x.csv."),
        (["mode=simulate", "trace=[x.json]"], "Try mode=explain"),
    ],
)
def test_what_cannot_be_explained_is_one_message(words, told, tmp_path, monkeypatch):
    if "nowhere.json" not in words and "." not in words:
        (tmp_path / "x.json").write_text("{")
    assert told in refused_here(words, tmp_path, monkeypatch)
