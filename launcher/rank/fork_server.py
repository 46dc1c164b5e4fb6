"""One process that has imported what ranks need, and forks them: importing is paid once.

Started as ``python -m launcher.rank.fork_server DESCRIPTOR`` by ``launcher.processes.rank_server``,
which says what is spoken on that socket. A rank that was forked here goes the way of
``launcher.rank.worker`` and must not differ from one that was started by itself: environment,
signals, output, random numbers, threads, and what ``ps`` shows.

Nothing but imports may happen before a fork. An operation of torch, CUDA or a process group leaves
threads and locks behind that a fork breaks. Where an import has started CUDA, which cannot be used
after a fork, each rank replaces itself by a Python of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from launcher.processes.local import our_python
from launcher.processes.rank_server import LEFT_TO_OTHERS, answer, receive
from launcher.rank import worker
from launcher.secrets import MaskedStream

_STARTED_WITH = dict(os.environ)


def main() -> None:
    """Serves the launcher that has started this process."""
    worker.die_with(int(os.environ["FOLDPIPE_PARENT"]))
    # Loggers that are made while modules are imported keep the streams of that moment.
    sys.stdout, sys.stderr = MaskedStream(sys.stdout), MaskedStream(sys.stderr)
    faulthandler.enable()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as channel:
        serve(channel)


def serve(
    channel: socket.socket,
    run: Callable[[Path], int] = worker.run_rank,
    module: str = worker.__name__,
) -> None:
    """Does what is asked for until the other end is closed; then ends the ranks that still run.

    Args:
        channel: To the launcher.
        run: What a rank does in its run's folder; returns its exit code.
        module: Does the same as a program, for ranks that cannot be forked.
    """
    running: set[int] = set()
    with _undisturbed(), _ends_told() as ends, selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(ends, selectors.EVENT_READ)
        with contextlib.suppress(ConnectionError):
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if ends in ready:
                    ends.recv(1 << 12)
                    _tell_ends(channel, running)
                if channel in ready:
                    found = receive(channel)
                    if found is None:
                        break
                    _do(channel, *found, running, run, module)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


_before: dict[signal.Signals, Any] = {}


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Leaves what asks for an end to the launcher and the ranks, which save a checkpoint first.

    A scheduler asks every process of a job, and this one would take all ranks with it.
    """
    _before.update({number: signal.signal(number, signal.SIG_IGN) for number in LEFT_TO_OTHERS})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_OTHERS)
    try:
        yield
    finally:
        for number, handler in _before.items():
            signal.signal(number, handler)


@contextmanager
def _ends_told() -> Iterator[socket.socket]:
    """A socket that becomes readable when a child has ended."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            yield ours
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)


def _tell_ends(channel: socket.socket, running: set[int]) -> None:
    for pid in tuple(running):
        found, status, used = os.wait4(pid, os.WNOHANG)
        if found:
            running.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            answer(channel, ended=pid, code=code, peak_bytes=used.ru_maxrss * 1024)


def _do(
    channel: socket.socket,
    request: Mapping[str, Any],
    files: Sequence[int],
    running: set[int],
    run: Callable[[Path], int],
    module: str,
) -> None:
    for name in request.get("import", ()):
        # What cannot be imported here cannot be in a rank, whose log and message say why.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if "run_dir" not in request:
        return
    gc.collect()
    gc.freeze()  # A collection in a rank would else write to, and so copy, all that is shared.
    server = os.getpid()
    begun, begins = os.pipe()
    pid = os.fork()
    if pid == 0:
        channel.close()
        os.close(begun)
        _be_rank(request, files, begins, server, run, module)
    os.close(begins)
    os.read(begun, 1)  # Only the leader of a session can be ended with all that it starts.
    os.close(begun)
    for file in files:
        os.close(file)
    running.add(pid)
    answer(channel, started=pid)


def _be_rank(
    request: Mapping[str, Any],
    files: Sequence[int],
    begins: int,
    server: int,
    run: Callable[[Path], int],
    module: str,
) -> NoReturn:
    """Makes a forked process what a started one would be, and runs the rank."""
    code = 1
    try:
        os.setsid()
        os.close(begins)
        worker.die_with(server)
        _restore_signals()
        said = _said_so_far()
        environment = _with_files(request, files)
        if _cuda_is_lost():
            _start_again(module, request, environment, server)
        _as_started(request, environment, said)
        code = run(Path(request["run_dir"]))
    except BaseException:
        traceback.print_exc()
    finally:
        worker.leave(code)


def _restore_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, handler in _before.items():
        signal.signal(number, handler)


def _with_files(request: Mapping[str, Any], files: Sequence[int]) -> dict[str, str]:
    """Makes the first file this process's output; its variables, which name the others."""
    log, *others = files
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return {
        **request["environment"],
        **dict(zip(request["files"], map(str, others), strict=True)),
    }


def _cuda_is_lost() -> bool:
    """Whether an import in the server has started CUDA, so that torch refuses it in a fork."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda._is_in_bad_fork()


def _start_again(
    module: str, request: Mapping[str, Any], environment: Mapping[str, str], server: int
) -> NoReturn:
    """Replaces this process by a new Python: pid, session, open files and log stay."""
    os.chdir(request["folder"])
    words = our_python(module, request["run_dir"])
    os.execve(words[0], words, {**environment, "FOLDPIPE_PARENT": str(server)})


def _as_started(request: Mapping[str, Any], environment: Mapping[str, str], said: bytes) -> None:
    os.write(2, said)  # warnings of imports stand in the log of every rank that imports
    # Modules have set some while they were imported, and will not do so again.
    set_by_imports = dict(os.environ.items() - _STARTED_WITH.items())
    threads = "OMP_NUM_THREADS"  # Counted when torch is loaded.
    assert _STARTED_WITH.get(threads) == environment.get(threads)
    os.environ.clear()
    os.environ.update({**environment, **set_by_imports})
    before = str(Path.cwd())
    os.chdir(request["folder"])
    if sys.path[0] == before:
        sys.path[0] = request["folder"]
    importlib.invalidate_caches()
    sys.argv = [worker.__file__, request["run_dir"]]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # torch's seed is a constant, Python's renews itself
    words = [sys.orig_argv[0], *our_python(worker.__name__, request["run_dir"])[1:]]
    _appear_as(words, [f"{name}={value}" for name, value in environment.items()])


def _said_so_far() -> bytes:
    """What this process has written into the file that is its output."""
    try:
        return os.pread(2, os.fstat(2).st_size, 0)
    except OSError:  # no file
        return b""


def _appear_as(words: Sequence[str], variables: Sequence[str]) -> None:
    """Changes what ``ps`` and ``/proc`` show: people look for ranks there by name and variable.

    Their text is the memory that the kernel has filled when this program was started. Nobody else
    reads it: Python has copied the words, and libc the variables that have just been set anew.
    """
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    bounds = [int(stat[number - 3]) for number in (48, 49, 50, 51)]  # as proc(5) numbers them
    for (start, end), texts in zip((bounds[:2], bounds[2:]), (words, variables), strict=True):
        text = b"".join(os.fsencode(text) + b"\0" for text in texts)
        ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
