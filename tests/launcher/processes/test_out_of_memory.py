"""Memory that has run out, in words that help."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from launcher.processes import out_of_memory
from launcher.processes.failure import Failure
from launcher.processes.out_of_memory import OomCount, as_out_of_memory, peak_bytes
from tests.launcher.runs import REPOSITORY

TORCH = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
)


def test_a_process_at_its_limit_says_what_it_had_and_what_it_may_have():
    script = (
        "import resource\n"
        "from launcher.processes.out_of_memory import as_out_of_memory\n"
        "resource.setrlimit(resource.RLIMIT_AS, (400_000_000, 400_000_000))\n"
        "try:\n"
        "    bytearray(1_000_000_000)\n"
        "except MemoryError as error:\n"
        "    print(as_out_of_memory(error))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.fullmatch(
        r"out of memory: MemoryError\. At most \d\.\d\d GB were resident in this rank; address "
        r"space is limited to 0\.40 GB\. Try a smaller data\.microbatch_size or recompute=full; "
        r"mode=validate estimates the memory of each rank\.\n",
        done.stdout,
    ), done.stdout


@pytest.mark.parametrize("said", [TORCH, "CUDA out of memory. Tried to allocate 2.00 GiB."])
def test_what_allocators_say_is_understood(said):
    found = as_out_of_memory(RuntimeError(f"{said}\nmore"))
    assert str(found).startswith(f"out of memory: {said}. At most ")
    assert found.exit_code == 1


def test_other_failures_stay_what_they_are():
    assert as_out_of_memory(RuntimeError("size mismatch")) is None
    assert peak_bytes() > 10_000_000


def test_a_kill_is_the_kernels_only_if_it_has_counted_one(tmp_path, monkeypatch):
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 1\noom_kill 3\nnuma_hit 2\n")
    monkeypatch.setattr(out_of_memory, "_VMSTAT", vmstat)
    killed = Failure(1, "host", 0.0, "SIGKILL", "ended by SIGKILL", -9)
    count = OomCount()
    assert count.explain(killed) is killed
    vmstat.write_text("oom_kill 4\n")
    found = count.explain(killed)
    assert (found.kind, found.exit_code) == ("OutOfMemory", -9)
    assert "the kernel has killed a process for lack of memory" in found.message
    ended = Failure(1, "host", 0.0, "SIGTERM", "ended by SIGTERM", -15)
    assert count.explain(ended) is ended
