import io
import re
from dataclasses import replace
from textwrap import dedent

from launcher.report.sweep.files import print_sweep
from launcher.report.sweep.sweep_jobs import make_sweep
from tests.launcher.report.sweep.sweeps import job, simulated, trained


def printed(jobs, asked=None, *, terminal=None, monkeypatch=None):
    file = io.StringIO()
    if terminal is not None:
        file.isatty = lambda: True
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(terminal))
    print_sweep(make_sweep(jobs, asked or [j.overrides for j in jobs]), file=file)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())
    return "\n".join(line.rstrip() for line in plain.splitlines())


def test_a_sweep_over_schedules(tmp_path):
    names = ("1f1b", "gpipe", "foldx_fifo")
    jobs = [simulated(tmp_path, index, name) for index, name in enumerate(names)]
    assert printed(jobs) == dedent(
        """\
        one step, predicted
                                                                     peak       exposed    gap to    gap to   weight
         job  schedule     makespan F   period F   bubble %   activations   reduction F   bound %   ideal %   copies
           0  1f1b               15.0       15.0       20.0          2.0*             0       0.0      25.0        1
           1  gpipe              15.0       15.0       20.0           4.0             0       0.0      25.0        1
           2  foldx_fifo        13.5*      13.5*      11.1*           2.5             0       0.0     12.5*        1
        * best of its column"""  # noqa: E501
    )


def test_values_are_cut_and_reach_no_terminal(tmp_path):
    jobs = [simulated(tmp_path, index, "1f1b") for index in (0, 1)]
    values = ("a\x1b[2J[/bold]\u202e", "x" * 3000)
    jobs = [replace(j, overrides=(f"user.a={v}",)) for j, v in zip(jobs, values, strict=True)]
    file = io.StringIO()
    print_sweep(make_sweep(jobs, [j.overrides for j in jobs]), file=file)
    text = file.getvalue()
    assert "a\\x1b[2J[/bold]\\u202e" in text
    assert not {"\x1b", "\u202e"} & {*text}
    assert max(map(len, text.splitlines())) < 250


def test_a_run_has_measured_figures_beside_predicted_ones(tmp_path):
    text = printed([trained(tmp_path, 0, "1f1b"), trained(tmp_path, 1, "foldx_fifo")])
    measured, _, prediction = text.partition("one step, predicted\n")
    rows = [line.split() for line in measured.splitlines()]
    assert rows[0] == ["measured", "beside", "predicted"]
    assert [row[:5] for row in rows[3:]] == [
        ["0", "1f1b", "150", "20.0", "20.0"],
        ["1", "foldx_fifo", "135*", "11.1*", "11.1"],
    ]
    assert "15.0" in prediction


def test_failed_jobs_have_a_row_and_their_error_below(tmp_path):
    long = "x" * 500
    jobs = [
        simulated(tmp_path, 0, "1f1b"),
        job(
            tmp_path, 1, "mode=simulate", "schedule=[red]b", exit_code=2, error="a reason\nand more"
        ),
        job(tmp_path, 2, "mode=simulate", "schedule=c", exit_code=None, error=long),
    ]
    lines = printed(
        jobs, [*(j.overrides for j in jobs), ["mode=simulate", "schedule=d"]]
    ).splitlines()
    assert lines[3].split()[:3] == ["0", "1f1b", "done"]
    assert lines[4].split() == ["1", "[red]b", "refused"]
    assert lines[5].split() == ["2", "c", "interrupted"]
    assert lines[6] == "job 1 refused (exit 2): a reason"
    assert lines[7] == f"job 2 interrupted: {'x' * 157}..."
    assert lines[8] == "1 of 4 jobs did not run"


def test_a_sweep_of_failures_still_has_its_rows(tmp_path):
    jobs = [job(tmp_path, i, f"seed={i}", exit_code=1, error="e") for i in (0, 1)]
    assert printed(jobs) == dedent(
        """\
        no figures
         job  seed  status
           0  0     failed
           1  1     failed
        job 0 failed (exit 1): e
        job 1 failed (exit 1): e"""
    )


def test_other_time_units_have_a_table_of_their_own(tmp_path):
    seconds = job(tmp_path, 1, "schedule=b", result={"makespan": 0.25, "time_unit": "s"})
    text = printed([simulated(tmp_path, 0, "1f1b"), seconds])
    assert text.count("one step, predicted") == 2
    assert "makespan F" in text
    assert "makespan ms" in text
    assert "*" not in text


def test_a_narrow_terminal_gets_what_differs_first(tmp_path, monkeypatch):
    names = ("1f1b", "gpipe", "foldx_fifo")
    jobs = [simulated(tmp_path, index, name) for index, name in enumerate(names)]
    text = printed(jobs, terminal=90, monkeypatch=monkeypatch)
    assert max(map(len, text.splitlines())) < 90
    same = "the same for all: exposed reduction 0 F, gap to bound 0.0 %, weight copies 1"
    assert same in text.splitlines()
    narrow = printed(jobs, terminal=40, monkeypatch=monkeypatch)
    assert "13.5*" in narrow  # wider than the terminal, but nothing is cut
    assert "\N{HORIZONTAL ELLIPSIS}" not in narrow


def test_columns_without_room_are_named_and_never_wrapped(tmp_path, monkeypatch):
    names = ("1f1b", "gpipe", "foldx_fifo")
    jobs = [simulated(tmp_path, index, name) for index, name in enumerate(names)]
    lines = printed(jobs, terminal=60, monkeypatch=monkeypatch).splitlines()
    (note,) = (line for line in lines if line.startswith("in sweep.html and sweep.csv: "))
    table = lines[: lines.index(note)]
    assert max(map(len, table)) < 60
    assert "makespan" in "".join(table)
    wide = printed(jobs, terminal=200, monkeypatch=monkeypatch)
    for name in note.partition(": ")[2].split(", "):
        assert name.split()[0] in wide
        assert not any(name in line for line in table)


def test_where_a_job_has_no_flush_every_job_says_whether_it_has(tmp_path):
    names = ("1f1b", "pipedream_2bw")
    jobs = [simulated(tmp_path, index, name) for index, name in enumerate(names)]
    head, *rows = (line.split() for line in printed(jobs).splitlines()[2:5])
    assert "flush" in head
    assert [row[:3] for row in rows] == [["0", "1f1b", "yes"], ["1", "pipedream_2bw", "no"]]
