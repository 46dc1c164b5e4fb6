import sys

import pytest

from launcher.report.sweep.files import report_sweep
from launcher.report.sweep.sweep_jobs import make_sweep
from tests.launcher.report.sweep.sweeps import job, simulated

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
