"""Limits of the system and what torch says in C++: one message that names the right thing."""

from __future__ import annotations

import errno
import multiprocessing.synchronize
import resource
from pathlib import Path

import pytest

from launcher import terminal
from launcher.processes import failure
from launcher.processes.failure import Failure, describe, explained, raised, write_failure
from strategies.errors import readable, without_stack

STACK = (
    "\nException raised from recvBytes at /pytorch/torch/csrc/Utils.hpp:678 (most recent call "
    "first):\nframe #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7f3 in "
    "/lib/libc10.so)\nframe #1: <unknown function> + 0x5ffd41b (0x7f4 in /lib/libtorch_cpu.so)\n"
    "frame #2: clone + 0x43 (0x7f5 in /lib/libc.so.6)\n"
)
WARNING = "[W1128 00:00:00.0 TCPStore.cpp:125] [c10d] recvValue failed: Connection was reset"


def test_of_what_torch_says_the_stack_of_its_own_code_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert without_stack(f"Failed to recv, got 0 bytes.{STACK}") == "Failed to recv, got 0 bytes."
    assert without_stack("frame #0 of my film is dark") == "frame #0 of my film is dark"
    told = raised(1, RuntimeError(f"Failed to recv, got 0 bytes.{STACK}"))
    assert told.message == "Failed to recv, got 0 bytes."
    terminal.say_error(RuntimeError(f"closed{STACK}"))
    assert capsys.readouterr().err == "error: closed\n"
    log = tmp_path / "log"
    log.write_text(f"step 3\n{WARNING}{STACK}{WARNING}{STACK}")
    ended = describe(Failure(0, "here", 0.0, "Error", "closed", 1), log)
    assert ended.endswith(f"ends with:\n  | step 3\n  | {WARNING}\n  | {WARNING}")


def test_a_stack_that_torch_was_asked_for_is_left_out_too() -> None:
    said = (  # with TORCH_SHOW_CPP_STACKTRACES=1
        "size mismatch, got input (2), vec (3)\nException raised from addmv at /pytorch/a.cpp:66 "
        "(most recent call first):\nC++ CapturedTraceback:\n#4 std::function<> from Logging.cpp:0\n"
        "#5 c10::Error::Error(c10::SourceLocation) from ??:0\n"
    )
    assert readable(said) == "size mismatch, got input (2), vec (3)"


def test_open_files_are_named_with_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 4096))
    for error in (
        OSError(errno.EMFILE, "Too many open files", "/run/x"),
        RuntimeError("[enforce fail] pipe2() failed: Too many open files"),
    ):
        said = str(explained(error))
        assert said.startswith("too many open files: a process may have 40 here. Run `ulimit -n 40")


def test_a_rank_without_a_descriptor_left_still_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    plain = Path.write_text

    def write(file: Path, text: str) -> int:
        if not closed:
            raise OSError(errno.EMFILE, "Too many open files", str(file))
        return plain(file, text)

    monkeypatch.setattr("os.close", closed.append)
    monkeypatch.setattr(Path, "write_text", write)
    (tmp_path / "logs").mkdir()
    code = write_failure(tmp_path, 0, OSError(errno.EMFILE, "Too many open files"))
    monkeypatch.undo()
    assert (code, closed) == (1, [0])
    assert "Too many open files" in failure.failure_file(tmp_path, 0).read_text()


def test_processes_and_threads_are_named_with_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (50, 50))
    for error in (
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        RuntimeError("can't start new thread"),
        RuntimeError("pthread_create failed: Resource temporarily unavailable"),
    ):
        assert str(explained(error)).startswith("no further process or thread can be started: `uli")
        assert "says 50 for this user" in str(explained(error))


def test_a_missing_proc_is_named_and_a_missing_process_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/meminfo")
    assert explained(error) is None  # It is there.
    monkeypatch.setattr(failure.Path, "exists", lambda _: False)
    assert "/proc/meminfo is not there: " in str(explained(error))
    assert "mount -t proc proc /proc" in str(explained(error))


def test_a_library_without_room_in_memory_is_out_of_memory() -> None:
    error = ImportError("libtorch_cpu.so: failed to map segment from shared object")
    assert str(explained(error)).startswith("out of memory: libtorch_cpu.so: failed to map")


def test_shared_memory_that_is_read_only_is_not_the_run_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(multiprocessing.synchronize, "sem_unlink", refused)
    monkeypatch.setattr(multiprocessing.synchronize._multiprocessing, "SemLock", refused)
    with pytest.raises(OSError, match="Read-only") as lock:
        multiprocessing.get_context("fork").Lock()
    torch_said = RuntimeError(
        "unable to open shared memory object </torch_1_2_3> in read-write mode: Read-only file "
        "system (30)"
    )
    for error in (lock.value, torch_said):
        said = str(explained(error, tmp_path))
        assert said.startswith("/dev/shm cannot be written: Read-only file system (")
        assert "data.num_workers=0, or make it writable" in said
        assert str(tmp_path) not in said
