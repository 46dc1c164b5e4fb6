"""Row 2: SIGTERM and SIGUSR1, to one rank, to all ranks, to the launcher."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.results import record
from tests.launcher.runs import MODEL, read_metrics, started, within

pytestmark = pytest.mark.distributed

RUN = (
    *MODEL, "pp=2", "trainer.max_steps=1000000", "trainer.val_check_interval=1000000",
    "hydra.run.dir=here",
)  # fmt: skip
REPETITIONS = 5


def _asked_to_stop(cwd: Path, number: signal.Signals, whom: str, step: int) -> float:
    with started(RUN, cwd) as run:
        run.wait_for_step(step)
        pids = {
            "one rank": [run.rank(step % 2)],
            "all ranks": [run.rank(0), run.rank(1)],
            "the launcher": [run.process.pid],
        }[whom]
        begin = time.monotonic()
        for pid in pids:
            os.kill(pid, number)
        done = run.finish(timeout_s=60)
        took = time.monotonic() - begin
        assert run.family() == {}
    assert done.code == 85, done.errors
    result = done.result
    steps = result["steps"]
    assert result["status"] == "preempted"
    assert done.errors.startswith(f"error: {number.name} has stopped the run after step {steps},")
    assert (Path(str(result["checkpoint"])) / "manifest.json").is_file()
    # What was trained is what was saved: no step is lost.
    assert [row["step"] for row in read_metrics(done.folder)] == list(range(1, steps + 1))
    return took


@pytest.mark.faults
@pytest.mark.parametrize("whom", ["one rank", "all ranks", "the launcher"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_signal_ends_the_run_with_a_checkpoint_of_its_last_step(number, whom, tmp_path):
    took = [_asked_to_stop(tmp_path / str(n), number, whom, step=2 + n) for n in range(REPETITIONS)]
    passed = sum(t <= 10 for t in took)
    what = f"{number.name} to {whom}: checkpoint, no step lost, exit 85"
    record(2, what, passed, REPETITIONS, max(took))
    assert passed == REPETITIONS, took


@pytest.mark.faults
@pytest.mark.parametrize("who", ["the launcher", "everybody"])
def test_a_pause_longer_than_ranks_wait_is_no_failure(who, tmp_path):
    """Ctrl-Z, or what stops a container: gloo's clock goes on meanwhile, and its waits end."""
    pause, times, took = 14, 2, []
    more = ("cluster.timeout_s=10", "trainer.checkpoint_every_n_steps=5")
    with started((*RUN, *more), tmp_path) as run:
        for number in range(times):
            run.wait_for_step(6 + 20 * number)
            pids = [run.process.pid]
            ask = signal.SIGTSTP
            if who == "everybody":
                pids, ask = [*run.ranks().values(), run.process.pid], signal.SIGSTOP
            for pid in pids:
                os.kill(pid, ask)
            time.sleep(pause)
            rows = len(read_metrics(tmp_path / "here"))
            begin = time.monotonic()
            for pid in reversed(pids):
                os.kill(pid, signal.SIGCONT)
            # Past a checkpoint: one that was under way is heard of there.
            assert within(60, lambda rows=rows: len(read_metrics(tmp_path / "here")) > rows + 6)
            took.append(time.monotonic() - begin)
        run.process.send_signal(signal.SIGTERM)
        done = run.finish(timeout_s=60)
        assert run.family() == {}
    assert done.code == 85, done.errors
    assert [row["step"] for row in read_metrics(done.folder)] == (
        list(range(1, done.result["steps"] + 1))
    )
    what = f"{who} stopped for {pause} s, time-out 10 s: goes on (seconds to new steps)"
    record("2b", what, len(took), times, max(took))


def test_sigterm_before_the_first_step_ends_the_run_at_once(tmp_path):
    with started(RUN, tmp_path) as run:
        assert within(60, lambda: len(run.ranks()) == 2)
        run.process.send_signal(signal.SIGTERM)
        done = run.finish(timeout_s=60)
        assert run.family() == {}
    assert (done.code, done.errors) == (130, "interrupted\n")
