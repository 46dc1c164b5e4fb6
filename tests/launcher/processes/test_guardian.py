"""The parent that a rank of srun or torchrun gives itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from launcher.processes.failure import read_failure
from launcher.processes.local import our_path
from tests.launcher.runs import within

# What launcher.rank.slurm_rank does, with a rank that takes no time to start.
RANK = """
import os, sys, time, json
from pathlib import Path
from launcher.processes.watchdog import fork_under_guard
from launcher.processes.watchdog import own_heartbeat
from launcher.processes.preempted import StopRequest
import signal
request = StopRequest()
request.install(signal.SIGUSR1)
fork_under_guard(3)
run_dir = Path(sys.argv[1])
heartbeat = own_heartbeat(os.environ)
heartbeat.tell(str(run_dir), watch_s=1.0)
heartbeat.step(5)
heartbeat.begin(heartbeat.names([("F mb=2 of stage 3", (), "")]), fresh=False)
heartbeat.words[0] = 0
(run_dir / "pid").write_text(str(os.getpid()))
while request.signal is None:
    time.sleep(0.01)
(run_dir / "asked").write_text(request.signal)
os._exit(85)
"""


class Guarded:
    def __init__(self, folder: Path) -> None:
        (folder / "logs").mkdir()
        self.folder = folder
        self.guardian = subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder)],
            env={**os.environ, "PYTHONPATH": our_path(os.environ)},
            stderr=subprocess.PIPE,
            text=True,
        )
        file = folder / "pid"
        assert within(60, lambda: file.is_file() and file.read_text().isdigit())
        self.rank = int(file.read_text())
        assert self.rank != self.guardian.pid

    def end(self) -> tuple[int, str]:
        _, errors = self.guardian.communicate(timeout=60)
        assert not Path(f"/proc/{self.rank}").exists()
        return self.guardian.returncode, errors


def test_a_killed_rank_leaves_its_instruction(tmp_path):
    it = Guarded(tmp_path)
    os.kill(it.rank, signal.SIGKILL)
    code, errors = it.end()
    assert code == 128 + signal.SIGKILL
    failure = read_failure(tmp_path, 3)
    assert (failure.rank, failure.kind, failure.exit_code) == (3, "SIGKILL", -9)
    assert (failure.doing, failure.step) == ("at step 5 in F mb=2 of stage 3", 5)
    assert errors.startswith("error: rank 3 on ")
    assert "It was at step 5 in F mb=2 of stage 3.\n" in errors


def test_a_stopped_rank_is_ended_after_the_deadline_that_it_has_told(tmp_path):
    it = Guarded(tmp_path)
    os.kill(it.rank, signal.SIGSTOP)
    begin = time.monotonic()
    code, errors = it.end()
    assert time.monotonic() - begin > 1.0
    assert code == 1
    failure = read_failure(tmp_path, 3)
    assert failure.kind == "SIGSTOP"
    assert failure.message.endswith("(trainer.watchdog_s=1)")
    assert failure.doing == "at step 5 in F mb=2 of stage 3"
    assert failure.exit_code < 0  # the others' complaints come behind it
    assert "SIGSTOP: its process has been stopped" in errors


def test_signals_and_exit_codes_pass_through_and_a_killed_guardian_takes_its_rank_along(tmp_path):
    (tmp_path / "one").mkdir()
    it = Guarded(tmp_path / "one")
    it.guardian.send_signal(signal.SIGUSR1)
    assert it.end() == (85, "")
    assert (it.folder / "asked").read_text() == "SIGUSR1"
    assert read_failure(it.folder, 3) is None
    (tmp_path / "two").mkdir()
    other = Guarded(tmp_path / "two")
    other.guardian.kill()
    other.guardian.communicate()
    assert within(30, lambda: not Path(f"/proc/{other.rank}").exists())


def test_what_a_rank_has_said_itself_gets_its_instruction_and_is_not_said_twice(tmp_path):
    script = RANK.replace(
        "while request.signal is None:\n    time.sleep(0.01)\n",
        "from launcher.processes.failure import write_failure\n"
        'os._exit(write_failure(run_dir, 3, ValueError("no such column")))\n',
    )
    (tmp_path / "logs").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": our_path(os.environ)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (1, "")
    said = json.loads((tmp_path / "logs" / "rank_00003.error.json").read_text())
    assert (said["kind"], said["message"]) == ("ValueError", "no such column")
    assert said["doing"] == "at step 5 in F mb=2 of stage 3"
