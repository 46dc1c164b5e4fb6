"""Ranks that torchrun has started: joined as they are, refused with one message."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.config import from_dict
from launcher.processes import torchrun
from strategies.errors import PlanError
from tests.launcher.command_line import run_here
from tests.launcher.conftest import TRAIN
from tests.launcher.runs import (
    MODEL,
    environment,
    launch,
    processes_with,
    read_metrics,
    read_result,
    within,
)

RUN = (*MODEL, "trainer.max_steps=6", "trainer.limit_val_batches=1", "trainer.precision=64-true")
INSIDE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x",
}  # fmt: skip


def command(*words: str, processes: int = 2, flags: tuple[str, ...] = ()) -> list[str]:
    start = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", *flags]
    return [sys.executable, *start, "-m", "launcher", *words]


def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INSIDE:
        monkeypatch.delenv(name, raising=False)


def test_without_torchrun_the_command_is_named(tmp_path, monkeypatch):
    outside(monkeypatch)
    config = from_dict({"cluster": {"name": "torchrun"}})
    assert not torchrun.joins(["cluster=torchrun"])
    with pytest.raises(PlanError, match=r"RANK, LOCAL_RANK, .* are not in the envir"):
        torchrun.num_nodes()
    done = run_here(["cluster=torchrun", "hydra.run.dir=run"], tmp_path, monkeypatch)
    assert (done.code, done.calls) == (2, [])
    torchrun.check_world(4, mode="train")  # nothing to compare with
    torchrun.refuse_stray(config)


def test_one_run_per_process_of_torchrun_is_refused(tmp_path, monkeypatch):
    for name, value in INSIDE.items():
        monkeypatch.setenv(name, value)
    done = run_here(["pp=2"], tmp_path, monkeypatch)
    done.assert_refused()
    assert "Try cluster=torchrun." in done.errors
    # What starts no ranks is nobody's business.
    assert run_here(["mode=simulate"], tmp_path / "b", monkeypatch).code == 0


def test_nodes_are_counted(monkeypatch):
    for name, value in {**INSIDE, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert torchrun.num_nodes() == 2
    with pytest.raises(PlanError, match="= 4 ranks, but torchrun has started 8 processes"):
        torchrun.check_world(4, mode="train")
    torchrun.check_world(8, mode="train")


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_joined_run_is_the_same_as_one_of_our_own(processes, trained, tmp_path):
    words = [word for word in TRAIN if word != "pp=2"] + [f"pp={processes}"]
    ours = trained if processes == 2 else launch(words, tmp_path / "ours").assert_done()
    start = command(
        "cluster=torchrun",
        *words,
        "hydra.run.dir=run",
        processes=processes,
        flags=("--standalone",),
    )
    done = subprocess.run(
        start,
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    theirs = tmp_path / "run"
    mine = [row["train_loss"] for row in read_metrics(ours.folder)]
    assert [row["train_loss"] for row in read_metrics(theirs)] == mine
    result = read_result(theirs)
    assert set(result) == set(ours.result)
    assert (result["status"], result["world_size"]) == ("done", processes)
    assert result["loss_last"] == ours.result["loss_last"]
    assert done.stdout.count(f"files: {theirs}") == 1


@pytest.mark.full  # test_torchrun_protocol has the leader that refuses, and its follower.
@pytest.mark.distributed
def test_a_wrong_request_is_said_once_and_ends_all(tmp_path):
    done = subprocess.run(
        command("cluster=torchrun", *RUN, "pp=4", "hydra.run.dir=run"),
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert done.stderr.count("error: pp * dp * tp = 4 ranks, but torchrun has started 2") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.distributed
def test_two_nodes_with_the_printed_commands_and_a_signal(tmp_path):
    words = [*MODEL, "pp=4", "cluster.nodes=2", "cluster.master=127.0.0.1:29561"]
    long = ["trainer.max_steps=1000000", "trainer.val_check_interval=1000000"]
    shown = launch(["mode=validate", *words, *long], tmp_path / "v").assert_done().output
    lines = [x.partition(": ")[2] for x in shown.splitlines() if x.startswith("command on node")]
    assert len(lines) == 2
    env = environment(tmp_path, FOLDPIPE_TEST=str(tmp_path))
    agents = [
        subprocess.Popen(
            [sys.executable, *shlex.split(line)[1:], "hydra.run.dir=run"],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for line in lines
    ]
    try:
        metrics = tmp_path / "run" / "metrics.csv"
        assert within(90, lambda: metrics.is_file() and len(metrics.read_text().splitlines()) > 5)
        ranks = processes_with(f"FOLDPIPE_TEST={tmp_path}")
        nodes = {}
        for pid in ranks:
            given = (Path("/proc") / str(pid) / "environ").read_bytes().decode().split("\0")
            found = dict(item.partition("=")[::2] for item in given)
            if "GROUP_RANK" in found:
                nodes[int(found["RANK"])] = int(found["GROUP_RANK"])
        assert nodes == {0: 0, 1: 0, 2: 1, 3: 1}
        os.kill(next(p for p in ranks if b"\0RANK=3\0" in environ(p)), signal.SIGUSR1)
        assert [agent.wait(60) != 0 for agent in agents] == [True, True]
        result = read_result(tmp_path / "run")
        assert result["status"] == "preempted"
        assert Path(str(result["checkpoint"])).is_dir()
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
        for pid in processes_with(f"FOLDPIPE_TEST={tmp_path}"):
            os.kill(pid, signal.SIGKILL)


def environ(pid: int) -> bytes:
    return b"\0" + (Path("/proc") / str(pid) / "environ").read_bytes()
