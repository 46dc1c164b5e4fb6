"""What documents say of tests: every test that is named exists, and is collected."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def collected(file: Path) -> set[str]:
    """The tests of a file, ``Class::test`` for those of a class."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            tests = (item.name for item in node.body if isinstance(item, ast.FunctionDef))
            found |= {f"{node.name}::{name}" for name in tests if name.startswith("test_")}
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_test_that_a_document_names_is_there(document: Path) -> None:
    missing = []
    for path, name in NAMED.findall(document.read_text(encoding="utf-8")):
        file = ROOT / path
        if not (file.name.startswith("test_") and file.is_file() and name in collected(file)):
            missing.append(f"{path}::{name}")
    assert not missing


def test_both_tables_of_faults_name_their_tests() -> None:
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    assert len(set(NAMED.findall(text))) > 45
    first, _, second = text.partition("## Neighbours, disks and tired users")
    for part in (first, second.partition("## Fuzz")[0]):
        rows = [line for line in part.splitlines() if re.match(r"\| (?!#|-|what )", line)]
        assert len(rows) >= 14
        # A row without a test of its own says whose it shares.
        assert all(NAMED.search(row) or "| the same" in row for row in rows), rows


def test_documents_lead_to_files_that_exist() -> None:
    for document in DOCUMENTS:
        prose = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!../../actions/)([\w./-]+)\)", prose):
            assert (document.parent / target).exists(), (document.name, target)
