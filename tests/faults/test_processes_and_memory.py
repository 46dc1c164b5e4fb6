"""Rows 10, 11 and 12: ports and ranks that are not there, loader processes, memory."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strategies.heartbeat import new_page, read_beat
from tests.faults.results import record
from tests.launcher.own_project import OWN, write_project
from tests.launcher.runs import MODEL, Started, environment, parent, started, within

pytestmark = pytest.mark.distributed

HOST = socket.gethostname()
LONG = (
    *MODEL, "trainer.max_steps=1000000", "trainer.val_check_interval=1000000",
    "hydra.run.dir=here", "pp=2",
)  # fmt: skip


def _loader_of(run: Started, rank: int) -> int:
    """The pid of a process that loads data for a rank."""
    own = run.rank(rank)
    return next(pid for pid in run.family() if parent(pid) == own)


def _kill_a_loader(cwd: Path, rank: int) -> tuple[float, str]:
    with started([*LONG, "data.num_workers=2"], cwd) as run:
        run.wait_for_step(3)
        pid = _loader_of(run, rank)
        os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        done = run.finish(timeout_s=60)
        took = time.monotonic() - begin
        assert within(30, lambda: run.family() == {}), run.family()
    assert done.code == 1
    pattern = (
        rf"error: rank {rank} on {re.escape(HOST)} failed first: LoaderProcessError: "
        rf"loader process (?:\d+, )?{pid}(?:, \d+)? of rank {rank} has died \(SIGKILL: [^)]+\) "
        r"after (\d+) batches of epoch 0, with batches (\d+) to (\d+) under way\."
    )
    found = re.match(pattern, done.errors)
    assert found, done.errors
    last, first, end = map(int, found.groups())
    assert (first, end) == (last, last + 3)
    return took, done.errors


def test_a_killed_loader_process_is_named_with_rank_and_batch(tmp_path):
    took, _ = _kill_a_loader(tmp_path, 1)
    # At once, or where a batch is waited for when torch looks after its processes: every 5 s.
    assert took < 10


@pytest.mark.faults
def test_killed_loader_processes(tmp_path):
    took = [_kill_a_loader(tmp_path / str(n), n % 2)[0] for n in range(6)]
    passed = sum(t <= 5 for t in took)
    what = "kill -9 of a DataLoader worker: run ended; rank and batches named"
    record(11, what, passed, len(took), max(took))
    assert passed == len(took), took


def _exhaust(cwd: Path, rank: int) -> float:
    """Lets a rank have no more address space than it has: the next large tensor is refused."""
    words = ["data.microbatch_size=64", "model.sequence=64", "model.hidden=64", "model.ffn=128"]
    with started([*LONG, *words], cwd) as run:
        run.wait_for_step(3)
        pid = run.rank(rank)
        status = (Path("/proc") / str(pid) / "statm").read_text()
        size = int(status.split()[0]) * resource.getpagesize()
        begin = time.monotonic()
        resource.prlimit(pid, resource.RLIMIT_AS, (size, size))
        done = run.finish(timeout_s=60)
        took = time.monotonic() - begin
    assert done.code == 1
    pattern = (
        rf"error: rank {rank} on {re.escape(HOST)} failed first: OutOfMemoryError: out of memory: "
        r".+\. At most \d+\.\d\d GB were resident in this process; address space is limited to "
        r"\d+\.\d\d GB\. Run `ulimit -v unlimited` in this shell first, or try a smaller "
        r"data\.microbatch_size or recompute=full; mode=validate estimates the memory of each "
        r"rank\.\n"
    )
    assert re.match(pattern, done.errors), done.errors
    return took


@pytest.mark.faults
def test_a_rank_without_memory_says_so_with_its_peak(tmp_path, monkeypatch):
    # Every block of more than 64 KiB is asked of the kernel, and given back.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    took = [_exhaust(tmp_path / str(rank), rank) for rank in (0, 1)]
    passed = sum(t <= 3 for t in took)
    record(12, "out of memory (RLIMIT_AS): says so, with the peak", passed, 2, max(took))
    assert passed == 2, took


class _Worker:
    """A rank on its own, whose peers and port are what a test makes of them."""

    def __init__(self, run_dir: Path, rank: int, port: int) -> None:
        self._page = new_page()
        environ = environment(run_dir) | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "FOLDPIPE_HEARTBEAT": str(self._page), "FOLDPIPE_PARENT": str(os.getpid()),
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "launcher.rank.worker", str(run_dir)],
            env=environ, pass_fds=(self._page,), stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def errors_within(self, limit_s: float) -> tuple[str, float]:
        """What it says, and for how long it has been waiting for the others when it does."""

        def waits() -> bool:
            known = "waiting for the other ranks" in read_beat(self._page).doing
            return known or self._process.poll() is not None

        assert within(60, waits)
        begin = time.monotonic()
        _, errors = self._process.communicate(timeout=limit_s)
        os.close(self._page)
        return errors, time.monotonic() - begin


@pytest.mark.faults
def test_a_port_that_is_taken_and_a_rank_that_does_not_come(tmp_path):
    run_dir = tmp_path / "run"
    (run_dir / "logs").mkdir(parents=True)
    _write_task(run_dir, timeout_s=3.0)
    worst, passed = 0.0, 0
    with socket.create_server(("0.0.0.0", 0)) as holder:
        port = holder.getsockname()[1]
        errors, took = _Worker(run_dir, 0, port).errors_within(30)
    assert f"port {port} on {HOST}, where the ranks are to meet, is taken by process" in errors
    assert f"process {os.getpid()} (" in errors
    passed, worst = passed + (took <= 2), took
    record(10, "port in use: its holder named", passed, 1, worst)
    missing = []
    for rank, absent in ((0, 1), (1, 0)):
        errors, took = _Worker(run_dir, rank, port).errors_within(30)
        assert f"rank {absent} has not come within 3 s (cluster.timeout_s)" in errors
        missing.append(took - 3)
    ok = sum(late <= 2 for late in missing)
    record(10, "a rank that never comes: named (seconds after the deadline)", ok, 2, max(missing))
    assert (passed, ok) == (1, 2), (took, missing)


def _write_task(run_dir: Path, *, timeout_s: float) -> None:
    """What a parent would have written."""
    from launcher.config import LaunchConfig, dump

    config = dump(LaunchConfig())
    config["pp"], config["dp"] = 2, 1
    for word in MODEL:
        path, _, value = word.partition("=")
        config["model"][path.removeprefix("model.")] = int(value)
    config["cluster"]["timeout_s"] = timeout_s
    task = {"config": config, "checkpoint": None, "schedule_file": None, "run_id": "0"}
    (run_dir / "resolved.json").write_text(json.dumps(task))


HANGING = '''
import time

from my_data.images import Images


class Hanging(Images):
    """As on a file system that is gone: after some batches, nobody gets one."""

    given = 0

    def on_before_batch_transfer(self, batch, index):
        self.given += 1
        while self.given > 12:
            time.sleep(1)
        return batch
'''


@pytest.mark.faults
def test_every_rank_hangs_in_its_loader(tmp_path):
    write_project(tmp_path)
    (tmp_path / "hanging.py").write_text(HANGING)
    own = [word for word in OWN if not word.startswith("data.path=")]
    held, took = 0, []
    for deadline in (10, 20):
        words = [*own, "data.path=hanging:Hanging", "trainer.max_steps=100",
                 f"trainer.data_timeout_s={deadline}", f"hydra.run.dir=r{deadline}"]  # fmt: skip
        with started(words, tmp_path) as run:
            run.wait_for_step(3)
            begin = time.monotonic()
            done = run.finish(timeout_s=90)
            took.append(time.monotonic() - begin)
            assert within(30, lambda: run.family() == {}), run.family()
        told = f"(trainer.data_timeout_s={deadline})"
        held += done.code == 1 and "no rank has gone on for" in done.errors and told in done.errors
    record("11n", "the loaders of all ranks hang: ended and told", held, 2, max(took))
    assert held == 2
