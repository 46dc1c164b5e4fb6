from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser

import pytest

from launcher.report.rows import KIND_NAMES
from launcher.report.sweep import files as module
from launcher.report.sweep.files import job_line, report_sweep, sweep_html, write_sweep_html
from launcher.report.sweep.sweep_jobs import make_sweep
from tests.launcher.report.sweep.sweeps import job, simulated, trained

FILES = ["sweep.csv", "sweep.html", "sweep.json", "sweep.png"]


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_file())


@pytest.fixture
def sweep(tmp_path):
    jobs = [simulated(tmp_path, index, name) for index, name in enumerate(("1f1b", "gpipe"))]
    return make_sweep(jobs, [j.overrides for j in jobs])


def test_a_sweep_ends_with_a_table_and_its_files(sweep, tmp_path, capsys):
    report_sweep(tmp_path, sweep)
    assert files(tmp_path) == FILES
    output, errors = capsys.readouterr()
    assert output.splitlines()[-1] == (
        f"files: {tmp_path}: sweep.csv sweep.json sweep.html sweep.png"
    )
    assert output.startswith("one step, predicted\n")
    assert errors == ""
    assert (
        "<h1>Sweep over schedule: 2 jobs with mode=simulate</h1>"
        in (tmp_path / "sweep.html").read_text()
    )


def test_no_picture_of_an_earlier_sweep_stays(sweep, tmp_path, capsys):
    report_sweep(tmp_path, sweep)
    failed = make_sweep([job(tmp_path, 0, exit_code=1, error="e")], [[]])
    report_sweep(tmp_path, failed)
    assert files(tmp_path) == ["sweep.csv", "sweep.html", "sweep.json"]
    report_sweep(tmp_path, sweep)
    report_sweep(tmp_path, sweep, hurry=True)
    assert files(tmp_path) == ["sweep.csv", "sweep.html", "sweep.json"]


def test_without_matplotlib_the_rest_is_written(sweep, tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report_sweep(tmp_path, sweep)
    assert files(tmp_path) == ["sweep.csv", "sweep.html", "sweep.json"]
    errors = capsys.readouterr().err
    assert errors.startswith("sweep.png was not written: ")
    assert "Try pip install matplotlib." in errors


def test_a_file_that_cannot_be_written_is_named(sweep, tmp_path, capsys):
    (tmp_path / "sweep.csv").mkdir()
    report_sweep(tmp_path, sweep)
    assert files(tmp_path) == FILES[1:]
    assert capsys.readouterr().err.startswith("sweep.csv was not written: ")


def test_a_sweep_that_ended_early_says_so(sweep, tmp_path, capsys):
    asked = [*(j.overrides for j in sweep.jobs), ("mode=simulate", "schedule=zb_h1")]
    report_sweep(tmp_path, make_sweep(sweep.jobs, asked))
    assert "1 of 3 jobs did not run\n" in capsys.readouterr().out
    assert "2 of 3 jobs" in (tmp_path / "sweep.html").read_text()


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
    assert found.data["kinds"] == list(KIND_NAMES)
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
    assert len(found.all("script")) == 1  # the table's
    assert found.all("canvas") == []
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
    assert len(found.all("script")) == 3
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


def test_the_line_of_a_job_has_three_figures(tmp_path):
    ended = trained(tmp_path, 0, "1f1b")
    line = job_line(make_sweep([ended], [ended.overrides]), ended, 21.0)
    assert line.endswith("; 21 s")
    assert len(line.partition("  ")[2].removesuffix("; 21 s").split(", ")) == 3
