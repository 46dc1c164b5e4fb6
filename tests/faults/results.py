"""What the fault runs found: one line per row of the table, and the table.

    python -m tests.faults.results        prints what has been recorded here so far
    python -m tests.faults.results --markdown

A long run calls ``record`` once when it has counted; the newest line of a row and its text counts.
The file survives the test session, so that rows can be run one after the other.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[2] / "build" / "faults.jsonl"
_HEAD = ("row", "fault", "passed", "worst")


def record(row: int | str, what: str, passed: int, total: int, worst_s: float | None) -> None:
    """Notes one line of the table; to be called before the counts are asserted.

    Args:
        row: Number of the fault in the table.
        what: The fault and what is to happen, in a few words.
        passed: Cases that went as they should.
        total: Cases.
        worst_s: The slowest of them in seconds; None where time plays no part.
    """
    FILE.parent.mkdir(parents=True, exist_ok=True)
    line = {
        "row": str(row),
        "what": what,
        "passed": passed,
        "total": total,
        "worst_s": worst_s,
        "at": time.time(),
    }
    with FILE.open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def recorded(*, since: float = 0.0) -> list[dict[str, Any]]:
    """The newest line of every row and text, by row.

    Args:
        since: Seconds since the epoch; older lines are left out.
    """
    if not FILE.is_file():
        return []
    found = {}
    for line in map(json.loads, FILE.read_text().splitlines()):
        if line["at"] >= since:
            found[line["row"], line["what"]] = line
    return sorted(found.values(), key=lambda line: (_number(line["row"]), line["row"]))


def table(lines: list[dict[str, Any]], *, markdown: bool = False) -> str:
    """The lines as text: ``row | what | n/n | worst seconds``."""
    cells = [
        (
            line["row"],
            line["what"],
            f"{line['passed']}/{line['total']}",
            "" if line["worst_s"] is None else f"{line['worst_s']:.1f} s",
        )
        for line in lines
    ]
    if markdown:
        rows = [_HEAD, ("---",) * len(_HEAD), *cells]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    widths = [max(map(len, column)) for column in zip(_HEAD, *cells, strict=True)]
    return "\n".join(
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (_HEAD, *cells)
    )


def _number(row: str) -> int:
    return int("".join(c for c in row if c.isdigit()) or "0")


if __name__ == "__main__":
    sys.stdout.write(table(recorded(), markdown="--markdown" in sys.argv) + "\n")
