"""The process that launchers of the tests are forked from: what they import is imported once.

It lives as long as the process of pytest, and is as free of torch as any launcher. A fork of it has
the folder, variables, files, arguments and streams that a process of its own would have, and runs
``__main__`` from its first line.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.ranks.rank_server import REPOSITORY, VARIABLES

# Read by Python itself, or while something is imported.
_READ_EARLY = ("PYTHON", "LANG", "LC_", "TZ", "MPL", "LD_")
_LAUNCHER = ("-m", "launcher")
_LAZY = (
    "launcher.commands.evaluate", "launcher.commands.layouts", "launcher.commands.ranks",
    "launcher.commands.train", "launcher.compose.job_pool", "launcher.compose.multirun",
    "psutil",
)  # fmt: skip


def serves(given: Mapping[str, str]) -> bool:
    """Whether a launcher with these variables does not differ from one that is started."""
    changed = {name for name, _ in given.items() ^ VARIABLES.items()}
    return not any(name.startswith(_READ_EARLY) for name in changed)


def run_forked(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], *, timeout_s: float
) -> tuple[int, str, str]:
    """Exit code, output and errors of ``python -W error -m launcher *words``.

    Raises:
        subprocess.TimeoutExpired: It did not end, and was killed.
    """
    umask = os.umask(0o077)
    os.umask(umask)
    request = {
        "words": [*words], "folder": str(folder), "environment": {**environment}, "umask": umask,
    }  # fmt: skip
    said: list[bytes] = [b"", b""]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.connect(_address())
        pipes = [os.pipe() for _ in said]
        body = os.memfd_create("request")
        os.write(body, json.dumps(request).encode())
        socket.send_fds(channel, [b"."], [body, 0, *(end for _, end in pipes)])
        for file in (body, *(end for _, end in pipes)):
            os.close(file)
        readers = [
            threading.Thread(target=_read_all, args=(start, said, place))
            for place, (start, _) in enumerate(pipes)
        ]
        for reader in readers:
            reader.start()
        until = time.monotonic() + timeout_s
        pid = json.loads(channel.recv(1 << 10))
        for reader in readers:
            reader.join(max(0.0, until - time.monotonic()))
        channel.settimeout(max(0.1, until - time.monotonic()))
        try:
            code = json.loads(channel.recv(1 << 10))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired([*_LAUNCHER, *words], timeout_s, *said) from None
        for reader in readers:
            reader.join()
    output, errors = (text.decode().replace("\r\n", "\n") for text in said)
    return code, output, errors


def _read_all(start: int, said: list[bytes], place: int) -> None:
    with open(start, "rb") as stream:
        said[place] = stream.read()


@functools.cache
def _address() -> str:
    """Where it listens; started by the first who asks, and ended with this process."""
    folder = tempfile.TemporaryDirectory(prefix="foldpipe-tests-")
    address = str(Path(folder.name) / "launchers")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(16)  # Who comes before all is imported waits.
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", __name__, str(listener.fileno())],
            env=VARIABLES,
            cwd=REPOSITORY,
            pass_fds=(listener.fileno(),),
            stdin=subprocess.DEVNULL,
        )

    def end() -> None:
        process.terminate()
        process.wait()
        folder.cleanup()

    atexit.register(end)
    return address


# -------------------------------------------------------------------------------------- other end


def main() -> None:
    listening = int(sys.argv[1])
    # As it is while `python -m launcher` imports the package, which looks.
    sys.argv[0], sys.orig_argv[:] = "-m", [sys.executable, "-W", "error", *_LAUNCHER]
    program = importlib.import_module("launcher.__main__")
    for name in _LAZY:
        importlib.import_module(name)
    # It is run, not imported.
    del sys.modules[program.__name__], sys.modules["launcher"].__main__
    assert not {"torch", "lightning", "wandb"} & sys.modules.keys()
    signal.signal(signal.SIGTERM, _end)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=listening) as listener:
        os.set_inheritable(listening, False)
        while True:
            channel, _ = listener.accept()
            with channel:
                if os.fork() == 0:
                    listener.close()
                    _serve(channel)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _end(*_: object) -> None:
    """Their seconds are then known as those of the tests."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0)[0]:
            pass
    os._exit(0)


def _serve(channel: socket.socket) -> NoReturn:
    """Waits for one launcher, and tells its code as ``subprocess`` has it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(channel, 1, 8)
    with open(files[0], "rb") as body:
        body.seek(0)
        request = json.load(body)
    pid = os.fork()
    if pid == 0:
        channel.close()
        _be_launcher(request, files[1:])
    for file in files[1:]:
        os.close(file)
    with contextlib.suppress(BrokenPipeError):
        channel.send(json.dumps(pid).encode())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        channel.send(json.dumps(code).encode())
    os._exit(0)


def _be_launcher(request: Mapping[str, Any], files: Sequence[int]) -> NoReturn:
    """Makes a forked process what a started one would be, and ends as Python would."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    encoding = sys.stderr.encoding
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = (
        open(0, encoding=encoding, closefd=False),  # noqa: SIM115  as long as the process lives
        open(1, "w", encoding=encoding, closefd=False),  # noqa: SIM115
        open(2, "w", 1, encoding, "backslashreplace", closefd=False),  # noqa: SIM115
    )
    os.umask(request["umask"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[0] = request["folder"]
    tempfile.tempdir = None
    importlib.invalidate_caches()
    sys.argv = ["-m", *request["words"]]
    sys.orig_argv += request["words"]
    code: Any = 0
    try:
        runpy.run_module("launcher", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        code = 1
        traceback.print_exc()
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    main()
