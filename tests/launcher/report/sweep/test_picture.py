from __future__ import annotations

import io
import re
import struct
from colorsys import hls_to_rgb
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from launcher.report.html import page_script
from launcher.report.sweep import picture as module
from launcher.report.sweep.picture import (
    Bar,
    bar_colour,
    picture_panels,
    sweep_png,
    text_colour,
    write_sweep_png,
)
from launcher.report.sweep.sweep_jobs import make_sweep
from tests.launcher.report.sweep.sweeps import job, predicted, simulated, trained

DRAWN = (
    "F", "B", "I", "W", "R", "OVERLAP_F_B", "REDUCE", "GATHER", "STEP", "LOSS", "DISPATCH",
    "COMBINE",
)  # fmt: skip


def test_the_colours_are_those_of_the_interactive_pages():
    body = re.search(r"const COLOURS = {(.*?)\n};", page_script(()), re.DOTALL).group(1)
    theirs = {k: (int(h), int(s)) for k, h, s in re.findall(r"(\w+): \[(\d+), (\d+)\]", body)}
    assert theirs.keys() == set(DRAWN)
    for kind, (hue, saturation) in theirs.items():
        assert bar_colour(kind, 0, 2) == hls_to_rgb(hue / 360, 0.76, saturation / 100)


@pytest.mark.parametrize("kind", [*DRAWN, "A_KIND_OF_TOMORROW"])
def test_first_stages_are_light_and_every_text_is_readable(kind):
    shades = [bar_colour(kind, stage, 4) for stage in range(4)]
    assert [sum(rgb) for rgb in shades] == sorted((sum(rgb) for rgb in shades), reverse=True)
    assert all(0.0 <= value <= 1.0 for rgb in shades for value in rgb)
    assert text_colour(bar_colour("F", 0, 2)) != text_colour(bar_colour("F", 1, 2))


def test_kinds_differ_and_a_single_stage_has_a_shade():
    assert len({bar_colour(kind, 0, 1) for kind in (*DRAWN, "X")}) == len(DRAWN) + 1


def sweep_of(jobs):
    return make_sweep(jobs, [j.overrides for j in jobs])


def picture(jobs):
    return pixels(sweep_png(picture_panels(sweep_of(jobs)), title="a sweep"))


def pixels(content):
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(int)


def columns_with(image, kind, stage, num_stages):
    """Columns of a picture in which the colour of an instruction occurs, below the legend."""
    colour = np.round(np.array(bar_colour(kind, stage, num_stages)) * 255)
    near = (np.abs(image[120:] - colour).max(axis=2) <= 2).any(axis=0)
    return np.flatnonzero(near)


def test_bars_are_drawn_at_their_times(tmp_path):
    image = picture([simulated(tmp_path, 0, "1f1b")])
    left, right = 62 * 1.6, (1500 - 24) * 1.6
    scale = (right - left) / 15.0  # the makespan
    # Stage 0: F from 0 to 2 and later, its last B ends with the step. Stage 1 begins at 1.
    assert columns_with(image, "F", 0, 2).min() == pytest.approx(left, abs=2)
    assert columns_with(image, "F", 1, 2).min() == pytest.approx(left + scale, abs=2)
    assert columns_with(image, "B", 0, 2).max() == pytest.approx(right, abs=4)
    assert columns_with(image, "B", 1, 2).max() == pytest.approx(left + 13 * scale, abs=4)


def test_all_timelines_have_one_scale(tmp_path):
    alone = picture([simulated(tmp_path, 0, "foldx_fifo")])
    both = picture([simulated(tmp_path, 0, "foldx_fifo"), simulated(tmp_path, 1, "1f1b")])
    width = 1476 * 1.6 - 62 * 1.6
    end = columns_with(both[:270], "B", 0, 4).max()
    assert columns_with(alone, "B", 0, 4).max() - end == pytest.approx(
        width * (1 - 13.5 / 15), abs=4
    )
    assert both.shape[0] > alone.shape[0]


def test_units_have_an_axis_each(tmp_path):
    one = picture([simulated(tmp_path, 0, "1f1b"), simulated(tmp_path, 1, "gpipe")])
    two = picture([trained(tmp_path, 0, "1f1b")])
    assert two.shape[0] == one.shape[0] + round(44 * 1.6)


def test_odd_characters_and_formulas_are_plain_text(tmp_path, recwarn):
    jobs = [
        simulated(tmp_path, i, "1f1b", f"data.path=$x^$ \N{SNOWMAN} \U0001f600 {i}\n")
        for i in (0, 1)
    ]
    assert picture(jobs).shape[1] == 2400
    assert list(recwarn) == []


def test_a_kind_of_tomorrow_is_drawn(tmp_path):
    (panel,) = picture_panels(sweep_of([simulated(tmp_path, 0, "1f1b")]))
    bars = tuple(replace(bar, kind="A_NEW_ONE") for bar in panel.bars)
    image = pixels(sweep_png([replace(panel, bars=bars)], title="x"))
    assert len(columns_with(image, "A_NEW_ONE", 0, 2)) > 500


def test_timelines_beyond_what_a_picture_can_hold_are_counted(tmp_path, monkeypatch):
    jobs = [simulated(tmp_path, i, "1f1b", f"seed={i}") for i in range(4)]
    monkeypatch.setattr(module, "_MAX_HEIGHT", 400)
    path = tmp_path / "sweep.png"
    left_out = write_sweep_png(path, sweep_of(jobs), title="large")
    assert left_out == 2
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">I", content[20:24])[0] <= 400 * 1.6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "2", "3", "sweep.png"]


def panels(jobs):
    return picture_panels(sweep_of(jobs))


def test_every_instruction_that_takes_time_is_a_bar(tmp_path):
    (panel,) = panels([simulated(tmp_path, 0, "foldx_fifo", grad_reduce=4.0)])
    timeline, _ = predicted("foldx_fifo", grad_reduce=4.0)
    expected = {
        (rank, e.instruction.kind.value, e.instruction.stage, e.start, e.end)
        for rank in (0, 1)
        for e in timeline.events(rank)
        if e.instruction.kind.value in ("F", "B", "REDUCE") and e.end > e.start
    }
    assert {(b.rank, b.kind, b.stage, b.start, b.end) for b in panel.bars} == expected
    assert (panel.num_ranks, panel.num_stages, panel.makespan) == (2, 4, timeline.makespan)


def test_collectives_lie_below_compute_and_bars_never_overlap(tmp_path):
    (panel,) = panels([simulated(tmp_path, 0, "foldx_fifo", grad_reduce=4.0)])
    assert max(b.bottom for b in panel.bars if b.kind != "REDUCE") <= min(
        b.top for b in panel.bars if b.kind == "REDUCE"
    )
    for rank in (0, 1):
        for kinds in ({"F", "B"}, {"REDUCE"}):
            row = sorted((b.start, b.end) for b in panel.bars if b.rank == rank and b.kind in kinds)
            assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(row))


def test_timelines_with_one_unit_stand_together(tmp_path):
    found = panels([trained(tmp_path, 0, "1f1b"), trained(tmp_path, 1, "gpipe")])
    assert [(panel.label, panel.unit) for panel in found] == [
        ("schedule=1f1b, predicted", "F"),
        ("schedule=gpipe, predicted", "F"),
        ("schedule=1f1b, measured", "s"),
        ("schedule=gpipe, measured", "s"),
    ]
    assert found[1].facts == "makespan 15 F, bubble 20.0 %, peak 4 microbatches"
    assert found[3].facts == "makespan 150 ms, bubble 20.0 %"


def test_a_failed_job_shows_what_was_predicted_for_it(tmp_path):
    done = simulated(tmp_path, 0, "1f1b")
    assert panels([job(tmp_path, 1, exit_code=1, error="e")]) == ()
    assert panels([done])[0].label == "schedule=1f1b"


@pytest.mark.parametrize(
    ("kind", "number", "text", "short"),
    [
        ("F", 3, "2F3", "3"),
        ("STEP", -1, "2S", "2"),
        ("REDUCE", 0, "2R0", "0"),
        ("OVERLAP_F_B", 3, "2F3+B", "3"),
    ],
)
def test_a_bar_names_its_instruction(kind, number, text, short):
    bar = Bar(0, 0.0, 1.0, kind, 2, number, 0.0, 1.0)
    assert (bar.text, bar.short_text) == (text, short)
