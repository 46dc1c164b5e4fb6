from __future__ import annotations

import json

import pytest

from launcher.config import LaunchConfig
from launcher.report.rows import KIND_NAMES
from launcher.report.sweep.sweep_jobs import (
    asked_figures,
    ended_job,
    file_stamps,
    make_sweep,
)
from tests.launcher.report.sweep.sweeps import job, predicted, simulated, trained


def test_a_job_is_what_it_left_in_its_folder(tmp_path):
    found = simulated(tmp_path, 3, "1f1b")
    timeline, metrics = predicted("1f1b")
    assert (found.index, found.status, found.error, found.time_unit) == (3, "done", "", "F")
    assert found.result == json.loads((tmp_path / "3" / "result.json").read_text())
    assert found.result["makespan"] == metrics.makespan
    (drawn,) = found.timelines
    assert drawn.label == "predicted"
    assert drawn.panel["makespan"] == timeline.makespan
    bars = [bar for row in drawn.panel["rows"] for lane in row["compute"] for bar in lane]
    assert sorted((KIND_NAMES[bar[0]], bar[1], bar[2], bar[3], bar[4]) for bar in bars) == sorted(
        (e.instruction.kind.value, e.instruction.stage, e.instruction.microbatch, e.start, e.end)
        for rank in (0, 1)
        for e in timeline.compute(rank)
        if e.end > e.start
    )


def test_a_training_run_has_both_timelines(tmp_path):
    found = trained(tmp_path, 0, "gpipe")
    assert [timeline.label for timeline in found.timelines] == ["predicted", "measured"]
    assert [timeline.panel["unit"] for timeline in found.timelines] == ["F", "s"]


def test_files_of_an_earlier_sweep_in_the_same_folder_do_not_count(tmp_path):
    simulated(tmp_path, 0, "1f1b")
    refused = job(tmp_path, 0, "schedule=gpipe", exit_code=2, error="no such data")
    assert (refused.result, refused.timelines) == ({}, ())
    again = simulated(tmp_path, 0, "1f1b")
    assert len(again.timelines) == 1
    assert again.result["schedule"] == "1f1b"


@pytest.mark.parametrize(
    ("code", "status"),
    [(0, "done"), (1, "failed"), (2, "refused"), (85, "preempted"), (None, "interrupted")],
)
def test_the_exit_code_says_how_a_job_ended(code, status, tmp_path):
    found = job(tmp_path, 0, exit_code=code, error="" if code == 0 else "why")
    assert (found.status, found.error) == (status, "" if code == 0 else "why")


def test_a_failed_run_says_why_in_its_result(tmp_path):
    result = {"status": "failed", "error": "rank 1 was killed"}
    assert job(tmp_path, 0, result=result, exit_code=1).error == "rank 1 was killed"


def test_a_job_without_a_result_is_known_by_what_was_asked(tmp_path):
    config = LaunchConfig(pp=4, dp="auto", num_microbatches=8)
    found = ended_job(
        0, tmp_path, ["pp=4", "hydra.sweep.dir=x"],
        asked=asked_figures(config), before=file_stamps(tmp_path), exit_code=2,
    )  # fmt: skip
    assert found.overrides == ("pp=4",)
    assert found.result == {
        "mode": "train", "schedule": config.schedule.name, "pp": 4, "tp": 1, "ep": 1,
            "num_microbatches": 8,
    }  # fmt: skip


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00", '{"status": '])
def test_half_a_result_is_none(content, tmp_path):
    before = file_stamps(tmp_path)
    (tmp_path / "result.json").write_text(content)
    (tmp_path / "trace.json").write_text(content)
    found = ended_job(0, tmp_path, [], asked={}, before=before, exit_code=1)
    assert (found.result, found.timelines, found.status) == ({}, (), "failed")


def test_a_job_is_labelled_by_what_varies(tmp_path):
    asked = [["mode=simulate", f"schedule={s}", f"pp={p}"] for p in (2, 4) for s in ("a", "b")]
    jobs = [job(tmp_path, index, *words) for index, words in enumerate(asked)]
    sweep = make_sweep(jobs, asked)
    assert sweep.varied == ("schedule", "pp")
    assert [sweep.label(j) for j in jobs] == [
        "schedule=a pp=2", "schedule=b pp=2", "schedule=a pp=4", "schedule=b pp=4",
    ]  # fmt: skip


def test_a_key_that_only_some_jobs_have_varies(tmp_path):
    asked = [["+data.path=x=y"], ["seed=1"]]
    sweep = make_sweep([job(tmp_path, 0, *asked[0])], asked)
    assert sweep.varied == ("data.path", "seed")
    assert sweep.num_jobs == 2
    assert sweep.label(sweep.jobs[0]) == "data.path=x=y"


def test_a_single_job_is_labelled_by_all_of_its_overrides(tmp_path):
    words = ["mode=simulate", "pp=2", "schedule=gpipe"]
    sweep = make_sweep([job(tmp_path, 0, *words)], [words])
    assert sweep.label(sweep.jobs[0]) == "pp=2 schedule=gpipe"
    bare = make_sweep([job(tmp_path, 0)], [[]])
    assert bare.label(bare.jobs[0]) == "job 0"
