import re
from importlib.resources import files

import pytest

from launcher.report.sweep_colours import HUES, bar_colour, text_colour


def test_the_colours_are_those_of_the_interactive_pages():
    script = files("launcher.report").joinpath("timeline.js").read_text()
    body = re.search(r"const COLOURS = {(.*?)\n};", script, re.DOTALL).group(1)
    theirs = {k: (int(h), int(s)) for k, h, s in re.findall(r"(\w+): \[(\d+), (\d+)\]", body)}
    assert len(theirs) >= 8
    assert HUES.items() <= theirs.items()


@pytest.mark.parametrize("kind", [*HUES, "A_KIND_OF_TOMORROW"])
def test_first_stages_are_light_and_every_text_is_readable(kind):
    shades = [bar_colour(kind, stage, 4) for stage in range(4)]
    assert [sum(rgb) for rgb in shades] == sorted((sum(rgb) for rgb in shades), reverse=True)
    assert all(0.0 <= value <= 1.0 for rgb in shades for value in rgb)
    assert text_colour(bar_colour("F", 0, 2)) != text_colour(bar_colour("F", 1, 2))


def test_kinds_differ_and_a_single_stage_has_a_shade():
    assert len({bar_colour(kind, 0, 1) for kind in (*HUES, "X")}) == len(HUES) + 1
