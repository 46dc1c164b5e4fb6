"""The handler that stands before torch: what it remembers, and when it ends the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launcher.processes.outcome import OUTCOME, take_outcome, write_outcome
from launcher.processes.preempted import PreemptedError

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
