"""A sweep that goes on: what is done stays, what was interrupted continues."""

from __future__ import annotations

import csv
import importlib
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from launcher.config import LaunchConfig
from launcher.processes.preempted import PrunedError
from launcher.report.sweep.files import report_sweep
from launcher.report.sweep.sweep_jobs import newest_record
from strategies.errors import RunError
from tests.launcher.command_line import run_here
from tests.launcher.runs import MODEL, launch

SIMULATED = ("-m", "mode=simulate", "costs=uniform", "pp=2", "schedule=1f1b,gpipe,zb_v,naive")
RESUME = "sweep.resume=s"


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "s" / "sweep.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def light(config: LaunchConfig, run_dir: Path) -> int:
    """A job with figures, and without the pictures that take most of the time."""
    figures = {"status": "done", "schedule": config.schedule.name, "makespan": 12.0}
    (run_dir / "result.json").write_text(json.dumps(figures | {"time_unit": "F"}))
    return 0


def interrupt_third(config: LaunchConfig, run_dir: Path) -> int:
    if config.schedule.name == "gpipe":
        raise RunError("rank 0 was killed")
    if config.schedule.name == "zb_v":
        raise KeyboardInterrupt
    return light(config, run_dir)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A folder in which a sweep was interrupted, and how that went."""
    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.MonkeyPatch.context() as patch:
        return run_here([*SIMULATED, "hydra.sweep.dir=s"], folder, patch, interrupt_third)


def test_jobs_that_are_done_are_not_run_again(tmp_path, monkeypatch):
    words = [*SIMULATED, "hydra.sweep.dir=s"]
    first = run_here(words, tmp_path, monkeypatch, interrupt_third)
    assert (first.code, len(first.calls)) == (130, 3)
    command = (
        "python -m launcher -m mode=simulate costs=uniform pp=2 schedule=1f1b,gpipe,zb_v,naive"
    )
    assert f"to go on: {command} sweep.resume=s" in first.output.splitlines()
    again = run_here([*SIMULATED, RESUME], tmp_path, monkeypatch, light)
    assert (again.code, again.errors) == (0, "")
    assert [call.run_dir.name for call in again.calls] == ["1", "2", "3"]
    assert again.output.startswith(f"goes on in {tmp_path / 's'}: 1 of 4 jobs are done")
    assert "to go on" not in again.output
    whole = run_here(words, tmp_path / "whole", monkeypatch, light)
    assert whole.code == 0
    assert rows(tmp_path) == rows(tmp_path / "whole")
    nothing = run_here([*SIMULATED, RESUME], tmp_path, monkeypatch, light)
    assert (nothing.code, nothing.calls) == (0, [])
    assert rows(tmp_path) == rows(tmp_path / "whole")


def test_an_interrupted_job_continues_from_its_checkpoint(tmp_path, monkeypatch):
    words = ["-m", "optimizer.lr=0.1,0.2", "trainer.resume=elsewhere"]

    def interrupt(config: LaunchConfig, run_dir: Path) -> int:
        raise KeyboardInterrupt

    (tmp_path / "elsewhere").touch()
    run_here([*words, "hydra.sweep.dir=s"], tmp_path, monkeypatch, interrupt)
    found = {tmp_path / "s" / "0": tmp_path / "s" / "0" / "checkpoints" / "step-7.ckpt"}
    monkeypatch.setattr("launcher.compose.multirun.newest_in", lambda folder: found.get(folder))
    again = run_here([*words, "sweep.resume=auto", "sweep.dir=null"], tmp_path, monkeypatch)
    assert again.code == 2  # the newest below multirun/, and there is none
    again = run_here([*words, RESUME], tmp_path, monkeypatch)
    assert [call.config.trainer.resume for call in again.calls] == [
        str(found[tmp_path / "s" / "0"]), "elsewhere",
    ]  # fmt: skip
    record = json.loads((tmp_path / "s" / "jobs.json").read_text())["jobs"]
    assert all("trainer.resume=elsewhere" in job["overrides"] for job in record)


def test_the_newest_sweep_is_the_one_that_began_last(tmp_path, monkeypatch, capsys):
    def place(name: str, begun: object) -> Path:
        folder = tmp_path / "multirun" / name
        folder.mkdir(parents=True)
        content = {"jobs": [{"overrides": ["pp=2"], "folder": None}]}
        text = json.dumps(content if begun is None else {"begun": begun, **content})
        (folder / "jobs.json").write_text(text)
        return folder

    named = place("named", None)  # of an earlier version
    assert newest_record(tmp_path / "multirun") == named
    assert capsys.readouterr().err == ""
    late, early, ahead = place("b", 2e9 - 1), place("c", 1e9), place("a", 9e9)
    monkeypatch.setattr("time.time", lambda: 2e9)
    for folder, age in ((early, 3), (named, 2), (late, 1)):
        os.utime(folder / "jobs.json", (2e9 - age, 2e9 + 9 - age))
    os.utime(early / "jobs.json")  # touched, copied or restored last of all
    assert newest_record(tmp_path / "multirun") == late  # whose clock was not ahead
    assert f"of {ahead} the clock was ahead" in "".join(capsys.readouterr())
    shutil.rmtree(ahead)
    wrong = [place(f"wrong{i}", begun) for i, begun in enumerate(("soon", True, float("nan"), -1))]
    (place("wrong4", 1) / "jobs.json").write_text("[" * 9999)
    (place("wrong5", 1) / "jobs.json").write_text("[]")
    capsys.readouterr()
    assert newest_record(tmp_path / "multirun") == late
    said = "".join(capsys.readouterr())
    assert said.count("skips ") == len(wrong) + 2
    assert f"chosen among 3 sweeps below {tmp_path / 'multirun'}: {late} (it began last," in said


@pytest.mark.parametrize(
    "place",
    [
        "job_start.run_job",
        "multirun.ended_job",
        pytest.param("job_start.asked_figures", marks=pytest.mark.full),
        pytest.param("multirun.report_so_far", marks=pytest.mark.full),
        pytest.param("multirun.write_record", marks=pytest.mark.full),
    ],
)
def test_a_signal_around_a_job_loses_no_row(place, tmp_path, monkeypatch):
    name = f"launcher.compose.{place}"
    module, _, attribute = name.rpartition(".")
    run = getattr(importlib.import_module(module), attribute)
    asked: list[int] = []

    def signalled(*arguments: object, **keywords: object) -> object:
        done = run(*arguments, **keywords)
        asked.append(1)
        if len(asked) == 2:  # of the second job
            signal.raise_signal(signal.SIGINT)
        return done

    monkeypatch.setattr(name, signalled)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = run_here([*SIMULATED, "hydra.sweep.dir=s"], tmp_path, monkeypatch, light)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.code, done.errors) == (130, "interrupted\n")
    second = "interrupted" if place == "multirun.write_record" else "done"  # before it began
    assert [row["status"] for row in rows(tmp_path)] == ["done", second]
    assert "2 of 4 jobs did not run" in done.output
    monkeypatch.undo()
    again = run_here([*SIMULATED, RESUME], tmp_path, monkeypatch, light)
    assert again.code == 0
    assert [row["status"] for row in rows(tmp_path)] == ["done"] * 4


def test_a_signal_while_pictures_are_drawn_leaves_the_table(tmp_path, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.compose.multirun.report_sweep", interrupted)
    done = run_here([*SIMULATED, "hydra.sweep.dir=s"], tmp_path, monkeypatch, light)
    assert (done.code, done.errors) == (130, "interrupted\n")
    assert [row["status"] for row in rows(tmp_path)] == ["done"] * 4


def test_ctrl_c_once_more_loses_neither_table_nor_how_to_go_on(tmp_path, monkeypatch):
    def report(*arguments: object, **keywords: object) -> None:
        signal.raise_signal(signal.SIGINT)
        report_sweep(*arguments, **keywords)

    monkeypatch.setattr("launcher.compose.multirun.report_sweep", report)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = run_here([*SIMULATED, "hydra.sweep.dir=s"], tmp_path, monkeypatch, interrupt_third)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.code, done.errors.splitlines()[-1]) == (130, "interrupted")
    assert [row["status"] for row in rows(tmp_path)] == ["done", "failed", "interrupted"]
    assert done.output.splitlines()[-1].startswith("to go on: python -m launcher -m ")


def test_a_sweep_that_goes_on_has_begun_again(tmp_path, monkeypatch):
    begun = []
    for words in (["hydra.sweep.dir=s"], [RESUME]):
        run_here([*SIMULATED, *words], tmp_path, monkeypatch, interrupt_third)
        begun.append(json.loads((tmp_path / "s" / "jobs.json").read_text())["begun"])
    assert begun[0] < begun[1] <= time.time()


def test_how_a_sweep_treats_its_jobs_may_change(tmp_path, monkeypatch):
    run_here([*SIMULATED, "hydra.sweep.dir=s"], tmp_path, monkeypatch, interrupt_third)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cores: None)
    words = [*SIMULATED, RESUME, "sweep.parallel=2"]
    again = run_here(words, tmp_path, monkeypatch, light)
    assert again.code == 0
    assert [row["status"] for row in rows(tmp_path)] == ["done"] * 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*SIMULATED[:-1], "schedule=1f1b,gpipe", RESUME), "has 4 jobs, and these words 2"),
        ((*SIMULATED, "num_microbatches=4", RESUME), "job 0 of that sweep is mode=simulate"),
        ((*SIMULATED, "sweep.resume=nowhere"), "is no sweep's folder"),
        ((*SIMULATED, "sweep.resume=auto"), "there is no sweep below multirun"),
        ((*SIMULATED, RESUME, "hydra.sweep.dir=t"), "Try it without hydra.sweep.dir"),
        (("mode=simulate", RESUME), "Try it with -m."),
        (("-m", "cluster=slurm", "pp=1,2", RESUME), "Try mode=collect"),
    ],
)
def test_another_sweep_than_that_of_the_folder_is_refused(words, message, interrupted, monkeypatch):
    folder = interrupted.folder
    before = sorted(folder.rglob("*"))
    done = run_here(list(words), folder, monkeypatch)
    assert (done.code, done.calls) == (2, [])
    assert message in done.errors
    assert sorted(folder.rglob("*")) == before


def test_a_pruned_job_has_a_row_and_fails_nothing(tmp_path, monkeypatch):
    def prune(config: LaunchConfig, run_dir: Path) -> int:
        if config.schedule.name == "gpipe":
            (run_dir / "result.json").write_text('{"status": "pruned", "loss_last": 9.5}')
            raise PrunedError("train_loss 9.5 at step 8 is above 3.1", {})
        return light(config, run_dir)

    words = [*SIMULATED[:-1], "schedule=1f1b,gpipe"]
    done = run_here([*words, "hydra.sweep.dir=s"], tmp_path, monkeypatch, prune)
    assert (done.code, done.errors) == (0, "")
    assert [row["status"] for row in rows(tmp_path)] == ["done", "pruned"]
    assert "[2/2] schedule=gpipe  pruned  last loss 9.5000; 0 s" in done.output
    again = run_here([*words, RESUME], tmp_path, monkeypatch)
    assert (again.code, again.calls) == (0, [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep.prune_at=[5]"], "sweep.prune_at is about the jobs of a sweep. Try it with -m."),
        (["-m", "pp=1,2", "mode=simulate", "sweep.prune_at=[5]"], "ends jobs that train"),
        (["-m", "pp=1,2", "sweep.prune_at=[60]"], "trainer.max_steps=60"),
        (["-m", "pp=1,2", "sweep.prune_at=[0]"], "sweep.prune_at"),
    ],
)
def test_pruning_that_cannot_be_is_refused(words, message, tmp_path, monkeypatch):
    done = run_here(words, tmp_path, monkeypatch)
    done.assert_refused()
    assert message in done.errors


@pytest.mark.distributed
@pytest.mark.full
def test_a_job_with_a_hopeless_rate_is_pruned(tmp_path):
    words = [
        *MODEL, "-m", "pp=2", "optimizer.lr=0.003,0.002,10.0", "trainer.max_steps=12",
        "sweep.prune_at=[6]", "sweep.prune_after=2", "trainer.limit_val_batches=0",
        "tracking=none", "hydra.sweep.dir=s",
    ]  # fmt: skip
    done = launch(words, tmp_path).assert_done()
    assert [row["status"] for row in rows(tmp_path)] == ["done", "done", "pruned"]
    result = json.loads((tmp_path / "s" / "2" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("pruned", 6)
    with (tmp_path / "s" / "pruning.csv").open(newline="") as stream:
        assert [row["verdict"] for row in csv.DictReader(stream)] == ["goes on"] * 2 + ["pruned"]
    assert "the median of 2 other jobs" in done.output
