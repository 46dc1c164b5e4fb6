"""What a heartbeat costs per instruction: the writes that the executor makes, on a shared page.

    python -m benchmarks.heartbeat_cost [--writes 200000] [--rounds 15]

Prints the median of several rounds in microseconds, beside an empty loop and one clock read (the
recorder makes two of these per instruction); asserts nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

from strategies.heartbeat import PAGE, STATE, WAITING, Heartbeat, new_page


def main() -> None:
    """Prints a line per kind of instruction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--writes", type=int, default=200_000, help="per round")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    page = new_page()
    beat = Heartbeat(page).words
    kinds: dict[str, Callable[[int], None]] = {
        "SEND, RECV, REDUCE: 1 write": partial(_one, beat),
        "F, B, I, W: 2 writes": partial(_two, beat),
        "F, B, I with a message: 3 writes": partial(_three, beat),
        "a clock read": _clock,
    }
    empty = _each(_empty, given.writes, given.rounds)
    for name, loop in kinds.items():
        taken = _each(loop, given.writes, given.rounds) - empty
        sys.stdout.write(f"{name:34} {taken:.3f} us\n")
    sys.stdout.write(f"page of {PAGE} bytes; machine with {os.cpu_count()} cores\n")


def _each(loop: Callable[[int], None], writes: int, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        loop(writes)
        times.append((time.perf_counter() - started) / writes * 1e6)
    return statistics.median(times)


def _empty(writes: int) -> None:
    for _ in range(writes):
        pass


def _one(beat: memoryview, writes: int) -> None:
    for place in range(writes):
        beat[STATE] = place << 1


def _two(beat: memoryview, writes: int) -> None:
    for place in range(writes):
        beat[STATE] = place << 1
        beat[STATE] = place << 1


def _three(beat: memoryview, writes: int) -> None:
    for place in range(writes):
        beat[STATE] = place << 1
        beat[STATE] = place << 1 | WAITING
        beat[STATE] = place << 1


def _clock(writes: int) -> None:
    for _ in range(writes):
        time.perf_counter()


if __name__ == "__main__":
    main()
