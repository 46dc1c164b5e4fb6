"""How benchmarks print what they found; knows no torch."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from itertools import combinations
from pathlib import Path


class Table:
    """Rows under headings, as Markdown; ``numbers`` aligns all columns but the first right."""

    def __init__(self, *heads: str, numbers: bool = False) -> None:
        rule = ["---"] + ["---:" if numbers else "---"] * (len(heads) - 1)
        self._lines = [_row(heads), f"|{'|'.join(rule)}|"]

    def add(self, *cells: object) -> str:
        """Adds a row, and returns it as it is printed."""
        self._lines.append(_row(map(str, cells)))
        return self._lines[-1]

    def __len__(self) -> int:
        return len(self._lines) - 2

    def __str__(self) -> str:
        return "\n".join(self._lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper one."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Tau-b: pairs in the same order minus pairs in the other, ties taken out of both sides.

    >>> kendall_tau([1, 2, 3], [1, 3, 2])
    0.3333333333333333
    """
    agree = first_ties = second_ties = 0
    both = list(combinations(zip(first, second, strict=True), 2))
    for (a, b), (c, d) in both:
        x, y = (a > c) - (a < c), (b > d) - (b < d)
        agree += x * y
        first_ties += x == 0
        second_ties += y == 0
    scale = ((len(both) - first_ties) * (len(both) - second_ties)) ** 0.5
    return agree / scale if scale else 0.0


def furthest(values: Iterable[float]) -> float:
    """From 0."""
    return max(values, key=abs)


def machine() -> str:
    """This machine, and what runs on it."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return (
        f"{os.cpu_count()} x {model}, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, torch {metadata.version('torch')}, "
        f"load {os.getloadavg()[0]:.1f} at start"
    )


def command(name: str) -> str:
    """The command line that is running."""
    return " ".join([f"python -m benchmarks.{name}", *sys.argv[1:]])
