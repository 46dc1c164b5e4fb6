"""Jobs of a sweep side by side: as in turn, each with its share, and ended together."""

from __future__ import annotations

import csv
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.commands.layouts import simulate
from launcher.compose.job_pool import check_parallel, shares
from launcher.config import LaunchConfig
from launcher.config.running import SweepConfig
from strategies.errors import PlanError
from tests.launcher.command_line import run_here

WORDS = ("-m", "mode=simulate", "costs=uniform", "pp=2", "hydra.sweep.dir=s", "sweep.parallel=2")


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {2, 3, 5, 7})
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cores: None)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "s" / "sweep.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_jobs_side_by_side_leave_what_jobs_in_turn_leave(tmp_path, monkeypatch):
    schedules = "schedule=1f1b,zb_v,gpipe"
    beside = run_here([*WORDS, schedules], tmp_path / "a", monkeypatch, simulate)
    run_here([*WORDS[:-1], schedules], tmp_path / "b", monkeypatch, simulate)
    assert (beside.code, beside.errors) == (0, "")
    assert beside.calls == []  # other processes have run them
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    first, *lines = beside.output.splitlines()
    assert first.endswith("2 side by side: their times are those of a share")
    assert [line[:6] for line in lines[:3]] == [f"[{n}/3] " for n in range(1, 4)]
    for index in range(3):
        written = (tmp_path / "a" / "s" / str(index) / "output.txt").read_text()
        assert "bubble ratio" in written
        assert f"files: {tmp_path / 'a' / 's' / str(index)}" in written


def test_verbose_prints_what_each_job_has_said(tmp_path, monkeypatch):
    words = [*WORDS, "--verbose", "schedule=1f1b,gpipe"]
    done = run_here(words, tmp_path, monkeypatch, simulate)
    assert done.output.count("bubble ratio") == 2


def test_a_job_that_is_killed_fails_and_the_others_run(tmp_path, monkeypatch):
    def die(config: LaunchConfig, run_dir: Path) -> int:
        if config.schedule.name == "gpipe":
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    done = run_here([*WORDS, "schedule=1f1b,gpipe,zb_v,naive"], tmp_path, monkeypatch, die)
    assert done.code == 1
    assert [row["status"] for row in rows(tmp_path)] == ["done", "failed", "done", "done"]
    assert "job 1 of the sweep failed (exit 1)" in done.errors
    assert "SIGKILL" in rows(tmp_path)[1]["error"]


def test_a_failing_job_ends_those_beside_it_where_that_is_asked_for(tmp_path, monkeypatch):
    def fail_or_wait(config: LaunchConfig, run_dir: Path) -> int:
        ready = run_dir.parent / "0" / "ready"
        if config.schedule.name == "gpipe":
            while not ready.is_file():  # What has not begun has no row.
                time.sleep(0.01)
            raise PlanError("no")
        ready.touch()
        time.sleep(60)
        return 0

    words = [*WORDS, "schedule=1f1b,gpipe,zb_v", "sweep.fail_fast=true"]
    done = run_here(words, tmp_path, monkeypatch, fail_or_wait)
    assert done.code == 130  # of the first job, in their order
    assert [row["status"] for row in rows(tmp_path)] == ["interrupted", "refused"]
    assert "1 of 3 jobs did not run" in done.output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 85)])
def test_a_signal_reaches_every_job_and_the_table_is_written(number, code, tmp_path, monkeypatch):
    sweep = os.getpid()

    def wait(config: LaunchConfig, run_dir: Path) -> int:
        asked: list[int] = []
        signal.signal(number, lambda found, _: asked.append(found))
        if config.schedule.name == "gpipe":
            while not (run_dir.parent / "0" / "ready").is_file():
                time.sleep(0.01)
            os.kill(sweep, number)
        else:
            (run_dir / "ready").touch()
        until = time.monotonic() + 60
        while not asked and time.monotonic() < until:
            time.sleep(0.01)
        return code if asked else 0

    # Also where somebody who has started the tests in the background made all ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = run_here([*WORDS, "schedule=1f1b,gpipe,zb_v"], tmp_path, monkeypatch, wait)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.code == code
    status = {130: "interrupted", 85: "preempted"}[code]
    assert [row["status"] for row in rows(tmp_path)] == [status, status]
    assert "1 of 3 jobs did not run" in done.output
    assert ("stopping 2 jobs" in done.errors) == (code == 130)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "pp=1,2", "sweep.parallel=5"], "this machine has 4 cores"),
        (["sweep.parallel=2"], "Try it with -m."),
        (["-m", "pp=1,2", "sweep.parallel=2", "cluster=slurm"], "cluster=slurm submits jobs"),
        (["-m", "pp=1,2", "mode=profile", "profile.file=p.json", "sweep.parallel=2"], "measures"),
        (["-m", "sweep.parallel=1,2"], "is about the whole sweep"),
        (["-m", "pp=1,2", "sweep.parallel=0"], "sweep.parallel=0"),
    ],
)
def test_more_than_the_machine_has_is_refused(words, message, tmp_path, monkeypatch):
    done = run_here(words, tmp_path, monkeypatch)
    done.assert_refused()
    assert message in done.errors


def test_gpus_and_memory_are_counted_over_all_jobs(monkeypatch):
    def asked(pp: int, device: str = "cpu", parallel: int = 4) -> LaunchConfig:
        config = LaunchConfig(pp=pp, sweep=SweepConfig(parallel=parallel))
        return replace(config, trainer=replace(config.trainer, accelerator=device))

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with pytest.raises(PlanError, match=r"up to 2 ranks take 8 GPUs.*has 4. Try sweep.parallel=2"):
        check_parallel([asked(1, "gpu"), asked(2, "gpu")])
    check_parallel([asked(2, "gpu", parallel=2)])
    with pytest.raises(PlanError, match=r"have 4000 ranks at once.*Try sweep.parallel=1"):
        check_parallel([asked(1000)] * 4)


def test_cores_and_gpus_are_shared_out(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,4,5,7")
    assert [(s.cores, s.gpus) for s in shares(2)] == [((2, 3), ("0", "4")), ((5, 7), ("5", "7"))]
    assert [s.cores for s in shares(3)] == [(2,), (3,), (5,)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [s.gpus for s in shares(2)] == [None, None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert [s.gpus for s in shares(2)] == [("3",), ("3",)]
