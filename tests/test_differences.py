"""docs/differences.md tells what the code refuses, and each refusal tells a way out."""

from __future__ import annotations

import functools

import pytest

from tests.differences import (
    ECHOES,
    ELSEWHERE,
    PAGE,
    ROOT,
    SECTIONS,
    Refusal,
    page,
    refusals,
)

LISTED = [file for files in SECTIONS.values() for file in files]


@functools.cache
def found() -> tuple[Refusal, ...]:
    return tuple(refusals())


def test_the_page_is_as_new_as_the_code() -> None:
    assert PAGE.read_text(encoding="ascii") == page(), "write it anew: make docs-page"


def test_every_file_that_refuses_has_its_place() -> None:
    raising = {refusal.file for refusal in found()}
    assert raising - set(LISTED) - ELSEWHERE == set(), "give it a heading in tests/differences.py"
    assert set(LISTED) - raising == set(), "refuses nothing any more"
    assert len(LISTED) == len(set(LISTED)) and not ELSEWHERE & set(LISTED)


@pytest.mark.parametrize("file", LISTED)
def test_a_refusal_tells_the_reason_and_the_way_out(file: str) -> None:
    for refusal in found():
        if refusal.file == file and refusal.reason not in ECHOES:
            assert refusal.way, f"{file}:{refusal.line} says no way out: {refusal.reason}"
            assert refusal.reason, f"{file}:{refusal.line} says no reason: {refusal.way}"


def test_no_echo_is_listed_that_nobody_says() -> None:
    assert {refusal.reason for refusal in found()} >= ECHOES


def test_messages_made_of_parts_are_on_the_page() -> None:
    """A constant inside, the choices of a caller, a function that only makes the text."""
    text = PAGE.read_text(encoding="ascii")
    assert "too often. | Log it (self.log takes means and sums)" in text
    assert "MODULE.backward() runs no backward of the loss." in text
    assert "MODULE.backward() looks at the module's parameters." in text


def test_the_readme_leads_there() -> None:
    assert "(docs/differences.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
