"""What the program writes of the documents is as new as the program."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from strategies.schedules import SCHEDULES
from tools.docs import pages
from tools.docs.pages import DOCS, ROOT
from tools.docs.schedule_pages import ADVICE, markdown
from tools.docs.situations import PLAINEST, SITUATIONS, choice, figures


def stale(*, quick: bool) -> list[str]:
    """The files that say something else than the program would write."""
    return [
        path.relative_to(ROOT).as_posix()
        for path, text in pages.made(quick=quick)
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.full)])
def test_no_page_or_picture_is_older_than_what_makes_it(quick: bool) -> None:
    assert not stale(quick=quick), "write them anew: make docs-page"


def test_nothing_made_is_left_behind() -> None:
    """A schedule that is gone takes its page along."""
    names = {*SCHEDULES, "custom", "index"}
    assert {path.stem for path in (DOCS / "schedules").glob("*.md")} == names
    assert {path.stem for path in (DOCS / "schedules").glob("*.svg")} == set(SCHEDULES)


def test_every_block_that_a_page_asks_for_is_made() -> None:
    for path in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        opened, closed = text.count("<!-- made:"), text.count("<!-- /made -->")
        assert opened == closed, path.name


def test_every_schedule_has_its_advice_and_its_place_in_the_table() -> None:
    assert set(ADVICE) == set(SCHEDULES)
    # Without a flush it is another training: nobody is advised to take one for its step alone.
    assert set(PLAINEST) == {name for name in SCHEDULES if SCHEDULES[name].synchronous}


@pytest.mark.full
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.words[:40])
def test_what_is_advised_is_admitted_and_no_other_is_shorter(situation) -> None:
    chosen = figures(choice(situation), situation)
    assert chosen is not None and situation.admits(chosen)
    for name in PLAINEST:
        other = figures(name, situation)
        if other is not None and situation.admits(other):
            assert other.step >= chosen.step - 1e-6, name


def test_a_picture_is_xml_with_a_bar_for_every_microbatch() -> None:
    text = (DOCS / "schedules" / "1f1b.svg").read_text(encoding="utf-8")
    root = ET.fromstring(text)
    numbers = [span.text for span in root.iter("{http://www.w3.org/2000/svg}tspan") if span.text]
    # 8 microbatches, forward and backward, on 4 ranks.
    assert sorted(map(int, numbers)) == sorted([*range(8)] * 2 * 4)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_the_files_that_pages_link_to_are_there() -> None:
    """`make docs` builds the site, to which a missing anchor is an error, too."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]:
        for target in re.findall(r"\]\(([\w./-]+\.(?:md|svg|png))\b", page.read_text("utf-8")):
            file = (page.parent / target).resolve()
            # GitHub has pages above the checkout.
            assert file.is_file() or not file.is_relative_to(ROOT), f"{page.name}: {target}"


def test_a_docstring_becomes_markdown() -> None:
    first, rest = markdown("What ``x`` is.\n\nSee https://a.b/c. So::\n\n    1 ``y``")
    assert first == "What `x` is."
    assert rest == "See <https://a.b/c>. So:\n\n    1 `y`"
