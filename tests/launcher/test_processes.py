"""Ranks that fail, and runs that are ended: who is to blame, and that nothing is left running."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket

import pytest

from tests.launcher.command_line import launch_here
from tests.launcher.runs import MODEL, launch, read_metrics, started, within

pytestmark = pytest.mark.distributed

LONG = (*MODEL, "trainer.max_steps=1000000", "trainer.val_check_interval=1000000")


@pytest.mark.full  # Every day: tests/faults/test_killed_and_stopped.
def test_a_killed_rank_ends_the_run_and_is_named(tmp_path):
    # What an earlier run in the same folder died of is no news.
    stale = tmp_path / "here" / "logs" / "rank_00001.error.json"
    stale.parent.mkdir(parents=True)
    old = {"rank": 1, "host": "h", "at": 0.0, "kind": "Old", "message": "old", "exit_code": 1}
    stale.write_text(json.dumps(old))
    with started([*LONG, "pp=2", "hydra.run.dir=here"], tmp_path) as run:
        run.wait_for_step(3)
        os.kill(run.rank(1), signal.SIGKILL)
        done = run.finish(timeout_s=60)
        assert done.code == 1
        assert run.family() == {}
    assert done.errors.startswith("error: rank 1 on ")
    assert "SIGKILL" in done.errors
    assert re.search(r"\nIt was at step \d+ in .+\.\nIts log ", done.errors)
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


def test_a_raising_rank_ends_the_run_and_is_named(tmp_path):
    # Rank 0 cannot make the folder; all others only hear that it could not.
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "checkpoints").write_text("not a folder")
    words = [*MODEL, "pp=2", "trainer.max_steps=2", "trainer.limit_val_batches=0"]
    done = launch([*words, f"hydra.run.dir={folder}"], tmp_path)
    assert done.code == 1
    host = socket.gethostname()
    assert done.errors.startswith(f"error: rank 0 on {host} failed first: CheckpointError: ")
    assert "step-00000002.ckpt was not written: " in done.errors
    assert done.result["status"] == "failed"
    assert f"error: {done.result['error']}\n" == done.errors


@pytest.mark.parametrize("mode", ["generate", "validate"])
def test_a_damaged_checkpoint_is_refused_before_anything_starts(checkpoint, tmp_path, mode):
    broken = tmp_path / "step-00000020.ckpt"
    shutil.copytree(checkpoint, broken)
    file = broken / "rank_00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    key = "checkpoint" if mode == "generate" else "trainer.resume"
    done = launch_here([*MODEL, f"mode={mode}", f"{key}={broken}"], tmp_path / "run")
    assert done.code == 2
    assert done.errors.startswith(f"error: {file} is damaged: expected SHA-256 ")
    assert ", found " in done.errors
    assert list((tmp_path / "run").rglob("result.json")) == []


END = {
    "Ctrl-C, in a sweep with a tracker's process": (
        signal.SIGINT,
        ["-m", "seed=0,1", "hydra.sweep.dir=sweep", "tracking=wandb"],
    ),
    "Ctrl-C twice, with loader processes": (signal.SIGINT, ["pp=2", "data.num_workers=1"]),
}


# Every day, of a sweep: rank/test_stopping.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full if "sweep" in n else ()) for n in END]
)
def test_a_run_that_is_ended_leaves_no_process(name, tmp_path):
    number, words = END[name]
    with started([*LONG, *words], tmp_path) as run:
        run.wait_for_step(3)
        assert len(run.family()) >= 2
        run.process.send_signal(number)
        if "twice" in name:
            assert within(30, lambda: "stopping after this step" in run.errors)
            run.process.send_signal(number)
        done = run.finish(timeout_s=60)
        assert within(30, lambda: run.family() == {}), run.family()
    assert "[2/2]" not in done.output
    assert done.code == 130
    assert done.result["status"] == "interrupted"
    if "twice" not in name:
        told = "\njob 0 interrupted (exit 130): SIGINT has stopped the run after step "
        assert told in done.output


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path):
    with started([*LONG, "pp=2"], tmp_path) as run:
        run.wait_for_step(3)
        assert len(run.ranks()) == 2
        run.process.kill()
        run.process.wait()
        assert within(30, lambda: run.family() == {}), run.family()
