"""A run that is asked to stop: a checkpoint at a step that all ranks agree on, and exit code 85."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from launcher.processes.watchdog import State, state_of
from tests.launcher.runs import MODEL, launch, parent, read_metrics, started, within

pytestmark = pytest.mark.distributed

RUN = (
    *MODEL, "pp=2", "data.microbatch_size=2", "seed=3", "trainer.precision=64-true",
    "trainer.val_check_interval=1000000", "trainer.checkpoint_every_n_steps=7",
)  # fmt: skip


@pytest.mark.parametrize("who", ["the launcher", pytest.param("one rank", marks=pytest.mark.full)])
def test_a_signal_ends_a_run_with_a_checkpoint_that_goes_on(who, tmp_path):
    save = ("trainer.save_last=false",) if who == "one rank" else ()
    with started(
        [*RUN, *save, "trainer.max_steps=1000000", "hydra.run.dir=a/run"], tmp_path
    ) as run:
        run.wait_for_step(5)
        pid = run.process.pid if who == "the launcher" else run.rank(1)
        number = signal.SIGTERM if who == "the launcher" else signal.SIGUSR1
        os.kill(pid, number)
        done = run.finish(timeout_s=60)
        assert done.code == 85
        assert run.family() == {}
    result = done.result
    steps, folder = result["steps"], Path(str(result["checkpoint"]))
    assert result["status"] == "preempted"
    assert folder == tmp_path / "a" / "run" / "checkpoints" / f"step-{steps:08d}.ckpt"
    said, command = done.errors.rstrip("\n").split(" python -m launcher ")
    assert said == (
        f"error: {number.name} has stopped the run after step {steps}, "
        f"with a checkpoint: {folder}. Continue with"
    )
    assert command.split() == [*RUN, *save, "trainer.max_steps=1000000", f"trainer.resume={folder}"]
    rows = read_metrics(done.folder)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    if who == "one rank":
        return
    # In the same folder, the table goes on, and no loss differs from those of a run on its own.
    most = f"trainer.max_steps={steps + 5}"
    words = [*RUN, most, f"trainer.resume={folder}", f"hydra.run.dir={tmp_path}/a/run"]
    launch(words, tmp_path / "b").assert_done()
    whole = launch([*RUN, most, "hydra.run.dir=run"], tmp_path / "c").assert_done()
    continued, straight = read_metrics(tmp_path / "a" / "run"), read_metrics(whole.folder)
    assert [row["step"] for row in continued] == list(range(1, steps + 6))
    losses = [row["train_loss"] for row in straight]
    assert [row["train_loss"] for row in continued] == losses


def everybody(run):
    """The launcher, its ranks, their loaders, what forks them: whom a scheduler signals."""
    return [run.process.pid, *run.family(), parent(run.rank(0))]


@pytest.mark.parametrize(
    ("number", "code", "status"),
    [
        (signal.SIGTERM, 85, "preempted"),
        pytest.param(signal.SIGHUP, 85, "preempted", marks=pytest.mark.full),
        pytest.param(signal.SIGINT, 130, "interrupted", marks=pytest.mark.full),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_whatever_ends_a_run_leaves_a_checkpoint_with_loaders_and_inside_a_validation(
    number, code, status, tmp_path
):
    long = number != signal.SIGHUP
    # A terminal that closes takes with it what is written there, besides sending SIGHUP.
    screen, terminal = (None, None) if long else os.openpty()
    words = [
        *RUN, "data.num_workers=1", "trainer.max_steps=1000000", "hydra.run.dir=run",
        "trainer.limit_val_batches=1.0", "data.max_bytes=3000000", "data.val_fraction=0.5",
        f"trainer.val_check_interval={4 if long else 1000000}",
    ]  # fmt: skip
    with started(words, tmp_path, terminal=terminal) as run:
        run.wait_for_step(3, timeout_s=180)
        if long:
            time.sleep(2)  # in the first of many batches
        else:
            os.close(terminal)
            os.close(screen)
        for pid in everybody(run) if number == signal.SIGTERM else [run.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number != signal.SIGHUP:  # as what ends a session does, or a terminal after Ctrl-C
            time.sleep(0.2)
            with contextlib.suppress(ProcessLookupError):
                os.kill(run.process.pid, signal.SIGHUP)
        done = run.finish(timeout_s=60)
        assert run.family() == {}
    assert done.code == code, done.errors
    result = done.result
    assert result["status"] == status
    assert (Path(str(result["checkpoint"])) / "manifest.json").is_file()
    said = done.errors if long else result["error"]
    assert f"{number.name} has stopped the run after step {result['steps']}" in said
    rows = read_metrics(done.folder)
    assert [row["step"] for row in rows] == list(range(1, int(result["steps"]) + 1))
    # What some batches of a validation give is not the figure of that validation.
    assert not any(row.get("val_loss") for row in rows)
    if number == signal.SIGINT:
        assert "stopping after this step, with a checkpoint" in done.errors


@pytest.mark.full  # Every day: test_sigterm_before_the_first_step, in tests/faults/test_signals.
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_while_ranks_begin_leaves_none_of_them_and_says_how_it_ended(number, tmp_path):
    words = [*RUN, "trainer.max_steps=1000000", "hydra.run.dir=run"]
    with started(words, tmp_path) as run:
        assert within(60, (tmp_path / "run" / "logs").is_dir)
        os.kill(run.process.pid, number)
        done = run.finish(timeout_s=60)
        assert within(10, lambda: run.family() == {})
    assert "Traceback" not in done.errors
    if done.code == 130:  # before any rank could have saved anything
        assert done.errors.endswith("interrupted\n")
        assert not list((tmp_path / "run").rglob("manifest.json"))
    else:  # ranks had heard it, and trained until all of them knew
        assert done.code == 85
        assert (Path(str(done.result["checkpoint"])) / "manifest.json").is_file()


def test_a_signal_ends_a_sweep_with_its_job_and_a_table(tmp_path):
    words = [*RUN, "-m", "seed=1,2", "trainer.max_steps=1000000", "hydra.sweep.dir=s"]
    with started(words, tmp_path) as run:
        run.wait_for_step(3)
        os.kill(run.process.pid, signal.SIGHUP)
        done = run.finish(timeout_s=60)
        assert run.family() == {}
    assert done.code == 85
    assert "preempted" in (tmp_path / "s" / "sweep.csv").read_text()


@pytest.mark.full  # Every day: test_a_signal_around_a_job_loses_no_row, in compose/test_multirun.
def test_a_signal_between_two_jobs_of_a_sweep_leaves_its_table(tmp_path):
    words = ["-m", "mode=simulate", "costs=uniform", "hydra.sweep.dir=s", "pp=2,4"]
    words += ["num_microbatches=" + ",".join(str(8 * n) for n in range(1, 16))]
    with started(words, tmp_path) as run:
        assert within(60, (tmp_path / "s" / "0" / "result.json").is_file)
        os.kill(run.process.pid, signal.SIGTERM)
        done = run.finish(timeout_s=60)
    assert (done.code, done.errors) == (130, "interrupted\n")
    assert (tmp_path / "s" / "sweep.csv").read_text().count("\n") > 1


def test_a_pause_stops_the_ranks_with_the_launcher_and_time_alone_brings_checkpoints(tmp_path):
    words = [
        *RUN, "trainer.max_steps=1000000", "hydra.run.dir=run", "trainer.watchdog_s=1",
        "trainer.checkpoint_every_n_steps=null", "trainer.checkpoint_every_minutes=0.005",
    ]  # fmt: skip
    with started(words, tmp_path) as run:
        run.wait_for_step(3)
        kept = tmp_path / "run" / "checkpoints"
        assert within(60, lambda: len(list(kept.glob("*.ckpt/manifest.json"))) > 1)
        os.kill(run.process.pid, signal.SIGTSTP)
        ranks = run.ranks().values()
        assert within(30, lambda: all(state_of(pid) is State.STOPPED for pid in ranks))
        rows = len(read_metrics(tmp_path / "run"))
        time.sleep(2.5)
        assert len(read_metrics(tmp_path / "run")) == rows
        os.kill(run.process.pid, signal.SIGCONT)
        assert within(60, lambda: len(read_metrics(tmp_path / "run")) > rows + 3)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.finish(timeout_s=60).code == 85
    # trainer.keep_last holds for these as for others.
    assert len(list(kept.glob("*.ckpt"))) <= 4
