"""The names of metrics as docs/reference/metrics.md has them."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def page_tables() -> tuple[dict[str, str], dict[str, str]]:
    """Of the reference page: (tracker's name -> column of a row, -> field of result.json)."""
    rows, summary = PAGE.read_text(encoding="utf-8").split("## Summary")
    found = []
    for text in (rows, summary):
        pairs: dict[str, str] = {}
        for line in text.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split(" |")]
            names = re.findall("`([^`]+)`", cells[0])
            if line.startswith("| `"):
                theirs = re.findall("`([^`]+)`", cells[1]) or names
                pairs |= dict(
                    zip(names, theirs if len(theirs) == len(names) else names, strict=True)
                )
        found.append(pairs)
    return found[0], found[1]


ROWS, SUMMARY = page_tables()
