from __future__ import annotations

import io
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from launcher.report.sweep.files import sweep_html
from launcher.report.sweep.loss_curves import LossCurve, NamedCurve, curves_html, read_curve
from launcher.report.sweep.picture import sweep_png
from launcher.report.sweep.sweep_jobs import make_sweep
from tests.launcher.report.sweep.sweeps import job

ROWS = "step,train_loss,val_loss,elapsed_s\n5,4.0,,1.5\n10,3.0,,2.5\n,,3.3,\n15,nan,,4.0\n"


def curve(name, losses, pace=1.0):
    steps = range(1, len(losses) + 1)
    return NamedCurve(name, LossCurve(tuple(steps), tuple(pace * s for s in steps), tuple(losses)))


FAST = curve("slow=<1>", [5.0, 4.0, 3.0, 2.0], pace=2.0)
SLOW = curve("fast", [5.0, 4.5, 4.0, 3.5])


def test_rows_with_a_loss_are_read(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text(ROWS)
    found = read_curve(path)
    assert found.steps == (5, 10, 15)
    assert found.seconds == (1.5, 2.5, 4.0)
    assert found.losses[:2] == (4.0, 3.0)
    assert math.isnan(found.losses[2])


@pytest.mark.parametrize(
    "text",
    [None, "", "step,train_loss\n5,4.0\n", "step,val_loss\n5,1\n6,1\n", "step,train_loss\nx,y\n"],
)
def test_what_is_no_curve_is_none(text, tmp_path):
    if text is not None:
        (tmp_path / "metrics.csv").write_text(text)
    assert read_curve(tmp_path / "metrics.csv") is None


def test_older_files_have_no_seconds(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,train_loss\n1,4.0\n2,3.0\n")
    found = read_curve(tmp_path / "metrics.csv")
    assert found.seconds == ()
    assert curves_html([NamedCurve("old", found)]).count("<svg class") == 1


def test_a_line_is_the_mean_over_the_last_tenth():
    assert LossCurve(tuple(range(20)), (), tuple(map(float, range(20)))).means[:4] == (
        0,
        0.5,
        1.5,
        2.5,
    )


def drawn(html):
    """Of each drawing, the corners of its lines."""
    found = []
    for svg in re.findall(r"<svg class.*?</svg>", html, re.DOTALL):
        lines = ElementTree.fromstring(svg).find("g").findall("path")
        found.append([re.findall(r"[ML]([\d.]+),([\d.-]+)", line.get("d")) for line in lines])
    return [[[tuple(map(float, p)) for p in line] for line in lines] for lines in found]


def test_one_curve_may_be_ahead_over_steps_and_behind_over_seconds():
    html = curves_html([FAST, SLOW])
    steps, seconds = drawn(html)
    assert [p[0] for p in steps[0]] == [p[0] for p in steps[1]]  # the same steps
    assert all(a[1] > b[1] for a, b in zip(steps[0][1:], steps[1][1:], strict=True))  # y: down
    assert seconds[0][-1][0] > seconds[1][-1][0]
    assert "slow=&lt;1&gt;: 2.0000" in html
    assert "<1>" not in html


def test_what_is_not_finite_breaks_a_line():
    ((line,), _) = drawn(curves_html([curve("nan", [4.0, math.nan, 3.0])]))
    assert len(line) == 2
    assert curves_html([curve("never", [math.nan, math.inf])]).count("<svg class") == 2


def test_a_sweep_of_trainings_shows_them_in_its_page_and_picture(tmp_path):
    jobs = []
    for index in range(2):
        own = tmp_path / str(index)
        own.mkdir()
        (own / "metrics.csv").write_text(ROWS)
        jobs.append(job(tmp_path, index, f"optimizer.lr={index + 1}", result={"status": "done"}))
    jobs.append(job(tmp_path, 2, "optimizer.lr=3", exit_code=1, error="e"))
    sweep = make_sweep(jobs, [j.overrides for j in jobs])
    assert [named.name for named in sweep.curves] == ["optimizer.lr=1", "optimizer.lr=2"]
    assert "optimizer.lr=2: nan" in sweep_html(sweep, title="t", folder=tmp_path)
    image = np.asarray(Image.open(io.BytesIO(sweep_png((), title="t", curves=[FAST, SLOW]))))
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
        near = (np.abs(image[..., :3].astype(int) - colour).max(axis=2) <= 2).any(axis=0)
        places = np.flatnonzero(near)
        assert places.min() < image.shape[1] / 2 < places.max()  # in both drawings
