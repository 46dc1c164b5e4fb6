"""Forks the ranks of every run that the tests start: what they import is imported once.

A launcher that finds ``FOLDPIPE_RANK_SERVER`` in its environment asks there instead of starting a
process of its own. Each gets a fork of this one, which serves it as its own process would.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from launcher.processes.rank_server import ROOM_VARIABLE
from launcher.rank import worker
from launcher.rank.fork_server import serve
from launcher.secrets import MaskedStream

_MODULES = ("launcher.rank.jobs", "launcher.workloads.hf.hf_model", "omegaconf")


@functools.cache
def _started(variables: tuple[tuple[str, str], ...]) -> str:
    folder = tempfile.TemporaryDirectory(prefix="foldpipe-tests-")
    address = str(Path(folder.name) / "ranks")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(16)  # Who comes before all is imported waits.
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listener.fileno()), " " * 300],
            env=dict(variables) | {ROOM_VARIABLE: "." * 4096, "FOLDPIPE_PARENT": str(os.getpid())},
            pass_fds=(listener.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def end() -> None:
        process.kill()
        process.wait()
        folder.cleanup()

    atexit.register(end)
    return address


_first: list[tuple[tuple[str, str], ...]] = []


def address(variables: Mapping[str, str]) -> str | None:
    """Where to ask for ranks; None where their variables are not those of the first that asked.

    Libraries read some when they are loaded.
    """
    found = tuple(sorted(variables.items()))
    _first[:] = _first or [found]
    return _started(found) if [found] == _first else None


def main() -> None:
    worker.die_with(int(os.environ["FOLDPIPE_PARENT"]))
    sys.stdout, sys.stderr = MaskedStream(sys.stdout), MaskedStream(sys.stderr)
    for name in _MODULES:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel buries them.
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        os.set_inheritable(listener.fileno(), False)
        own = os.getpid()
        while True:
            channel, _ = listener.accept()
            with channel:
                if os.fork():
                    continue
                listener.close()
                worker.die_with(own)
                serve(channel)
                worker.leave(0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
