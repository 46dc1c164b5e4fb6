"""The tree may not grow unnoticed: `make check` holds its sizes to `tools/ratchet.txt`.

Three tables: lines of each folder of the packages (subfolders counted with it), files that are
longer than all should be, folders with more files than all should have. A number may fall at any
time; one that rises takes a sentence, which stands in the table behind it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("launcher", "strategies")
MAX_LINES, MAX_FILES = 450, 14
LINES = "lines of a folder"
LONG = f"files of more than {MAX_LINES} lines"
WIDE = f"folders of more than {MAX_FILES} files"
_HEAD = (
    "# Sizes that `make check` holds the tree to (tools/ratchet.py). After making one smaller:\n"
    "# `python -m tools.ratchet --update`. A number that rises, a longer file and a wider folder\n"
    '# take a sentence: `python -m tools.ratchet --update --because "..."`.\n'
)


@dataclass(frozen=True, slots=True)
class Row:
    """A number, and the sentence that it needed."""

    number: int
    because: str = ""


Tables = Mapping[str, Mapping[str, Row]]


def measured(root: Path) -> dict[str, dict[str, int]]:
    """What the tree has: the three tables, without sentences.

    Files that lie directly in a package are a folder of their own, named as the package.
    """
    lines: dict[str, int] = {}
    long: dict[str, int] = {}
    files: dict[str, int] = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root)
            num_lines = len(path.read_text(encoding="utf-8").splitlines())
            group = "/".join(name.parts[:2]) if len(name.parts) > 2 else package
            lines[group] = lines.get(group, 0) + num_lines
            folder = name.parent.as_posix()
            files[folder] = files.get(folder, 0) + 1
            if num_lines > MAX_LINES:
                long[name.as_posix()] = num_lines
    return {
        LINES: lines,
        LONG: long,
        WIDE: {folder: number for folder, number in files.items() if number > MAX_FILES},
    }


def read_tables(text: str) -> dict[str, dict[str, Row]]:
    """The committed tables.

    Raises:
        ValueError: A line is neither a table's name nor `name number sentence`.
    """
    tables: dict[str, dict[str, Row]] = {LINES: {}, LONG: {}, WIDE: {}}
    table: dict[str, Row] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if line.rstrip(":") in tables:
            table = tables[line.rstrip(":")]
            continue
        name, *rest = line.split(maxsplit=2)
        if table is None or not rest or not rest[0].isdecimal():
            raise ValueError(
                f"tools/ratchet.txt, line {number}: {line!r} is no `name number sentence` below "
                f"one of {', '.join(f'`{title}:`' for title in tables)}"
            )
        table[name] = Row(int(rest[0]), rest[1] if len(rest) > 1 else "")
    return tables


def written(tables: Tables) -> str:
    parts = [_HEAD]
    for title, rows in tables.items():
        width = max((len(name) for name in rows), default=0)
        parts.append(f"\n{title}:\n")
        parts += [
            f"{name:<{width}} {row.number:>6}  {row.because}".rstrip() + "\n"
            for name, row in sorted(rows.items())
        ]
    return "".join(parts)


def grown(found: Mapping[str, Mapping[str, int]], committed: Tables) -> list[str]:
    """A sentence for each number that is above the committed one, or has none or no reason."""
    said = []
    for title, rows in found.items():
        for name, number in sorted(rows.items()):
            row = committed[title].get(name)
            if row is None:
                limit = {LONG: f"at most {MAX_LINES} lines", WIDE: f"at most {MAX_FILES} files"}
                said.append(
                    f"{name}: {number} ({title}); it is new, and a new folder has no number yet"
                    if title == LINES
                    else f"{name}: {number} ({title}); all others have {limit[title]}"
                )
            elif number > row.number:
                said.append(
                    f"{name}: {number} ({title}), {number - row.number} more than committed"
                )
            elif title != LINES and not row.because:
                said.append(
                    f"{name}: {number} ({title}) stands in tools/ratchet.txt without a reason"
                )
    return said


def updated(
    found: Mapping[str, Mapping[str, int]], committed: Tables, because: str
) -> dict[str, dict[str, Row]]:
    """Today's numbers; `because` stands behind those that have grown."""
    tables: dict[str, dict[str, Row]] = {}
    for title, rows in found.items():
        tables[title] = {}
        for name, number in rows.items():
            old = committed[title].get(name)
            if old is None or number > old.number or (title != LINES and not old.because):
                sentence = because
            elif title == LINES and number < old.number:
                sentence = ""  # It told of a larger number.
            else:
                sentence = old.because
            tables[title][name] = Row(number, sentence)
    return tables


def table(found: Mapping[str, int], committed: Mapping[str, Row]) -> str:
    """Lines of each folder beside the committed ones, and their sum."""
    names = sorted(found.keys() | committed.keys())
    width = max(len(name) for name in names)
    rows = [f"{'folder':<{width}} {'lines':>7} {'committed':>9}"]
    sums = [0, 0]
    for name in names:
        now, then = found.get(name, 0), committed.get(name, Row(0)).number
        sums = [sums[0] + now, sums[1] + then]
        rows.append(f"{name:<{width}} {now:>7} {then:>9}" + (f" {now - then:+}" * (now != then)))
    return "\n".join([*rows, f"{'all':<{width}} {sums[0]:>7} {sums[1]:>9}"])


def main(words: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Exit code 0 if nothing has grown (or it was asked for), 1 if something has, 2 if misused."""
    parser = argparse.ArgumentParser(prog="python -m tools.ratchet", description=__doc__)
    parser.add_argument("--update", action="store_true", help="write today's numbers")
    parser.add_argument("--because", default="", help="with --update: why a number rises")
    asked = parser.parse_args(words)
    file = root / "tools" / "ratchet.txt"
    try:
        committed = read_tables(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    found = measured(root)
    print(table(found[LINES], committed[LINES]))
    above = grown(found, committed)
    because = " ".join(asked.because.split())
    if asked.update and (because or not above):
        file.write_text(written(updated(found, committed, because)), encoding="utf-8")
        print("tools/ratchet.txt has these numbers now.")
        return 0
    if above:
        print(*above, sep="\n", file=sys.stderr)
        print(
            "Make it smaller, or say why it grows, in the same commit:\n"
            '    python -m tools.ratchet --update --because "a sentence"',
            file=sys.stderr,
        )
        return 1
    if any(
        found[title].get(name, 0) < row.number
        for title, rows in committed.items()
        for name, row in rows.items()
    ):
        print("Smaller than committed. To keep it so: python -m tools.ratchet --update")
    return 0


if __name__ == "__main__":
    sys.exit(main())
