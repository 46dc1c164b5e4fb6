"""Who failed first, where the first to complain is a neighbour."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys

import pytest

from launcher.processes import failure
from launcher.processes.failure import (
    Failure,
    OomCount,
    as_full_disk,
    as_out_of_memory,
    blame,
    failure_on,
    first_failure,
    is_consequence,
    peak_bytes,
    raised,
    timed_out,
    timed_out_earlier,
    write_failure,
)
from launcher.processes.local import our_path
from launcher.report.result import write_atomically
from strategies.errors import RunError
from strategies.heartbeat import Beat, Heartbeat, new_page


def test_a_rank_that_can_write_no_file_leaves_its_words_on_its_page(tmp_path):
    page = new_page()
    assert failure_on(page) is None
    (tmp_path / "logs").symlink_to("/proc/self")  # where no file can be made
    assert write_failure(tmp_path, 1, RunError("a disk of one's own"), Heartbeat(page)) == 1
    found = failure_on(page)
    os.close(page)
    assert found is not None and (found.rank, found.message) == (1, "a disk of one's own")


def failed(rank: int, message: str, *, at: float = 1.0, code: int = 1) -> Failure:
    lost = message in (TIMED_OUT, PAIR_CLOSED, RESET)
    return Failure(rank, "host", at, "RuntimeError", message, code, lost=lost)


def beat(doing: str, *peers: int, waiting: bool = False) -> Beat:
    return Beat(3, doing, peers, waiting, True, (1, 1))


TIMED_OUT = "Timed out waiting 5000ms for recv operation to complete\nmore"
PAIR_CLOSED = "Application timeout caused pair closure"
RESET = "Connection reset by peer"


def test_a_killed_rank_comes_before_those_that_have_lost_it():
    killed = Failure(2, "host", 2.0, "SIGKILL", "ended by SIGKILL", -9)
    reset = failed(1, RESET, at=1.0)
    beats = {rank: beat("F") for rank in range(3)}
    assert blame([reset, killed], beats, {0: 0.0}) is killed


def test_a_rank_that_says_why_comes_before_those_that_have_lost_it():
    reason = failed(0, "CUDA error", at=9.0)
    assert blame([failed(1, TIMED_OUT), reason], {0: beat("F"), 1: beat("F")}, {}) is reason


@pytest.mark.parametrize("message", [TIMED_OUT, PAIR_CLOSED])
def test_who_has_given_up_waiting_is_no_cause_in_either_of_gloos_words(message):
    gave_up = failed(1, message, at=1.0)
    assert timed_out(gave_up) and is_consequence(gave_up)
    assert timed_out_earlier(gave_up) == (message != TIMED_OUT)
    reason = failed(0, "CUDA error", at=9.0)
    assert not timed_out(reason) and not is_consequence(reason)
    assert first_failure([gave_up, reason]) is reason


def test_who_gave_up_waiting_leads_to_the_one_that_was_waited_for():
    beats = {
        0: beat("between two passes"),
        1: beat("RECV", 0, waiting=True),
        2: beat("RECV", 1, waiting=True),
    }
    found = blame([failed(2, TIMED_OUT)], beats, {0: 130.0, 1: 120.0})
    assert (found.rank, found.kind, found.exit_code) == (0, "no progress", 1)
    assert found.message == (
        "it has not gone on for 130.0 s, and rank 2 has given up waiting (cluster.timeout_s): "
        "RuntimeError: Timed out waiting 5000ms for recv operation to complete"
    )


def test_where_everybody_has_given_up_the_first_one_speaks():
    beats = {0: beat("RECV", 1, waiting=True), 1: beat("RECV", 0, waiting=True)}
    first = failed(1, TIMED_OUT, at=1.0)
    assert blame([failed(0, TIMED_OUT, at=2.0), first], beats, {}) is first


def test_of_a_collective_the_rank_that_is_not_in_it_is_the_cause():
    sharing = beat("sharing loss", waiting=True)
    beats = {0: sharing, 1: sharing, 2: beat("F mb=1 of stage 2"), 3: sharing}
    assert blame([failed(3, TIMED_OUT)], beats, {0: 5.0, 1: 5.0, 2: 4.0}).rank == 2


def test_a_rank_that_hangs_between_passes_is_the_cause_of_a_wait_there():
    """Its loader, say, while the other waits in a collective that no instruction stands for."""
    beats = {0: beat("between two passes"), 1: beat("between two passes")}
    found = blame([failed(0, TIMED_OUT)], beats, {1: 12.0})
    assert (found.rank, found.kind) == (1, "no progress")
    assert found.message.startswith("it has not gone on for 12.0 s, and rank 0 has given up")
    # All have ended: nobody is left who could be the cause.
    first = failed(0, TIMED_OUT)
    assert blame([first, failed(1, TIMED_OUT, at=2.0)], beats, {}) is first


def raised_in(module: str, error: str) -> Failure:
    """What is made of an exception that code of a module raises."""
    try:
        exec(f"raise {error}", {"__name__": module, "RunError": RunError})
    except Exception as found:
        return raised(0, found)
    raise AssertionError(error)


@pytest.mark.parametrize(
    ("module", "error", "lost"),
    [
        ("torch.distributed.distributed_c10d", "RuntimeError('Timed out waiting 5000ms')", True),
        ("strategies.runtime.messages.mailbox", "RuntimeError('Connection closed by peer')", True),
        ("strategies.runtime.storage.commit", "RunError('another rank failed, rank 1')", True),
        ("my_net", "ValueError('cannot reach the database: connection refused')", False),
        ("requests.adapters", "ConnectionError('Connection refused')", False),
        ("my_net", "RuntimeError('gloo')", False),
        ("torch.distributed.distributed_c10d", "ValueError('tensors must be of one size')", False),
        ("strategies.runtime.storage.commit", "RunError('hook: ValueError: connection')", False),
        ("torch.distributed_of_mine", "RuntimeError('Timed out')", False),
    ],
)
def test_who_has_lost_another_rank_is_told_by_where_it_was_raised(module, error, lost):
    assert is_consequence(raised_in(module, error)) == lost


def test_what_is_raised_over_a_lost_rank_is_a_consequence_too():
    try:
        try:
            exec("raise RuntimeError('Connection closed')", {"__name__": "torch.distributed"})
        finally:
            raise KeyError("crash_report_url")  # a callback's on_exception
    except KeyError as found:
        assert is_consequence(raised(1, found))


# ----------------------------------------------------------------------------------- out of memory
#
# Memory that has run out, in words that help.


TORCH = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
)


def test_a_process_at_its_limit_says_what_it_had_and_what_it_may_have():
    script = (
        "import resource\n"
        "from launcher.processes.failure import as_out_of_memory\n"
        "resource.setrlimit(resource.RLIMIT_AS, (400_000_000, 400_000_000))\n"
        "try:\n"
        "    bytearray(1_000_000_000)\n"
        "except MemoryError as error:\n"
        "    print(as_out_of_memory(error))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": our_path(os.environ)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.fullmatch(
        r"out of memory: MemoryError\. At most \d\.\d\d GB were resident in this process; address "
        r"space is limited to 0\.40 GB\. Run `ulimit -v unlimited` in this shell first, or try a "
        r"smaller data\.microbatch_size or recompute=full; mode=validate estimates the memory of "
        r"each rank\.\n",
        done.stdout,
    ), done.stdout


@pytest.mark.parametrize("said", [TORCH, "CUDA out of memory. Tried to allocate 2.00 GiB."])
def test_what_allocators_say_is_understood(said):
    found = as_out_of_memory(RuntimeError(f"{said}\nmore"))
    assert str(found).startswith(f"out of memory: {said}. At most ")
    assert found.exit_code == 1


def test_a_run_folder_that_is_gone_is_told(tmp_path):
    lost = OSError(errno.ESTALE, "Stale file handle", str(tmp_path / "run" / "metrics.csv"))
    told = as_full_disk(lost, tmp_path / "run")
    assert f"the run folder {tmp_path}/run is gone: somebody has deleted it" in str(told)


def test_a_full_disk_is_named_by_the_file_that_it_did_not_take(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    run_dir, other = tmp_path / "run", tmp_path / "elsewhere" / "profile.json"
    run_dir.mkdir()
    with pytest.raises(OSError, match=r"profile\.json") as raised:
        write_atomically(other, "{}")
    told = str(as_full_disk(raised.value, run_dir))
    assert told.startswith(f"{other} cannot be written: No space left on device (")
    assert told.endswith("Free some, or try another place for it.")
    (run_dir / "checkpoints" / "step-1.ckpt").mkdir(parents=True)
    inside = OSError(errno.ENOSPC, "", str(run_dir / "metrics.csv"))
    assert "another hydra.run.dir; trainer.resume=auto goes on" in str(
        as_full_disk(inside, run_dir)
    )


def test_other_failures_stay_what_they_are():
    assert as_out_of_memory(RuntimeError("size mismatch")) is None
    assert peak_bytes() > 10_000_000


def test_a_kill_is_the_kernels_only_if_it_has_counted_one(tmp_path, monkeypatch):
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 1\noom_kill 3\nnuma_hit 2\n")
    monkeypatch.setattr(failure, "_VMSTAT", vmstat)
    killed = Failure(1, "host", 0.0, "SIGKILL", "ended by SIGKILL", -9)
    count = OomCount()
    assert count.explain(killed) is killed
    vmstat.write_text("oom_kill 4\n")
    found = count.explain(killed)
    assert (found.kind, found.exit_code) == ("OutOfMemory", -9)
    assert "the kernel has killed a process for lack of memory" in found.message
    ended = Failure(1, "host", 0.0, "SIGTERM", "ended by SIGTERM", -15)
    assert count.explain(ended) is ended
