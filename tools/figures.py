"""Whether the tree is slower than a commit: ``make figures BASE=<commit>``.

The commit is unpacked into a temporary folder, and its production packages run under the tree's
benchmarks there, whatever benchmarks it had. Commit and tree take turns, so that what disturbs the
machine disturbs both. A figure counts as slower where its quartiles lie above the commit's and its
median more than 3 % above the commit's median; then the exit code is 1. Fewer than seven pairs get
no verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MIN_PAIRS = 7
TOLERANCE = 0.03
CONTROL = " (control)"  # Behind the name of a figure that no commit of ours can change.
# The tree's own code that measures, put in place of the commit's.
_MEASURING = ("benchmarks", "tests")


class Ended(NamedTuple):
    """A command that has ended: its CPU seconds, what it printed, what it wrote as JSON."""

    cpu_s: float
    output: str
    written: str


@dataclass(frozen=True, slots=True)
class Measure:
    """A command of ``python -m``, and the figures that it gives.

    Attributes:
        words: ``{json}`` stands for a file, ``{out}`` for a folder.
        read: The figures by name; all of them are better when smaller.
        code: The exit code that it must have.
    """

    words: str
    read: Callable[[Ended], Mapping[str, float]]
    code: int = 0


def _cpu(name: str) -> Callable[[Ended], Mapping[str, float]]:
    return lambda ended: {f"{name}, CPU s": ended.cpu_s}


def _overhead(ended: Ended) -> Mapping[str, float]:
    cells = json.loads(ended.written)["cells"]
    return {f"step of {cell['schedule']}, m=8, ms": cell["step_ms"] for cell in cells}


def _peers(ended: Ended) -> Mapping[str, float]:
    walls = {
        cell["engine"]: statistics.median(cell["wall_s"])
        for cell in json.loads(ended.written)["cells"]
    }
    return {
        f"1f1b of {engine} over plain{'' if engine == 'foldpipe' else CONTROL}": wall
        / walls["plain"]
        for engine, wall in walls.items()
        if engine != "plain"
    }


def _simulator(ended: Ended) -> Mapping[str, float]:
    found = re.search(r"simulate\(\) ([\d.]+) ms", ended.output)
    assert found is not None, ended.output
    return {"simulate() of 12,096 instructions, ms": float(found[1])}


def _plan(ended: Ended) -> Mapping[str, float]:
    return {f"plan {row['name']}, CPU s": row["cpu_s"] for row in json.loads(ended.written)}


MEASURES: Mapping[str, Measure] = {
    "overhead": Measure(
        "benchmarks.pipeline_overhead --microbatches 8 --engines ours --json {json}", _overhead
    ),
    "peers": Measure("benchmarks.peers --schedules 1f1b --repetitions 7 --json {json}", _peers),
    "simulator": Measure("benchmarks.micro simulator", _simulator),
    "plan": Measure("benchmarks.plan_speed 13B-on-64 --json {json}", _plan),
    "simulate": Measure(
        "launcher mode=simulate costs=uniform pp=4 num_microbatches=8 hydra.run.dir={out}",
        _cpu("mode=simulate"),
    ),
    "start": Measure(
        "launcher pp=4 trainer.max_steps=2 trainer.limit_val_batches=1 hydra.run.dir={out}",
        _cpu("two steps of pp=4"),
    ),
    "refusal": Measure("launcher schedle=1f1b", _cpu("a refusal"), code=2),
}
TESTS = Measure("pytest -q -n 2 --max-worker-restart=0", _cpu("make test"))


def run(measure: Measure, root: Path) -> Mapping[str, float]:
    """The figures of one command with the packages of ``root``.

    Raises:
        SystemExit: The command has ended otherwise than it should.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "figures.json")
        words = measure.words.format(json=written, out=Path(folder, "out")).split()
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        before = _children_s()
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
        )
        cpu_s = _children_s() - before
        if done.returncode != measure.code:
            raise SystemExit(
                f"python -m {' '.join(words)}\nin {root} ended with {done.returncode} instead of "
                f"{measure.code}:\n{done.stderr.strip()[-2000:] or done.stdout.strip()[-2000:]}"
            )
        text = written.read_text(encoding="utf-8") if written.is_file() else ""
        return measure.read(Ended(cpu_s, done.stdout, text))


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def unpack(commit: str, folder: Path) -> None:
    """The files of a commit.

    Raises:
        SystemExit: There is no such commit.
    """
    folder.mkdir()
    archive = folder.with_suffix(".tar")
    done = subprocess.run(
        ["git", "archive", f"--output={archive}", commit], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"BASE={commit}: {done.stderr.strip()}. Try BASE=HEAD, or `git log`.")
    shutil.unpack_archive(archive, folder)
    archive.unlink()


def measured_by_the_tree(folder: Path) -> None:
    """Puts the tree's benchmarks in place of those of an unpacked commit."""
    for name in _MEASURING:
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


@dataclass(frozen=True, slots=True)
class Line:
    """A figure of both, pair by pair."""

    name: str
    base: tuple[float, ...]
    tree: tuple[float, ...]

    @property
    def slower(self) -> bool | None:
        """None where there are too few pairs to tell, or nothing of ours is measured."""
        if len(self.base) < MIN_PAIRS or self.name.endswith(CONTROL):
            return None
        above = quartiles(self.tree)[0] > quartiles(self.base)[2]
        return above and self.ratio > 1 + TOLERANCE

    @property
    def ratio(self) -> float:
        return statistics.median(self.tree) / statistics.median(self.base)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower one, the median and the upper one."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def table(lines: Sequence[Line]) -> str:
    """A row per figure: medians with their quartiles, and the ratio of the medians."""
    rows = ["| figure | commit | tree | ratio | |", "|---" * 5 + "|"]
    words = {True: "slower", False: "", None: "no verdict"}
    for line in lines:
        cells = []
        for values in (line.base, line.tree):
            low, median, high = quartiles(values)
            cells.append(f"{median:.4g} ({low:.4g} - {high:.4g})")
        rows.append(
            f"| {line.name} | {' | '.join(cells)} | {line.ratio:.3f} | {words[line.slower]} |"
        )
    return "\n".join(rows)


def compare(chosen: Sequence[Measure], base: Path, tree: Path, pairs: int) -> list[Line]:
    """All figures; who begins alternates from pair to pair."""
    found: dict[str, dict[Path, list[float]]] = {}
    for pair in range(pairs):
        for measure in chosen:
            sys.stderr.write(f"pair {pair + 1} of {pairs}: {measure.words}\n")
            for root in (base, tree) if pair % 2 == 0 else (tree, base):
                for name, value in run(measure, root).items():
                    found.setdefault(name, {base: [], tree: []})[root].append(value)
    return [Line(name, tuple(each[base]), tuple(each[tree])) for name, each in found.items()]


def main() -> int:
    """Prints the table; 1 if something is slower."""
    parser = argparse.ArgumentParser(prog="make figures", description="The tree beside a commit.")
    parser.add_argument("base", metavar="BASE", help="the commit")
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS, help=f"default: {MIN_PAIRS}")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument(
        "--tests", action="store_true", help="CPU seconds of `make test`, too: 20 minutes per pair"
    )
    given = parser.parse_args()
    if given.pairs < 1:
        parser.error(f"--pairs={given.pairs}: at least 1")
    with tempfile.TemporaryDirectory(prefix="foldpipe-figures-") as name:
        base = Path(name, "base")
        unpack(given.base, base)
        lines = []
        if given.tests:
            lines += compare([TESTS], base, ROOT, given.pairs)
        measured_by_the_tree(base)
        lines += compare([MEASURES[only] for only in given.only], base, ROOT, given.pairs)
    print(table(lines))
    return int(any(line.slower for line in lines))


if __name__ == "__main__":
    sys.exit(main())
