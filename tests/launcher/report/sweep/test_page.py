from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from launcher.report.sweep import page as module
from launcher.report.sweep.page import Bar, picture_panels, sweep_html, write_sweep_html
from launcher.report.sweep.sweep_jobs import make_sweep
from tests.launcher.report.sweep.sweeps import job, predicted, simulated, trained

HOSTILE = '</script><script>alert("x")</script><img src=x onerror=alert(1)>&amp;'


class Page(HTMLParser):
    """Elements with their attributes and own text, and the data of the scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.feed(text)
        data = [e[2] for e in self.elements if e[1].get("type") == "application/json"]
        self.data = json.loads(data[0]) if data else None

    def handle_starttag(self, tag, attrs):
        self.elements.append([tag, dict(attrs), ""])

    def handle_data(self, data):
        if self.elements:
            self.elements[-1][2] += data

    def all(self, tag):
        return [element for element in self.elements if element[0] == tag]


def page(tmp_path, jobs, title="a sweep"):
    sweep = make_sweep(jobs, [j.overrides for j in jobs])
    return Page(sweep_html(sweep, title=title, folder=tmp_path))


def test_all_timelines_stand_under_each_other(tmp_path):
    jobs = [simulated(tmp_path, 0, "1f1b"), trained(tmp_path, 1, "gpipe")]
    found = page(tmp_path, jobs)
    expected = [timeline.panel for j in jobs for timeline in j.timelines]
    assert found.data["panels"] == expected
    assert found.data["kinds"] == list(jobs[0].timelines[0].kinds)
    assert [e[1]["id"] for e in found.all("canvas")] == ["panel0", "panel1", "panel2"]
    labels = [e[1]["aria-label"].partition(":")[0] for e in found.all("canvas")]
    assert [label.rpartition(", ")[2] for label in labels] == ["predicted", "predicted", "measured"]


def test_the_table_marks_the_best_and_leads_to_the_timelines(tmp_path):
    jobs = [simulated(tmp_path, 0, "1f1b"), simulated(tmp_path, 1, "foldx_fifo")]
    found = page(tmp_path, jobs)
    best = [e[2] for e in found.all("td") if "best" in e[1].get("class", "")]
    assert best == ["2.0", "13.5", "13.5", "11.1", "12.5"]
    links = [e[1]["href"] for e in found.all("a")]
    assert links == ["#job0", "#job1", "0/timeline.html", "1/timeline.html"]
    assert {"job0", "job1"} <= {e[1].get("id") for e in found.all("section")}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_sweep_without_timelines_is_a_table(jobs, tmp_path):
    failed = [job(tmp_path, i, f"seed={i}", exit_code=1, error="<b>why") for i in range(jobs)]
    found = page(tmp_path, failed)
    assert found.data is None
    assert found.all("script") == found.all("canvas") == []
    assert [e[2].strip() for e in found.all("li")] == [
        f"job {i} failed (exit 1): <b>why" for i in range(jobs)
    ]


def test_the_page_loads_nothing_from_anywhere(tmp_path):
    sweep = make_sweep([simulated(tmp_path, 0, "1f1b")], [[]])
    text = sweep_html(sweep, title="a sweep", folder=tmp_path)
    assert re.findall(r"https?:|//[a-z]|@import|url\(|\bfetch\(|XMLHttp|import\(", text) == []
    for _, attributes, _ in Page(text).elements:
        assert not {"src", "srcset", "data"} & set(attributes)


def test_hostile_overrides_and_folders_stay_text(tmp_path):
    folder = tmp_path / "a:b #1"
    one = simulated(folder, 0, "1f1b", f"data.path={HOSTILE}")
    two = job(folder, 1, f"data.path={HOSTILE}2", exit_code=1, error=HOSTILE)
    found = page(tmp_path, [one, two], title=HOSTILE)
    assert len(found.all("script")) == 2
    assert found.all("img") == []
    assert [found.all(tag)[0][2].strip() for tag in ("title", "h1")] == [HOSTILE] * 2
    (own,) = (e[1]["href"] for e in found.all("a") if e[1].get("class") == "own")
    assert own == "a%3Ab%20%231/0/timeline.html"


def test_a_page_that_would_be_too_large_says_what_is_left_out(tmp_path, monkeypatch):
    jobs = [simulated(tmp_path, i, "1f1b", f"seed={i}") for i in range(3)]
    size = len(json.dumps(jobs[0].timelines[0].panel, separators=(",", ":")))
    monkeypatch.setattr(module, "_MAX_CHARACTERS", 2 * size + 1)
    path = tmp_path / "sweep.html"
    write_sweep_html(path, make_sweep(jobs, [j.overrides for j in jobs]), title="large")
    found = Page(path.read_text())
    assert len(found.data["panels"]) == 2
    assert (
        found.all("li")[0][2].strip().endswith("too large to open: 1; each job's own page has them")
    )
    assert len(found.all("tr")) == 4


def test_the_script_comes_to_terms_with_kinds_that_it_does_not_know(tmp_path):
    found = page(tmp_path, [simulated(tmp_path, 0, "1f1b")])
    script = found.all("script")[1][2]
    names = ["const COLOURS", "COLOURS[kind] ??=", "function fillLegend", "setCompact("]
    places = [script.index(name) for name in names[:3]]
    assert places == sorted(places)
    assert names[3] in script


def panels(jobs):
    return picture_panels(make_sweep(jobs, [j.overrides for j in jobs]))


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
