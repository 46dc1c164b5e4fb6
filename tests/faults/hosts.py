"""A job on hosts of its own: network namespaces on one machine, ranks started as srun does.

Every rank is alone on a host, which has a name, an address and one cable to a switch. What a test
does to the cable happens at the switch, so that the host sees what it would see of a real one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.link_hosts import (
    MissingRightError,
    address,
    check_rights,
    hosts,
    inside,
)
from launcher.processes.slurm_job import begin, end
from tests.launcher.runs import environment, launch

_RATE_MBIT = 1000.0
_PORT = 29517
NAMES = ("red", "blue")


class Job:
    """Ranks on hosts.

    Attributes:
        folder: The run's.
    """

    def __init__(self, folder: Path, spaces: Sequence[str]) -> None:
        self.folder = folder
        self._spaces = spaces
        self._switch = f"{spaces[0].rpartition('-')[0]}-switch"
        begin(folder)
        self._ranks = [self._start(rank) for rank in range(len(spaces))]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        environ = environment(self.folder.parent) | {
            "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank),
            "SLURM_NTASKS": str(len(self._spaces)), "MASTER_ADDR": address(0),
            "MASTER_PORT": str(_PORT), "GLOO_SOCKET_IFNAME": "eth0",
        }  # fmt: skip
        rank_words = [sys.executable, "-m", "launcher.rank.slurm_rank", str(self.folder)]
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', NAMES[rank]]
        with (self.folder / "logs" / f"rank_{rank:05d}.log").open("wb") as log:
            return subprocess.Popen(
                [*inside(self._spaces[rank]), *named, *rank_words],
                env=environ, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    @property
    def steps(self) -> int:
        """Rows of metrics.csv."""
        file = self.folder / "metrics.csv"
        return max(0, len(file.read_text().splitlines()) - 1) if file.is_file() else 0

    def wait_for_step(self, step: int, timeout_s: float = 60) -> float:
        """Returns after how many seconds it was there."""
        started = time.monotonic()
        while self.steps < step:
            assert all(rank.poll() is None for rank in self._ranks), self.logs
            assert time.monotonic() - started < timeout_s, self.logs
            time.sleep(0.05)
        return time.monotonic() - started

    def pull_cable(self, host: int) -> None:
        """The host sees that its cable has no other end."""
        self._cable(host, "down")

    def plug_cable(self, host: int) -> None:
        self._cable(host, "up")

    def black_hole(self, host: int) -> None:
        """The cable looks as ever, and nothing arrives."""
        self._cable(host, "nomaster")

    def _cable(self, host: int, *words: str) -> None:
        subprocess.run(["ip", "-n", self._switch, "link", "set", f"p{host}n0", *words], check=True)

    def stop(self) -> int:
        """As a scheduler asks for a checkpoint; the exit code of the job."""
        for rank in self._ranks:
            os.killpg(rank.pid, signal.SIGUSR1)
        return self.finish()

    def finish(self) -> int:
        """What srun and the job script do: the first bad exit ends all, then the job is judged."""
        until = time.monotonic() + 60
        while True:
            codes = [rank.poll() for rank in self._ranks]
            bad = [code for code in codes if code]
            if bad and set(bad) != {85}:
                time.sleep(0.3)  # srun tells slurmctld, which tells the nodes
                break
            if None not in codes:
                break
            assert time.monotonic() < until, self.logs
            time.sleep(0.05)
        self.kill()
        worst = max((code or 0 for code in codes), key=abs)
        return end(self.folder, abs(worst))

    @property
    def logs(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("logs/rank*.log")))

    def kill(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


@contextlib.contextmanager
def job_on_hosts(words: Sequence[str], cwd: Path) -> Iterator[Job]:
    """Starts one rank on each of two hosts; everything is gone after the block."""
    try:
        check_rights()
    except MissingRightError as error:
        pytest.skip(str(error))
    given = ["cluster=slurm", "cluster.submit=false", "cluster.nodes=2", "hydra.run.dir=run"]
    launch([*words, *given], cwd).assert_done()
    with hosts(len(NAMES), interfaces=1, rate_mbit=_RATE_MBIT) as spaces:
        job = Job(cwd / "run", spaces)
        try:
            yield job
        finally:
            job.kill()
