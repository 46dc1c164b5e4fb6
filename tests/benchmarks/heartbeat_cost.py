"""What a heartbeat costs per instruction: the writes that the executor makes, on a shared page.

    python -m tests.benchmarks.heartbeat_cost

Prints the median of several rounds in microseconds, beside an empty loop and one clock read (the
recorder makes two of these per instruction); asserts nothing.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

from strategies.heartbeat import PAGE, STATE, WAITING, Heartbeat, new_page

WRITES = 200_000
ROUNDS = 15


def main() -> None:
    page = new_page()
    beat = Heartbeat(page).words
    kinds: dict[str, Callable[[], None]] = {
        "SEND, RECV, REDUCE: 1 write": lambda: _one(beat),
        "F, B, I, W: 2 writes": lambda: _two(beat),
        "F, B, I with a message: 3 writes": lambda: _three(beat),
        "a clock read": _clock,
    }
    empty = _each(_empty)
    for name, loop in kinds.items():
        sys.stdout.write(f"{name:34} {_each(loop) - empty:.3f} us\n")
    sys.stdout.write(f"page of {PAGE} bytes; machine with {os.cpu_count()} cores\n")


def _each(loop: Callable[[], None]) -> float:
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        loop()
        times.append((time.perf_counter() - started) / WRITES * 1e6)
    return statistics.median(times)


def _empty() -> None:
    for _ in range(WRITES):
        pass


def _one(beat: memoryview) -> None:
    for place in range(WRITES):
        beat[STATE] = place << 1


def _two(beat: memoryview) -> None:
    for place in range(WRITES):
        beat[STATE] = place << 1
        beat[STATE] = place << 1


def _three(beat: memoryview) -> None:
    for place in range(WRITES):
        beat[STATE] = place << 1
        beat[STATE] = place << 1 | WAITING
        beat[STATE] = place << 1


def _clock() -> None:
    for _ in range(WRITES):
        time.perf_counter()


if __name__ == "__main__":
    main()
