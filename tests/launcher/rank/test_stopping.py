"""A run that is asked to stop: a checkpoint at a step that all ranks agree on, and exit code 85."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.launcher.runs import MODEL, launch, read_metrics, started

pytestmark = pytest.mark.distributed

RUN = (
    *MODEL, "pp=2", "data.microbatch_size=2", "seed=3", "trainer.precision=64-true",
    "trainer.val_check_interval=1000000", "trainer.checkpoint_every_n_steps=7",
)  # fmt: skip


@pytest.mark.parametrize("who", ["the launcher", "one rank"])
def test_a_signal_ends_a_run_with_a_checkpoint_that_goes_on(who, tmp_path):
    save = ("trainer.save_last=false",) if who == "one rank" else ()
    with started(
        [*RUN, *save, "trainer.max_steps=1000000", "hydra.run.dir=a/run"], tmp_path
    ) as run:
        run.wait_for_step(5)
        pid = run.process.pid if who == "the launcher" else run.rank(1)
        begin = time.monotonic()
        number = signal.SIGTERM if who == "the launcher" else signal.SIGUSR1
        os.kill(pid, number)
        done = run.finish(timeout_s=20)
        assert time.monotonic() - begin < 10
        assert done.code == 85
        assert run.family() == {}
    result = done.result
    steps, folder = result["steps"], Path(str(result["checkpoint"]))
    assert result["status"] == "preempted"
    assert folder == tmp_path / "a" / "run" / "checkpoints" / f"step-{steps:08d}.ckpt"
    assert done.errors == (
        f"error: {number.name} has stopped the run after step {steps}, "
        f"with a checkpoint: {folder}. Continue with trainer.resume={folder}.\n"
    )
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
