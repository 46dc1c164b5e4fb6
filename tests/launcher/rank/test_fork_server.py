"""Ranks that are forked do not differ from ranks that are started, nor outlive what forked them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.commands import ranks
from launcher.config import check, from_dict
from launcher.processes.local import rank_environment
from launcher.processes.rank_server import RankServer
from strategies.errors import PlanError
from tests.launcher.runs import MODEL, Started, parent, read_metrics, started, within

LONG = (*MODEL, "pp=2", "trainer.max_steps=1000000", "trainer.val_check_interval=1000000")
# What is of one run or one process, in the environment of a rank.
OF_ONE = ("FOLDPIPE_", "MASTER_PORT", "HOME", "MPLCONFIGDIR")


def _server(run: Started) -> int:
    return parent(run.rank(0))


def _has_another_server(run: Started, lost: int) -> bool:
    ranks = run.ranks()
    with contextlib.suppress(OSError):  # One has ended meanwhile.
        return len(ranks) == 2 and parent(ranks[0]) != lost
    return False


def _shown(run: Started, rank: int) -> dict[str, Any]:
    """What the kernel says of a rank."""
    proc = Path("/proc") / str(run.rank(rank))
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    variables = (proc / "environ").read_bytes().rstrip(b"\0").decode().split("\0")
    stat = (proc / "stat").read_text().rpartition(")")[2].split()
    return {
        "words": (proc / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")[1:-1],
        "variables": sorted(word for word in variables if not word.startswith(OF_ONE)),
        "named files": sorted(
            word.partition("=")[0] for word in variables if word.startswith("FOLDPIPE_")
        ),
        "leads its session": stat[3] == proc.name,
        "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")],
        "mask": status["Umask"],
        "input": os.readlink(proc / "fd" / "0"),
        "output": [Path(os.readlink(proc / "fd" / name)).name for name in ("1", "2")],
        "folder": os.readlink(proc / "cwd") == str(run.cwd),
    }


@pytest.mark.full
@pytest.mark.distributed
def test_a_forked_rank_is_what_a_started_one_is_and_a_lost_server_is_replaced(tmp_path):
    shown, losses, logs = {}, {}, {}
    for start in ("fresh", "fork"):
        words = [*LONG, f"cluster.start={start}", "trainer.max_restarts=1", "hydra.run.dir=here"]
        with started(words, tmp_path / start) as run:
            run.wait_for_step(5)
            assert (_server(run) != run.process.pid) == (start != "fresh")
            shown[start] = [_shown(run, rank) for rank in range(2)]
            losses[start] = [row["train_loss"] for row in read_metrics(run.cwd / "here")][:5]
            logs[start] = (run.cwd / "here" / "logs" / "rank_00001.log").read_text()
            if start == "fork":
                lost = _server(run)
                os.kill(lost, signal.SIGKILL)
                assert within(60, lambda: _has_another_server(run, lost))  # noqa: B023
                os.kill(_server(run), signal.SIGKILL)
                done = run.finish(timeout_s=60)
                assert run.family() == {}
    assert shown["fork"] == shown["fresh"]
    assert losses["fork"] == losses["fresh"]
    assert logs["fork"] == logs["fresh"]
    first, second = shown["fork"]
    assert (first["output"], second["output"]) == (["rank_00000.log"] * 2, ["rank_00001.log"] * 2)
    assert "RANK=1" in second["variables"]
    assert "\nrestart 1 of 1 from the beginning: rank 0 on " in done.output
    assert done.code == 1
    assert re.match(
        r"error: the process that ranks are forked from has ended \(SIGKILL, by somebody, or by "
        r"the system for lack of memory\), and they with it\. Try again, or cluster\.start=fresh",
        done.errors,
    )
    assert "trainer.max_restarts=1 are used up" in done.errors


@pytest.mark.full
@pytest.mark.distributed
def test_jobs_of_a_sweep_are_forked_from_one_server_that_does_not_outlive_a_killed_launcher(
    tmp_path,
):
    words = [*LONG, "-m", "seed=0,1", "cluster.start=auto", "trainer.max_steps=40"]
    with started(words, tmp_path) as run:
        run.wait_for_step(3)
        first, ranks = _server(run), set(run.ranks().values())
        assert within(60, lambda: len(run.ranks()) == 2 and not ranks & set(run.ranks().values()))
        assert _server(run) == first
        assert len(run.family()) == 3
        run.process.kill()
        run.process.wait()
        assert within(30, lambda: run.family() == {}), run.family()


def test_a_rank_that_ends_as_soon_as_it_has_started_is_known():
    """Both words may be heard in one go, before the start has returned."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = RankServer.__new__(RankServer)
    server._socket, server._ranks, server._started, server.code = ours, {}, None, None
    with ours, theirs:
        theirs.send(b'{"started": 7}')
        theirs.send(b'{"ended": 7, "code": 2, "peak_bytes": 5}')
        server.listen()
        rank = server._started
        assert rank is not None
        assert (rank.pid, rank.returncode, rank.peak_bytes) == (7, 2, 5)
        assert server._ranks == {}


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"start": "fresch"}, "fresh"),
        ({"start": "fork", "name": "slurm"}, "cluster.start=fork is for ranks that the launcher"),
        ({"start": "fresh", "name": "torchrun"}, "Try cluster=local, or without cluster.start."),
    ],
)
def test_a_start_that_has_no_meaning_is_refused(cluster, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        check(from_dict({"cluster": cluster}))


def test_forks_are_for_linux(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(PlanError, match=r"cluster\.start=fork needs Linux"):
        check(from_dict({"cluster": {"start": "fork"}}))
    check(from_dict({"cluster": {"start": "auto"}}))


@pytest.mark.parametrize("accelerator", ["cpu", "gpu"])
def test_ranks_are_forked_on_linux_alone(monkeypatch, accelerator):
    config = from_dict({"trainer": {"accelerator": accelerator}})
    monkeypatch.setattr(ranks, "rank_server", lambda _: "server")
    assert ranks.fork_server(config, {}) == "server"
    monkeypatch.setattr("sys.platform", "darwin")
    assert ranks.fork_server(config, {}) is None


# Read by every Python as it starts.
STARTED = """
import os
if "STARTS" in os.environ:
    os.write(int(os.environ["STARTS"]), b"%d" % os.getpid())
"""
# A build without CUDA cannot lose it.
LOSES_CUDA = """
import torch
if torch.version.cuda is None:
    torch.cuda._is_in_bad_fork = lambda: True
else:
    torch._C._cuda_getDeviceCount()
"""


@pytest.mark.parametrize("loses", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_rank_gets_a_python_of_its_own_where_an_import_has_started_cuda(tmp_path, loses):
    (tmp_path / "sitecustomize.py").write_text(STARTED)
    (tmp_path / "loses_cuda.py").write_text(LOSES_CUDA)
    environment = rank_environment(1)
    environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    server = RankServer(environment)
    reader, writer = os.pipe()
    try:
        server.load(["torch", *["loses_cuda"] * loses])
        with (tmp_path / "log").open("wb") as log:
            variables = {**environment, "RANK": "0", "FOLDPIPE_PARENT": str(os.getpid())}
            rank = server.start(tmp_path, variables, log.fileno(), {"STARTS": writer})
        os.close(writer)
        assert rank.wait(60) == 1
        assert os.read(reader, 100).decode() == (str(rank.pid) if loses else "")
    finally:
        os.close(reader)
        server.close()
    # It has looked for what to do.
    assert (
        f"No such file or directory: '{tmp_path}/resolved.json'" in (tmp_path / "log").read_text()
    )


# CUDA that has been asked once how many devices there are cannot be used by a fork.
ASKS = """
import importlib, sys, torch
asked = []
torch._C._cuda_getDeviceCount = lambda: asked.append(1) or 1
torch.cuda._device_count_nvml = lambda: 1  # as where there is a driver
for name in sys.argv[1:]:
    importlib.import_module(name)
sys.exit(len(asked))
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
def test_what_ranks_import_asks_cuda_nothing_in_any_order():
    words = ["torch._inductor.compile_fx", "launcher.rank.jobs", "launcher.workloads.hf.hf_model"]
    environment = rank_environment(1)
    done = subprocess.run([sys.executable, "-c", ASKS, *words], env=environment, check=False)
    assert done.returncode == 0
    del environment["PYTORCH_NVML_BASED_CUDA_CHECK"]
    done = subprocess.run([sys.executable, "-c", ASKS, *words], env=environment, check=False)
    assert done.returncode == 1
