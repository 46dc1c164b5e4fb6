"""The launcher's side of the process that ranks are forked from.

``launcher.rank.fork_server`` imports torch, Lightning and the jobs of a rank once, and forks every
rank of every job of this command from there, which takes milliseconds where a start takes seconds.
The launcher stays free of torch, and keeps for each rank what it would keep of a child of its own.

Requests and answers are JSON on a socket: a request lies in a descriptor of its own, since an
environment may be larger than a packet, and the files of a rank follow it:

    {"import": [MODULE, ...]}
    {"run_dir": PATH, "environment": {...}, "folder": CWD, "files": [VARIABLE, ...]}

    {"started": PID}
    {"ended": PID, "code": as subprocess has it, "peak_bytes": N}

The first file of a rank is its log; the others are named to it by these variables. When one end
of the socket is gone, so are the ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from strategies.errors import RunError

# Names the socket of a process that serves many launchers, one after the other or side by side.
SHARED = "FOLDPIPE_RANK_SERVER"
# What ``ps`` shows of a forked rank is written over what it shows of the server, so there must be
# room. Variables that only a rank has take some 300 bytes, its command line the folder's path.
ROOM_VARIABLE, _ROOM_VARIABLES, _ROOM_WORDS = "FOLDPIPE_ROOM", 1024, 300
# What asks a run to end: the launcher and the ranks see to it, and the server ends with them.
LEFT_TO_OTHERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
_MOST_FILES = 8
_MOST_ANSWER = 1 << 12
_SAID_LINES = 12


class RankProcess(Protocol):
    """What ``subprocess.Popen`` and ``ForkedRank`` have in common."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...


class RankServer:
    """A process that forks ranks, as long as this one lives.

    Attributes:
        environment: It was started with; that of every rank begins with it.
        code: How it ended; None while it is there.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.code: int | None = None
        self._ranks: dict[int, ForkedRank] = {}
        self._started: ForkedRank | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed with the server
        self._process: subprocess.Popen[bytes] | None = None
        shared = environment.get(SHARED)
        if shared is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = self._start_process(theirs.fileno())
        else:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.connect(shared)
        atexit.register(self.close)

    def _start_process(self, channel: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-P", "-m", "launcher.rank.fork_server", str(channel)]
        own = {ROOM_VARIABLE: "." * _ROOM_VARIABLES, "FOLDPIPE_PARENT": str(os.getpid())}
        # It begins with these blocked, as the child does that is forked here.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_OTHERS)
        try:
            return subprocess.Popen(
                [*words, " " * _ROOM_WORDS],
                env=self.environment | own,
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                pass_fds=(channel,),
                start_new_session=True,  # Ctrl-C is the launcher's, as it is for ranks.
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def load(self, modules: Sequence[str]) -> None:
        """Imports what the next ranks will need, while the caller goes on with something else."""
        self._send({"import": list(modules)}, ())

    def start(
        self, run_dir: Path, environment: Mapping[str, str], log: int, files: Mapping[str, int]
    ) -> ForkedRank:
        """Forks a rank, which runs what ``python -m launcher.rank.worker`` would.

        Args:
            run_dir: Its only argument.
            environment: All of its variables.
            log: Descriptor of its output.
            files: Variable -> descriptor of further files.

        Raises:
            RunError: The server has ended.
        """
        request = {
            "run_dir": str(run_dir),
            "environment": dict(environment),
            "folder": str(Path.cwd()),
            "files": list(files),
        }
        self._started = None
        self._send(request, (log, *files.values()))
        while self._started is None:
            if not self.alive:
                raise RunError(self.end())
            self.listen(None)
        return self._started

    @property
    def alive(self) -> bool:
        """Whether it was still there when it was last listened to."""
        return self.code is None

    def listen(self, timeout_s: float | None = 0.0) -> None:
        """Takes in what it has to say; waits for the first word as long as is allowed."""
        while self.alive and select.select([self._socket], [], [], timeout_s)[0]:
            timeout_s = 0.0
            try:
                data = self._socket.recv(_MOST_ANSWER)
            except ConnectionResetError:
                data = b""
            if data:
                self._hear(json.loads(data))
            else:
                self._lost()

    def end(self) -> str:
        """How it ended, and its last words."""
        name = "unknown" if self.code is None else str(self.code)
        if self.code is not None and self.code < 0:
            name = signal.Signals(-self.code).name
            if name == "SIGKILL":
                name += ", by somebody, or by the system for lack of memory"
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").splitlines()[-_SAID_LINES:]
        tail = "".join(f"\n  | {line}" for line in lines)
        return (
            f"the process that ranks are forked from has ended ({name}), and they with it. "
            f"Try again, or cluster.start=fresh, which does without it.{tail}"
        )

    def close(self) -> None:
        """Ends it."""
        atexit.unregister(self.close)
        self._socket.close()
        self._said.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def abandon(self) -> None:
        """Leaves it to the process that has started it, of which this one is a fork."""
        atexit.unregister(self.close)
        self._socket.close()
        self._said.close()
        if self._process is not None:
            self._process.returncode = 0  # Not a child of this process: nobody waits for it here.

    def _send(self, request: dict[str, Any], files: Sequence[int]) -> None:
        body = os.memfd_create("request")
        try:
            os.write(body, json.dumps(request).encode())
            socket.send_fds(self._socket, [b"."], [body, *files])
        except (BrokenPipeError, ConnectionResetError):
            self._lost()
        finally:
            os.close(body)

    def _hear(self, answer: dict[str, int]) -> None:
        if "started" in answer:
            # Known at once: the next word may be that it has ended.
            pid = answer["started"]
            self._started = self._ranks[pid] = ForkedRank(self, pid)
        else:
            rank = self._ranks.pop(answer["ended"])
            rank.returncode, rank.peak_bytes = answer["code"], answer["peak_bytes"]

    def _lost(self) -> None:
        # The kernel ends the ranks: each has asked for that.
        self.code = 1 if self._process is None else self._process.wait()
        for rank in self._ranks.values():
            rank.returncode = -signal.SIGKILL
        self._ranks.clear()


class ForkedRank:
    """A rank that a server has forked, as ``subprocess.Popen`` shows a process of one's own.

    Attributes:
        pid: Its process, the leader of a session.
        returncode: None while it runs.
        peak_bytes: The most that were resident, once it has ended.
    """

    def __init__(self, server: RankServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None
        self.peak_bytes = 0

    def poll(self) -> int | None:
        self._server.listen()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(f"rank with pid {self.pid}", timeout or 0.0)
            self._server.listen(left)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)


_server: RankServer | None = None  # Of this process: what the jobs of a sweep share.


def rank_server(environment: Mapping[str, str]) -> RankServer:
    """The server of this command: started now, or for an earlier job in the same environment.

    Args:
        environment: Of all ranks. Threads are counted when torch is loaded, for one.
    """
    global _server
    if _server is not None:
        _server.listen()
        if not _server.alive or _server.environment != environment:
            _server.close()
            _server = None
    if _server is None:
        _server = RankServer(environment)
    return _server


def _forget_server() -> None:
    """A forked process has no server: two that read one socket take each other's answers."""
    global _server
    if _server is not None:
        _server.abandon()
        _server = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_server)


# -------------------------------------------------------------------------------------- other end


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next request and its files, as the server gets them; None where the launcher is gone."""
    data, files, _, _ = socket.recv_fds(channel, 1, _MOST_FILES)
    if not data:
        return None
    with open(files[0], "rb") as body:
        body.seek(0)
        return json.load(body), files[1:]


def answer(channel: socket.socket, **said: int) -> None:
    """What the server sends back."""
    channel.send(json.dumps(said).encode())
