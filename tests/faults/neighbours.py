"""Injects every row of docs/faults.md's second table several times, and says how often it held.

    python -m tests.faults.neighbours                 three times each; prints the rows
    python -m tests.faults.neighbours --times 5 disk  five times, rows with that word alone
    python -m tests.faults.neighbours --write         puts the figures into the page, too

A figure is ``held/tried cases, seconds of the longest``: a case is one of a row's tests with one of
its parameters, and its time that of the whole test, the start of its ranks included. What needs a
machine that this one is not (SLURM, root) skips itself and is not counted. Other figures of the
page, which were counted by hand, stay as they are.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.faults.results import record

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "faults.md"
_BEGINS = "## Neighbours, disks and tired users"
_ENDS = "\n## Fuzz"
_TEST = re.compile(r"`(tests/[\w/]+\.py::\w+)`")
# A figure that this command has written, or none yet.
_OURS = re.compile(r"test|\d+/\d+ cases, [\d.]+ s")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        fault: Its first cell.
        seen: The figure that the page has.
        tests: What injects it: ``tests/...py::name``.
    """

    line: str
    fault: str
    seen: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Count:
    """Cases that held, all of them, and the longest in seconds."""

    held: int
    tried: int
    worst_s: float

    def __str__(self) -> str:
        return f"{self.held}/{self.tried} cases, {self.worst_s:.1f} s"


def rows(text: str) -> list[Row]:
    """The rows of the second table of the page."""
    part = text.partition(_BEGINS)[2].partition(_ENDS)[0]
    found: list[Row] = []
    for line in part.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 4 or cells[0] in ("what happens", "---"):
            continue
        tests = tuple(_TEST.findall(cells[3])) or (found[-1].tests if found else ())
        found.append(Row(line, cells[0], cells[2], tests))
    return found


def with_figures(text: str, counts: dict[str, Count]) -> str:
    """The page with the figures of these faults, where they are not somebody's own words."""
    for row in rows(text):
        count = counts.get(row.fault)
        if count is not None and count.tried and _OURS.fullmatch(row.seen):
            written = row.line.replace(f"| {row.seen} |", f"| {count} |", 1)
            text = text.replace(row.line, written)
    return text


def counted(row: Row, cases: dict[str, list[tuple[bool, float]]]) -> Count:
    """What the cases of a row's tests come to."""
    found = [case for test in row.tests for case in cases.get(test, ())]
    held = sum(good for good, _ in found)
    return Count(held, len(found), max((seconds for _, seconds in found), default=0.0))


def cases_of(report: Path) -> dict[str, list[tuple[bool, float]]]:
    """Test -> whether each of its cases held, and its seconds; those that were skipped are none."""
    found = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if "skipped" not in kinds:
            module = case.attrib["classname"].replace(".", "/")
            name = f"{module}.py::{case.attrib['name'].partition('[')[0]}"
            found[name].append((not kinds & {"failure", "error"}, float(case.attrib["time"])))
    return found


def _run(tests: tuple[str, ...]) -> dict[str, list[tuple[bool, float]]]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "", f"--junitxml={report}", *tests],
            cwd=REPOSITORY,
            env={"OMP_NUM_THREADS": "1"} | os.environ,
            check=False,
        )
        return cases_of(report)


def main() -> None:
    parser = argparse.ArgumentParser(usage="python -m tests.faults.neighbours [words]")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("word", nargs="*")
    asked = parser.parse_args()
    wanted = [row for row in rows(PAGE.read_text()) if all(word in row.line for word in asked.word)]
    cases: dict[str, list[tuple[bool, float]]] = defaultdict(list)
    tests = tuple(dict.fromkeys(test for row in wanted for test in row.tests))
    for _ in range(asked.times):
        for test, found in _run(tests).items():
            cases[test] += found
    counts = {row.fault: counted(row, cases) for row in wanted}
    for number, (fault, count) in enumerate(counts.items(), start=1):
        record(f"n{number}", fault, count.held, count.tried, count.worst_s)
        sys.stdout.write(f"{str(count).ljust(22)} {fault}\n")
    if asked.write:
        PAGE.write_text(with_figures(PAGE.read_text(), counts))


if __name__ == "__main__":
    main()
