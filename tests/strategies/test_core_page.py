"""``strategies/README.md``: ten files that can be read in an evening."""

from __future__ import annotations

import ast
import re
from pathlib import Path

CORE = Path(__file__).resolve().parents[2] / "strategies"
MOST_LINES = 5000


def test_the_files_to_read_are_short_and_know_no_torch() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", (CORE / "README.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 11))
    files = [CORE / name for _, cell in rows for name in re.findall(r"`([\w/]+\.py)`", cell)]
    assert len(files) >= 10
    assert sum(len(file.read_text().splitlines()) for file in files) <= MOST_LINES
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not any(name.partition(".")[0] == "torch" for name in names), file
