"""Rows 1 and 3: ranks that are killed or stopped in the middle of a step, and restarts after it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from tests.faults.results import record
from tests.faults.victims import backward, forward, receiving, reducing, victim
from tests.launcher.runs import MODEL, Started, read_metrics, started, within

pytestmark = pytest.mark.distributed

ENDLESS = (
    *MODEL, "trainer.max_steps=1000000", "trainer.val_check_interval=1000000", "seed=1",
    "trainer.precision=64-true", "trainer.checkpoint_every_n_steps=4", "hydra.run.dir=here",
)  # fmt: skip
KINDS = {"F": forward, "B": backward, "all-reduce": reducing, "RECV": receiving}


def test_a_killed_rank_is_named_and_restarted_and_a_stopped_one_ends_the_run(tmp_path):
    words = ["pp=2", "trainer.max_restarts=1", "trainer.watchdog_s=2"]
    with started([*ENDLESS, *words], tmp_path) as run:
        run.wait_for_step(10)
        hit = _Hit(run, rank=1, kind="F", number=signal.SIGKILL)
        said = hit.reported()
        assert f"rank 1 on {socket.gethostname()} failed {hit.beat.describe()}: SIGKILL" in said
        assert re.search(r"restart 1 of 1 from \S+/here/checkpoints/step-\d{8}\.ckpt: rank 1", said)
        hit.wait_for_next_step()
        assert hit.gone_s < 20  # 5 and 15 in the long run, which has the machine to itself
        assert hit.next_step_s < 60
        stopped = victim(run, 1)
        beat = stopped.stop_in(receiving)
        done = run.finish(timeout_s=60)
        assert run.family() == {}
    assert done.code == 1
    assert re.fullmatch(r"RECV act mb=\d from stage 0", beat.doing)
    assert beat.describe() == f"at step {beat.step} in {beat.doing} (rank 0)"
    assert done.errors.startswith(
        f"error: rank 1 on {socket.gethostname()} failed first: SIGSTOP: its process has been "
        f"stopped for 2."
    )
    assert f"\nIt was {beat.describe()}.\nIts log " in done.errors
    assert done.errors.endswith("Not restarted: trainer.max_restarts=1 are used up.\n")
    assert (done.result["status"], done.result["restarts"]) == ("failed", 1)
    _assert_no_step_twice(done.folder)


@pytest.mark.faults
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_killed_anywhere_is_named_and_the_run_goes_on(kind, tmp_path):
    """20 kills in all: each of 4 ranks in F, B, RECV and all-reduce, and one more of each."""
    cases = [0, 1, 2, 3, 1]
    gone, steps, passed = [], [], 0
    words = ["pp=2", "dp=2", f"trainer.max_restarts={len(cases)}", "trainer.keep_last=2"]
    with started([*ENDLESS, *words], tmp_path) as run:
        for rank in cases:
            _wait_for_new_checkpoint(run)
            hit = _Hit(run, rank=rank, kind=kind, number=signal.SIGKILL)
            said = hit.reported()
            hit.wait_for_next_step()
            gone.append(hit.gone_s)
            steps.append(hit.next_step_s)
            named = f"rank {rank} on {socket.gethostname()} failed {hit.beat.describe()}: SIGKILL"
            passed += named in said and hit.gone_s <= 5
        run.process.send_signal(signal.SIGTERM)
        done = run.finish(timeout_s=60)
        assert run.family() == {}
    what = f"kill -9 in {kind}, each of 4 ranks"
    record(1, f"{what}: all dead, rank and instruction named", passed, len(cases), max(gone))
    quick = sum(s <= 15 for s in steps)
    record(1, f"{what}: first new step after the restart", quick, len(cases), max(steps))
    assert (done.code, passed, quick) == (85, len(cases), len(cases)), (gone, steps)
    _assert_no_step_twice(done.folder)


@pytest.mark.faults
def test_a_stopped_rank_is_named_with_what_it_was_to_do(tmp_path):
    cases = [(0, "B"), (1, "RECV"), (2, "RECV"), (3, "F")]
    took, passed = [], 0
    words = ["pp=4", f"trainer.max_restarts={len(cases)}", "trainer.watchdog_s=5"]
    with started([*ENDLESS, *words], tmp_path) as run:
        for rank, kind in cases:
            _wait_for_new_checkpoint(run)
            hit = _Hit(run, rank=rank, kind=kind, number=signal.SIGSTOP)
            said = hit.reported()
            named = f"rank {rank} on {socket.gethostname()} failed {hit.beat.describe()}: SIGSTOP"
            took.append(hit.reported_s)
            passed += named in said and hit.reported_s <= 7
        run.process.send_signal(signal.SIGTERM)
        run.finish(timeout_s=60)
    record(3, "SIGSTOP, 5 s deadline: report names rank and instruction",
           passed, len(cases), max(took))  # fmt: skip
    assert passed == len(cases), took


class _Hit:
    """A rank that is hit, and what happens then.

    Attributes:
        beat: What it was doing.
        reported_s: Until the report.
        gone_s: Until all ranks of this attempt were gone.
        next_step_s: Until the first new step.
    """

    def __init__(self, run: Started, *, rank: int, kind: str, number: signal.Signals) -> None:
        self._run = run
        self._family = _started_when(run.family())
        self._said = len(run.output)
        target = victim(run, rank)
        self.beat = target.stop_in(KINDS[kind])
        self._begin = time.monotonic()
        if number == signal.SIGKILL:
            os.kill(target.pid, number)
        target.close()
        self._file = run.cwd / "here" / "metrics.csv"
        self.gone_s = self.reported_s = self.next_step_s = float("inf")

    def reported(self) -> str:
        """What the launcher has said to it, when the old ranks are gone."""

        def there() -> bool:
            return "restart " in self._run.output[self._said :]

        assert within(30, there), self._run.output + self._run.errors
        self.reported_s = time.monotonic() - self._begin
        assert within(60, lambda: not self._left()), f"still there: {self._left()}"
        self.gone_s = time.monotonic() - self._begin
        return self._run.output[self._said :]

    def _left(self) -> dict[int, str]:
        """Old processes: pid -> command line. A number alone may be another one's by now."""
        there = self._run.family()
        same = self._family.items() & _started_when(there).items()
        return {pid: there[pid] for pid, _ in same}

    def wait_for_next_step(self) -> None:
        before = self._file.stat().st_ino
        # The restarted rank 0 replaces the file by what came before its checkpoint ...
        assert within(60, lambda: self._file.stat().st_ino != before), self._run.output
        rows = len(self._file.read_text().splitlines())
        # ... and appends.
        assert within(30, lambda: len(self._file.read_text().splitlines()) > rows)
        self.next_step_s = time.monotonic() - self._begin


def _started_when(pids: Iterable[int]) -> dict[int, float]:
    found = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[pid] = psutil.Process(pid).create_time()
    return found


def _wait_for_new_checkpoint(run: Started) -> None:
    folder = run.cwd / "here" / "checkpoints"
    before = _newest(folder)
    assert within(90, lambda: _newest(folder) > before), run.output + run.errors


def _newest(folder: Path) -> str:
    return max((path.name for path in folder.glob("step-*.ckpt")), default="")


def _assert_no_step_twice(folder: Path) -> None:
    steps = [row["step"] for row in read_metrics(folder)]
    assert steps == list(range(1, len(steps) + 1))
