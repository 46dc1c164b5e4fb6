"""A real SLURM on this machine: one controller, four nodes, two partitions.

``python -m tests.slurm.local_cluster install`` brings the daemons (Debian, as root). All state lies
in one folder, and every daemon is ended by the process id that it was started with.

The partition ``low`` can be preempted: ``high`` takes its nodes after ``GRACE_S`` seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("slurm-wlm", "slurmctld", "slurmd", "slurm-client", "munge", "libslurm-dev", "gcc")
DAEMONS = ("slurmctld", "slurmd", "munged")
NODES = 4
CPUS = 4
GRACE_S = 30


def install() -> None:
    """Installs what is missing; says what to do where this is no Debian, or not root."""
    if os.geteuid() != 0:
        sys.exit(f"make test-slurm: {', '.join(DAEMONS)} are run as root, so NO test was run.")
    if all(_daemon(name) for name in DAEMONS):
        return
    if shutil.which("apt-get") is None:
        sys.exit(
            f"make test-slurm: {', '.join(DAEMONS)} are needed, so NO test was run. On Debian and "
            f"Ubuntu it installs them itself; elsewhere install SLURM and munge first (Debian's "
            f"packages are {' '.join(PACKAGES)})."
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-qq"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        subprocess.run(["apt-get", *words], env=environment, check=True)


def _daemon(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclass
class LocalCluster:
    """The daemons, and what tests ask of SLURM.

    Attributes:
        folder: For configuration, state and logs; owned by root.
        knows_images: Whether srun has pyxis' options, of a plugin that only says what was given.
    """

    folder: Path
    knows_images: bool = False
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs to reach this cluster and no other."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Returns when all nodes are idle."""
        host = socket.gethostname()
        ports = _free_ports(NODES + 1)
        self._start_munge()
        for name in ("state", "spool", "logs"):
            (self.folder / name).mkdir()
        self.knows_images = _plugin(self.folder)
        (self.folder / "slurm.conf").write_text(_slurm_conf(self.folder, host, ports))
        self._daemon("slurmctld", "-D")
        for node in range(NODES):
            self._daemon("slurmd", "-D", "-N", f"n{node}")
        until = time.monotonic() + 60
        while self.ask("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D") != str(NODES):
            if time.monotonic() > until:
                raise RuntimeError(self._logs())
            time.sleep(0.2)

    def end(self) -> None:
        """Ends the jobs, then every daemon."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.ask("scancel", "--signal=KILL", "--full", "--user=root")
            self.ask("scancel", "--user=root")
            time.sleep(1)
        for process in reversed(self._running):
            process.send_signal(signal.SIGTERM)
        for process in reversed(self._running):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()

    def ask(self, *command: str) -> str:
        """Standard output of a client, stripped."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """``RUNNING``, ``PENDING``, ``COMPLETED`` ..."""
        return self._field(job, "JobState")

    def restarts(self, job: str) -> int:
        """How often a job has been requeued."""
        return int(self._field(job, "Restarts"))

    def start_now(self, job: str) -> None:
        """Spares a requeued job its two minutes of waiting."""
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")

    def wait(self, job: str, *states: str, timeout_s: float = 90) -> str:
        """Returns when a job is in one of these states; a requeued one does not wait."""
        until = time.monotonic() + timeout_s
        while True:
            state = self.state(job)
            if state in states:
                return state
            if state == "PENDING" and self._field(job, "Reason") == "BeginTime":
                with contextlib.suppress(subprocess.CalledProcessError):
                    self.start_now(job)
            if time.monotonic() > until:
                shown = self.ask("scontrol", "show", "job", job)
                raise AssertionError(f"job {job} is {state}, not {' or '.join(states)}\n{shown}")
            time.sleep(0.2)

    def _field(self, job: str, name: str) -> str:
        shown = self.ask("scontrol", "--oneliner", "show", "job", job)
        return dict(word.partition("=")[::2] for word in shown.split())[name]

    def _start_munge(self) -> None:
        user = pwd.getpwnam("munge")
        folder = self.folder / "munge"
        folder.mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        for path in (folder, key):
            os.chown(path, user.pw_uid, user.pw_gid)
            path.chmod(0o700 if path.is_dir() else 0o400)
        # Clients of any user must reach the socket, and munged wants to see that its folder is
        # nobody else's.
        socket_folder = self.folder / "socket"
        socket_folder.mkdir()
        os.chown(socket_folder, user.pw_uid, user.pw_gid)
        socket_folder.chmod(0o755)
        self._daemon(
            "munged", "--foreground", "--force", f"--socket={self._socket}",
            f"--key-file={key}", f"--log-file={folder / 'munged.log'}",
            f"--pid-file={folder / 'munged.pid'}", f"--seed-file={folder / 'munged.seed'}",
            user="munge",
        )  # fmt: skip
        until = time.monotonic() + 20
        while not self._socket.exists():
            if time.monotonic() > until:
                raise RuntimeError(self._logs())
            time.sleep(0.05)

    @property
    def _socket(self) -> Path:
        return self.folder / "socket" / "munge.socket"

    def _daemon(self, name: str, *words: str, user: str | None = None) -> None:
        path = _daemon(name)
        assert path is not None
        with (self.folder / f"{name}{len(self._running)}.out").open("wb") as log:
            self._running.append(
                subprocess.Popen(
                    [path, *words],
                    env={**os.environ, **self.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    user=user,
                    group=user,
                    extra_groups=[] if user else None,
                    preexec_fn=_end_with_parent,
                )
            )

    def _logs(self) -> str:
        texts = [
            f"{p}:\n{p.read_text(errors='replace')[-2000:]}" for p in self.folder.glob("*.out")
        ]
        return "the local cluster does not start\n" + "\n".join(texts)


@contextmanager
def local_cluster(folder: Path) -> Iterator[LocalCluster]:
    """A cluster that certainly ends with the block.

    Args:
        folder: Empty, with a short path, and open to all for passing (munged is a user of its own).
    """
    cluster = LocalCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


def _end_with_parent() -> None:
    """Also a test run that is killed leaves no daemon."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _slurm_conf(folder: Path, host: str, ports: list[int]) -> str:
    nodes = "\n".join(
        f"NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} "
        "RealMemory=5000"
        for node, port in enumerate(ports[1:])
    )
    return f"""\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/socket/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerParameters=sched_interval=5,bf_interval=5,requeue_delay=2
JobRequeue=1
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
PlugStackConfig={folder}/plugstack.conf
MpiDefault=none
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/logs/slurmctld.log
SlurmdLogFile={folder}/logs/slurmd-%n.log
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S} \
MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


def _plugin(folder: Path) -> bool:
    """Compiles ``pyxis_options.c`` where there is a compiler and SLURM's headers."""
    made = folder / "pyxis_options.so"
    source = Path(__file__).with_name("pyxis_options.c")
    done = None
    if shutil.which("gcc"):
        done = subprocess.run(
            ["gcc", "-shared", "-fPIC", "-o", made, source], capture_output=True, check=False
        )
    found = done is not None and done.returncode == 0
    (folder / "plugstack.conf").write_text(f"required {made}\n" if found else "")
    return found


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


if __name__ == "__main__":
    if sys.argv[1:] != ["install"]:
        sys.exit("usage: python -m tests.slurm.local_cluster install")
    install()
