"""The page of Lightning features says what the tests' markers say, and these can be believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs.lightning_page import Shown, features, page, shown
from tools.docs.pages import DOCS

THERE = {
    "flag": ["max_steps", "num_nodes"], "callback": ["Timer"], "logger": [], "module hook": [],
    "callback hook": [],
}  # fmt: skip


def test_the_page_is_what_the_markers_say() -> None:
    text = (DOCS / "reference" / "lightning.md").read_text(encoding="utf-8")
    assert text == page(list(shown()), features()), "write it again: make docs-page"


def test_a_row_has_its_tests_its_reason_and_its_fix() -> None:
    found = [
        Shown("flag", "max_steps", "tests/a.py::test_a"),
        Shown("flag", "max_steps", "tests/b.py::test_b"),
        Shown("callback", "Timer", "tests/c.py::test_c", "It has no time.", "Use a clock.", "at 3"),
    ]
    rows = [
        line.replace("|  |", "| |")
        for line in page(found, THERE).splitlines()
        if line.startswith("| `")
    ]
    assert rows == [
        "| `max_steps` | as stock | | `tests/a.py::test_a`<br>`tests/b.py::test_b` |",
        "| `num_nodes` | not tried | | |",
        "| `Timer` | refused, at 3 | It has no time. Use a clock. | `tests/c.py::test_c` |",
    ]


def test_what_lightning_does_not_have_is_no_feature() -> None:
    with pytest.raises(ValueError, match=r"Lightning has no such thing: .*max_step'"):
        page([Shown("flag", "max_step", "tests/a.py::test_a")], THERE)


@pytest.mark.parametrize(
    ("mark", "arguments"),
    [
        ('"flags", "max_steps"', ""),
        ('"flag"', ""),
        ('"flag", "max_steps", why="it is so"', ""),
        ('"flag", "max_steps", refused="no", fix="Use two."', ""),
        ('"flag", "max_steps", refused="no"', "refusal"),
    ],
    ids=["no kind", "no name", "another word", "nothing compares the reason", "no fix"],
)
def test_a_marker_that_says_something_else_is_an_error(
    tmp_path: Path, mark: str, arguments: str
) -> None:
    text = f"@pytest.mark.lightning_feature({mark})\ndef test_a({arguments}): ...\n"
    (tmp_path / "test_it.py").write_text(text)
    with pytest.raises(ValueError, match=r"test_it\.py::test_a: "):
        list(shown(tmp_path))
