"""Keys that pages name exist, and what result.json holds is on its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.config import LaunchConfig
from launcher.config.key import keys_of, nodes_of
from strategies.schedules import SCHEDULES
from tests.launcher.test_run_files import ALL_MODES, SIMULATED, TRAINED

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
KEYS = {key.path for key in keys_of(LaunchConfig)}
GROUPS = {*nodes_of(LaunchConfig)}
SPAN = re.compile(r"`([^`\n]+)`")
NAMED = re.compile(r"([a-z_]+)\.([a-z_0-9]+)=")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_key_that_a_page_names_exists(page: Path) -> None:
    wrong = []
    for span in SPAN.findall(page.read_text(encoding="utf-8")):
        for word in span.split():
            found = NAMED.match(word)
            if found and found[1] in GROUPS and f"{found[1]}.{found[2]}" not in KEYS:
                wrong.append(word)
    assert not wrong, "no such key"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_schedule_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![.\w])schedule=([a-z0-9_]+)", text))
    assert named <= {*SCHEDULES, "custom", "my_order"}, named - {*SCHEDULES}


def test_every_field_of_result_json_is_on_its_page() -> None:
    assert undocumented(dict.fromkeys([*ALL_MODES, *SIMULATED, *TRAINED])) == []


def undocumented(result: dict[str, object]) -> list[str]:
    """Fields that docs/reference/result.md does not name."""
    page = (ROOT / "docs" / "reference" / "result.md").read_text(encoding="utf-8")
    return sorted(set(result) - {*SPAN.findall(page)})
