"""A sweep while it runs and afterwards: failures at once, the best job, and collecting later."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from launcher.commands.layouts import simulate
from launcher.config import LaunchConfig
from strategies.errors import RunError
from tests.launcher.command_line import run_here
from tests.launcher.runs import MODEL, launch

WORDS = ("-m", "mode=simulate", "costs=uniform", "num_microbatches=4", "hydra.sweep.dir=s")


def fail_gpipe(config: LaunchConfig, run_dir: Path) -> int:
    if config.schedule.name == "gpipe":
        raise RunError("rank 0 was killed")
    return simulate(config, run_dir)


def statuses(folder: Path) -> list[tuple[str, str]]:
    with (folder / "sweep.csv").open(newline="") as stream:
        return [(row["schedule"], row["status"]) for row in csv.DictReader(stream)]


def test_a_failing_job_is_named_before_the_next_one_starts(tmp_path, monkeypatch):
    words = [*WORDS, "schedule=gpipe,1f1b", "pp=4"]
    seen = []

    def look(config: LaunchConfig, run_dir: Path) -> int:
        record = json.loads((tmp_path / "s" / "jobs.json").read_text())["jobs"]
        there = (tmp_path / "s" / "sweep.csv").is_file()
        seen.append((there, [job["folder"] is not None for job in record]))
        return fail_gpipe(config, run_dir)

    done = run_here(words, tmp_path, monkeypatch, look)
    assert done.code == 1
    # The files are up to date while the sweep goes on.
    assert seen == [(False, [True, False]), (True, [True, True])]
    assert "job 0 of the sweep failed (exit 1): mode=simulate" in done.errors
    assert "pp=4: rank 0 was killed; see " in done.errors
    assert [line[:5] for line in done.output.splitlines()[1:2]] == ["[2/2]"]


def test_a_sweep_goes_on_or_stops_at_its_first_failure(tmp_path, monkeypatch):
    words = [*WORDS, "schedule=1f1b,gpipe,foldx_fifo", "pp=4"]
    done = run_here(words, tmp_path / "a", monkeypatch, fail_gpipe)
    assert (done.code, len(done.calls)) == (1, 3)
    assert statuses(tmp_path / "a" / "s") == [
        ("1f1b", "done"), ("gpipe", "failed"), ("foldx_fifo", "done"),
    ]  # fmt: skip
    done = run_here([*words, "sweep.fail_fast=true"], tmp_path / "b", monkeypatch, fail_gpipe)
    assert (done.code, len(done.calls)) == (1, 2)
    assert statuses(tmp_path / "b" / "s") == [("1f1b", "done"), ("gpipe", "failed")]
    assert "1 of 3 jobs did not run" in done.output
    assert (tmp_path / "b" / "s" / "0" / "result.json").is_file()


def test_the_best_job_is_named_with_the_command_that_repeats_it(tmp_path, monkeypatch):
    words = [*WORDS, "schedule=1f1b,foldx_fifo,gpipe", "pp=4", "model.layers=4"]
    done = run_here(words, tmp_path, monkeypatch, simulate)
    (line,) = [x for x in done.output.splitlines() if x.startswith("best by")]
    assert line == (
        "best by makespan (16.5 F): job 1: python -m launcher mode=simulate costs=uniform "
        "num_microbatches=4 schedule=foldx_fifo pp=4 model.layers=4"
    )


def test_what_is_best_can_be_chosen(tmp_path, monkeypatch):
    words = [*WORDS, "schedule=gpipe,1f1b", "pp=2", "sweep.metric=peak_activations_max"]
    done = run_here(words, tmp_path, monkeypatch, simulate)
    (line,) = [x for x in done.output.splitlines() if x.startswith("best by")]
    assert line.startswith("best by peak_activations_max (2): job 1: ")
    assert "sweep.metric" not in line


def test_jobs_that_cannot_be_compared_have_no_best(tmp_path, monkeypatch):
    """An F is what one rank does: with more ranks it is another one."""
    done = run_here([*WORDS, "pp=2,4"], tmp_path, monkeypatch, simulate)
    assert done.code == 0
    assert "best by" not in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "sweep.metric=los_last"], "Did you mean sweep.metric=loss_last?"),
        (["-m", "sweep.metric=weight_copies"], "is no figure that jobs are compared by"),
        (["sweep.fail_fast=true"], "Try it with -m."),
        (["sweep.metric=val_loss"], "Try it with -m."),
        (["sweep.dir=s"], "Try mode=collect"),
        (["-m", "mode=collect"], "Try it without -m."),
        (["mode=collect"], "Try sweep.dir=FOLDER"),
        (["mode=collect", "sweep.dir=nowhere"], "is no sweep's folder"),
    ],
)
def test_words_about_sweeps_are_refused_where_they_mean_nothing(
    words, message, tmp_path, monkeypatch
):
    done = run_here(words, tmp_path, monkeypatch)
    done.assert_refused()
    assert message in done.errors


def test_collecting_writes_the_files_of_the_sweep_again(tmp_path, monkeypatch):
    words = [*WORDS[:-1], "schedule=1f1b,foldx_fifo,gpipe", "pp=4"]
    folder = tmp_path / "multirun" / "x"
    ran = run_here([*words, f"hydra.sweep.dir={folder}"], tmp_path, monkeypatch, simulate)
    before = {path.name: path.read_bytes() for path in folder.glob("sweep.*")}
    assert len(before) == 4
    for name in before:
        (folder / name).unlink()
    done = run_here(["mode=collect"], tmp_path, monkeypatch)
    assert (done.code, done.errors, done.calls) == (0, "", [])
    assert {path.name: path.read_bytes() for path in folder.glob("sweep.*")} == before
    tail = done.output.splitlines()
    assert tail == ran.output.splitlines()[-len(tail) :]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["multirun"]


def test_collecting_tells_what_is_missing_and_what_failed(tmp_path, monkeypatch):
    run_here([*WORDS, "schedule=1f1b,gpipe,foldx_fifo", "pp=4"], tmp_path, monkeypatch, simulate)
    jobs = tmp_path / "s"
    (jobs / "0" / "result.json").unlink()
    failed = json.loads((jobs / "1" / "result.json").read_text())
    failed |= {"status": "failed", "error": "rank 1 was killed"}
    (jobs / "1" / "result.json").write_text(json.dumps(failed))
    done = run_here(["mode=collect", "sweep.dir=s"], tmp_path, monkeypatch)
    assert done.code == 1
    assert f"job 0 has not ended: {jobs / '0'}" in done.output
    assert "job 1 failed (exit 1): rank 1 was killed" in done.output
    assert "1 of 3 jobs have not ended" in done.output
    assert statuses(jobs) == [("gpipe", "failed"), ("foldx_fifo", "done")]
    with (jobs / "sweep.csv").open(newline="") as stream:
        assert [row["job"] for row in csv.DictReader(stream)] == ["1", "2"]


@pytest.mark.full
@pytest.mark.distributed
def test_six_fresh_runs_of_which_one_fails(tmp_path):
    """Job 2 finds something in the way of its checkpoint; the others are whole."""
    (tmp_path / "s" / "2").mkdir(parents=True)
    (tmp_path / "s" / "2" / "checkpoints").write_text("not a folder")
    words = [
        *MODEL, "-m", "pp=1,2,4", "schedule=1f1b,foldx_fifo", "trainer.max_steps=20",
        "model.layers=8", "hydra.sweep.dir=s",
    ]  # fmt: skip
    done = launch(words, tmp_path, timeout_s=280)
    assert done.code == 1
    assert "job 2 of the sweep failed (exit 1): " in done.errors
    assert "step-00000020.ckpt was not written" in done.errors
    assert statuses(tmp_path / "s") == [
        ("1f1b", "done"), ("foldx_fifo", "done"), ("1f1b", "failed"), ("foldx_fifo", "done"),
        ("1f1b", "done"), ("foldx_fifo", "done"),
    ]  # fmt: skip
    for index in (0, 1, 3, 4, 5):
        result = json.loads((tmp_path / "s" / str(index) / "result.json").read_text())
        assert (result["status"], result["steps"]) == ("done", 20)
        assert (Path(result["checkpoint"]) / "manifest.json").is_file()
    assert "best by tokens_per_s" in done.output
