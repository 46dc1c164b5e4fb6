"""The handler that stands before torch: what it remembers, and when it ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.processes.failure import Failure, RankFailedError
from launcher.processes.local import OUTCOME, our_path, take_outcome, write_outcome
from launcher.processes.preempted import PreemptedError, Restarts

PROBE = """
import os, signal, sys
from launcher.processes.preempted import StopRequest, installed_request
assert installed_request() is None
request = StopRequest()
request.install(signal.SIGUSR1, signal.SIGTERM)
assert installed_request() is request
"""


def run(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROBE + text], capture_output=True, text=True, env=dict(os.environ)
    )


def test_the_first_signal_is_remembered_and_nothing_else_happens():
    done = run(
        "os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGUSR1)\n"
        "print(request.signal)"
    )
    assert (done.returncode, done.stdout) == (0, "SIGTERM\n")


@pytest.mark.parametrize("order", ["kill disregard", "disregard kill"])
def test_where_nothing_can_be_saved_a_signal_ends_the_process(order):
    steps = {"kill": "os.kill(os.getpid(), signal.SIGTERM)", "disregard": "request.disregard()"}
    done = run("\n".join(steps[word] for word in order.split()) + "\nprint('still here')")
    assert (done.returncode, done.stdout) == (143, "")


def test_it_is_there_before_torch():
    """From the first import of a rank on; torch takes seconds."""
    done = run("assert not {'torch', 'lightning', 'hydra', 'yaml'} & set(sys.modules)")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("moment", ["imports", "a text is compiled", "it ends already"])
def test_ctrl_c_has_its_exit_code_whenever_it_comes(moment, tmp_path):
    # Python ends itself by SIGINT, or with a traceback, unless it is kept from that.
    raised = "raise KeyboardInterrupt"
    program = f"import launcher.__main__ as m\nm._main = lambda _: exec({raised!r})\nm.main()\n"
    if moment == "it ends already":  # what waits for the ranks' server to end, say
        again = "[os.kill(os.getpid(), number) for number in (2, 15, 1, 10)]"
        program = f"import atexit, os\natexit.register(lambda: {again})\n{program}"
    words = ["-c", f"import sys; sys.argv = ['foldpipe', 'pp=2']\n{program}"]
    if moment == "imports":
        (tmp_path / "hydra.py").write_text(f"{raised}\n")
        words = ["-m", "launcher"]
    known = os.pathsep.join([str(tmp_path), our_path(os.environ)])
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=tmp_path.parent,
        env={**os.environ, "PYTHONPATH": known},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_an_outcome_says_who_stopped_the_run(name, tmp_path):
    write_outcome(tmp_path, {"steps": 4, "checkpoint": "/c"}, stopped_by=name)
    with pytest.raises(PreemptedError, match=f"{name} has stopped the run after step 4") as caught:
        take_outcome(tmp_path)
    assert caught.value.exit_code == 85
    assert caught.value.figures == {"steps": 4, "checkpoint": "/c"}
    assert not (tmp_path / OUTCOME).exists()


def test_an_outcome_is_read_once(tmp_path):
    write_outcome(tmp_path, {"steps": 4}, stopped_by=None)
    assert take_outcome(tmp_path) == {"steps": 4}
    with pytest.raises(FileNotFoundError):
        take_outcome(tmp_path)


# ---------------------------------------------------------------------------------------- restarts
#
# When ranks are started again, from where, and when that makes no sense.


def failure(step: int, *, code: int = -9, rank: int = 1) -> Failure:
    doing = f"at step {step} in F mb=0 of stage 1"
    return Failure(rank, "host", 0.0, "SIGKILL", "ended by SIGKILL\nmore", code, doing, step)


class Run:
    """Attempts that fail as told, and checkpoints that appear as told."""

    def __init__(self, most: int, failures: list[Failure], newest: list[Path | None]) -> None:
        self._failures = failures
        self.asked_to_stop = False
        self.began: list[Path | None] = []
        self.said: list[str] = []
        found = iter(newest)
        self.restarts = Restarts(most, lambda _: next(found), self.said.append)

    def __call__(self, checkpoint: Path | None) -> None:
        self.began.append(checkpoint)
        if self._failures:
            found = self._failures.pop(0)
            raise RankFailedError(
                f"rank {found.rank} failed", found, asked_to_stop=self.asked_to_stop
            )

    def refusal(self) -> str:
        with pytest.raises(RankFailedError) as caught:
            self.restarts.run(self, None)
        return str(caught.value)


STEP_4, STEP_8 = Path("step-4.ckpt"), Path("step-8.ckpt")


def test_a_failed_run_goes_on_with_the_newest_checkpoint_in_one_line_each():
    run = Run(3, [failure(2), failure(6), failure(6)], [None, STEP_4, STEP_8])
    run.restarts.run(run, None)
    assert run.began == [None, None, STEP_4, STEP_8]
    assert run.restarts.count == 3
    assert run.said == [
        "restart 1 of 3 from the beginning: rank 1 on host failed at step 2 in F mb=0 of stage 1: "
        "SIGKILL: ended by SIGKILL",
        "restart 2 of 3 from step-4.ckpt: rank 1 on host failed at step 6 in F mb=0 of stage 1: "
        "SIGKILL: ended by SIGKILL",
        "restart 3 of 3 from step-8.ckpt: rank 1 on host failed at step 6 in F mb=0 of stage 1: "
        "SIGKILL: ended by SIGKILL",
    ]


def test_without_restarts_the_message_is_as_ever():
    assert Run(0, [failure(2)], []).refusal() == "rank 1 failed"


def test_used_up_restarts_are_named():
    run = Run(1, [failure(2), failure(5)], [STEP_4])
    assert run.refusal().endswith("\nNot restarted: trainer.max_restarts=1 are used up.")


def test_the_same_failure_at_the_same_step_from_the_same_checkpoint_ends_the_run():
    run = Run(9, [failure(6), failure(7), failure(7)], [STEP_4, STEP_4, STEP_4])
    assert run.refusal().endswith("\nNot restarted: the same has happened twice at this step.")
    assert run.began == [None, STEP_4, STEP_4]


def test_what_a_user_has_to_change_is_not_tried_again():
    run = Run(9, [failure(1, code=2)], [])
    assert run.refusal().endswith("\nNot restarted: the same would happen again.")
    assert run.began == [None]


def test_a_run_that_was_asked_to_stop_is_not_started_again():
    run = Run(9, [failure(6)], [])
    run.asked_to_stop = True
    assert run.refusal().endswith("\nNot restarted: a signal had asked for the end.")


def test_ranks_that_a_pause_has_ended_start_again_without_being_asked_for():
    said, begun = [], []

    def start(checkpoint: Path | None) -> None:
        begun.append(checkpoint)
        if len(begun) < 3:
            failure = Failure(
                1, "red", 0.0, "RuntimeError", "Timed out waiting", 1, step=7, lost=True
            )
            raise RankFailedError("rank 1 failed", failure, paused_s=4000.0)

    restarts = Restarts(0, lambda _: Path("/r/step-00000007.ckpt"), said.append)
    restarts.run(start, None)
    assert begun == [None, Path("/r/step-00000007.ckpt"), Path("/r/step-00000007.ckpt")]
    assert (restarts.count, restarts.pauses) == (0, 2)
    assert said[0].startswith("everything has stood still for 4000 s")

    def stopped(_: Path | None) -> None:
        failure = Failure(1, "red", 0.0, "RuntimeError", "Timed out waiting", 1, lost=True)
        raise RankFailedError("rank 1 failed", failure, asked_to_stop=True, paused_s=4000.0)

    with pytest.raises(RankFailedError):
        restarts.run(stopped, None)
