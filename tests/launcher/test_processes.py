"""Ranks that fail, and runs that are ended: who is to blame, and that nothing is left running."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time

import pytest

from .conftest import TRAIN
from .runs import MODEL, launch, read_metrics, started, within

pytestmark = pytest.mark.distributed

LONG = (*MODEL, "trainer.max_steps=1000000", "trainer.val_check_interval=1000000")


def test_a_killed_rank_ends_the_run_and_is_named(tmp_path):
    with started([*LONG, "pp=2"], tmp_path) as run:
        run.wait_for_step(3)
        os.kill(run.rank(1), signal.SIGKILL)
        begin = time.monotonic()
        done = run.finish(timeout_s=10)
        assert time.monotonic() - begin < 5
        assert done.code == 1
        assert run.family() == {}
    assert done.errors.startswith("error: rank 1 on ")
    assert "SIGKILL" in done.errors
    assert "rank_00001.log" in done.errors
    assert "Traceback" not in done.errors.split("Its log", 1)[0]
    result = done.result
    assert result["status"] == "failed"
    assert f"error: {result['error']}\n" == done.errors
    assert result["schedule"] == "1f1b"
    # What was logged up to then is there.
    rows = read_metrics(done.folder)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_raising_rank_ends_the_run_and_is_named(rank, checkpoint, tmp_path):
    # One flipped bit in what this rank alone... both read, but only once the ranks have started.
    broken = tmp_path / "step-00000020.ckpt"
    shutil.copytree(checkpoint, broken)
    file = broken / f"rank_{rank:05d}.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    begin = time.monotonic()
    done = launch([*TRAIN, "trainer.max_steps=30", f"trainer.resume={broken}"], tmp_path / "run")
    assert time.monotonic() - begin < 60
    assert done.code == 1
    assert done.errors.startswith("error: rank ")
    assert f"failed first: CheckpointError: {file} is damaged" in done.errors
    assert done.result["status"] == "failed"
    assert f"error: {done.result['error']}\n" == done.errors


END = {
    "Ctrl-C, with a tracker's process": (signal.SIGINT, ["tracking=wandb"]),
    "SIGTERM, with loader processes": (signal.SIGTERM, ["pp=2", "data.num_workers=1"]),
}


@pytest.mark.parametrize(("number", "words"), END.values(), ids=END.keys())
def test_a_run_that_is_ended_leaves_no_process(number, words, tmp_path):
    with started([*LONG, *words], tmp_path) as run:
        run.wait_for_step(3)
        assert len(run.family()) >= 2
        run.process.send_signal(number)
        begin = time.monotonic()
        done = run.finish(timeout_s=10)
        assert time.monotonic() - begin < 5
        assert within(5 - (time.monotonic() - begin), lambda: run.family() == {}), run.family()
    assert (done.code, done.errors) == (130, "interrupted\n")
    assert (done.result["status"], done.result["error"]) == ("failed", "interrupted")


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path):
    with started([*LONG, "pp=2"], tmp_path) as run:
        run.wait_for_step(3)
        assert len(run.family()) == 2
        run.process.kill()
        run.process.wait()
        assert within(2, lambda: run.family() == {}), run.family()


def test_ctrl_c_ends_a_whole_sweep(tmp_path):
    words = [*LONG, "-m", "seed=0,1", "hydra.sweep.dir=sweep"]
    with started(words, tmp_path) as run:
        run.wait_for_step(2)
        run.process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        done = run.finish(timeout_s=10)
        assert time.monotonic() - begin < 5
        assert run.family() == {}
    assert done.code == 130
    assert "[2/2]" not in done.output


def test_a_terminal_that_goes_away_ends_the_run(tmp_path):
    with started([*LONG, "trainer.enable_progress_bar=true"], tmp_path) as run:
        run.wait_for_step(2)
        run.process.send_signal(signal.SIGHUP)
        with contextlib.suppress(TimeoutError):
            run.process.wait(10)
        assert within(3, lambda: run.family() == {}), run.family()
