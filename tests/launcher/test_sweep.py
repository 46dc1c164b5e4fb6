"""What ``-m`` ends with: the comparison of its jobs, whatever became of them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from launcher.commands import collect
from launcher.commands.layouts import simulate
from launcher.compose.multirun import check_subdirs
from launcher.config import LaunchConfig
from launcher.config.running import SweepConfig
from strategies.errors import PlanError, RunError
from tests.launcher.command_line import Done, run_here
from tests.launcher.runs import MODEL, launch

WORDS = ("-m", "mode=simulate", "costs=uniform", "hydra.sweep.dir=s")
FILES = ["sweep.csv", "sweep.html", "sweep.json", "sweep.png"]


def sweep(
    words: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[[LaunchConfig, Path], int] = simulate,
) -> tuple[Done, list[dict[str, str]]]:
    """Runs a sweep in this process; with the rows of its sweep.csv."""
    done = run_here([*WORDS, *words], folder, monkeypatch, command)
    with (folder / "s" / "sweep.csv").open(newline="") as stream:
        return done, list(csv.DictReader(stream))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "s").glob("sweep*"))


def panels(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "s" / "sweep.html").read_text()
    data = text.partition('id="data">')[2].partition("</script>")[0]
    found: list[dict[str, Any]] = json.loads(data)["panels"] if data else []
    return found


def test_schedules_are_compared_in_one_table_and_one_picture(tmp_path, monkeypatch):
    done, rows = sweep(("schedule=1f1b,gpipe,foldx_fifo", "pp=4"), tmp_path, monkeypatch)
    assert (done.code, done.errors) == (0, "")
    assert files(tmp_path) == FILES
    assert [row["schedule"] for row in rows] == ["1f1b", "gpipe", "foldx_fifo"]
    for index, row in enumerate(rows):
        result = json.loads((tmp_path / "s" / str(index) / "result.json").read_text())
        for key in ("makespan", "period", "bubble_ratio", "exposed_grad_reduce", "weight_copies"):
            assert row[key] == str(result[key]), key
    assert [panel["makespan"] for panel in panels(tmp_path)] == [33.0, 33.0, 28.5]
    lines = done.output.splitlines()
    assert lines[:2] == [
        f"3 jobs in {tmp_path / 's'}, each with an output.txt",
        "[1/3] schedule=1f1b  makespan 33 F, bubble 27.3 %, peak activations 4; 0 s",
    ]
    assert f"files: {tmp_path / 's' / '2'}" in (tmp_path / "s" / "2" / "output.txt").read_text()
    table = lines[4:]
    assert [line.split()[:4] for line in table[3:6]] == [
        ["0", "1f1b", "33.0", "33.0"],
        ["1", "gpipe", "33.0", "33.0"],
        ["2", "foldx_fifo", "28.5*", "28.5*"],
    ]


def test_anything_can_vary(tmp_path, monkeypatch):
    words = ("pp=2,4", "costs.forward=1,3")
    done, rows = sweep(words, tmp_path, monkeypatch)
    assert done.code == 0
    assert [(row["pp"], row["costs.forward"]) for row in rows] == [
        ("2", "1"), ("2", "3"), ("4", "1"), ("4", "3"),
    ]  # fmt: skip
    assert [row["label"] for row in rows][:2] == ["pp=2 costs.forward=1", "pp=2 costs.forward=3"]
    assert [len(panel["rows"]) for panel in panels(tmp_path)] == [2, 2, 4, 4]


def test_a_sweep_of_one_job_has_its_table_too(tmp_path, monkeypatch):
    done, rows = sweep(("schedule=gpipe",), tmp_path, monkeypatch)
    assert (done.code, len(rows), files(tmp_path)) == (0, 1, FILES)


def test_single_runs_have_none(tmp_path, monkeypatch):
    done = run_here(["mode=simulate", "hydra.run.dir=s"], tmp_path, monkeypatch, simulate)
    assert (done.code, files(tmp_path)) == (0, [])


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (PlanError("no GPU"), 2, "refused"),
        (RunError("rank 0 was killed"), 1, "failed"),
        (ZeroDivisionError("a defect"), 1, "failed"),
    ],
)
def test_a_job_that_fails_has_a_row_with_its_error(error, code, status, tmp_path, monkeypatch):
    def fail_second(config: LaunchConfig, run_dir: Path) -> int:
        if config.schedule.name == "gpipe":
            raise error
        return simulate(config, run_dir)

    words = ("schedule=1f1b,gpipe,foldx_fifo", "pp=2")
    done, rows = sweep(words, tmp_path, monkeypatch, fail_second)
    assert (done.code, files(tmp_path)) == (code, FILES)
    assert [row["status"] for row in rows] == ["done", status, "done"]
    assert str(error) in rows[1]["error"]
    assert (rows[1]["schedule"], rows[1]["pp"], rows[1]["makespan"]) == ("gpipe", "2", "")
    assert f"job 1 {status} (exit {code}): " in done.output
    assert len(panels(tmp_path)) == 2


def test_a_sweep_in_which_every_job_fails_has_a_table_without_a_picture(tmp_path, monkeypatch):
    def fail(config: LaunchConfig, run_dir: Path) -> int:
        raise RunError(f"rank 0 of {config.pp} was killed")

    done, rows = sweep(("pp=2,4",), tmp_path, monkeypatch, fail)
    assert (done.code, files(tmp_path)) == (1, FILES[:3])
    assert [row["error"] for row in rows] == ["rank 0 of 2 was killed", "rank 0 of 4 was killed"]


def test_a_preempted_sweep_compares_what_ran(tmp_path, monkeypatch):
    def preempt_second(config: LaunchConfig, run_dir: Path) -> int:
        return 85 if config.pp == 4 else simulate(config, run_dir)

    done, rows = sweep(("pp=2,4,8",), tmp_path, monkeypatch, preempt_second)
    assert (done.code, len(done.calls), files(tmp_path)) == (85, 2, FILES)
    assert [(row["pp"], row["status"]) for row in rows] == [("2", "done"), ("4", "preempted")]
    assert "1 of 3 jobs did not run" in done.output


def test_an_interrupted_sweep_compares_what_ran(tmp_path, monkeypatch):
    def interrupt_second(config: LaunchConfig, run_dir: Path) -> int:
        if config.pp == 4:
            raise KeyboardInterrupt
        return simulate(config, run_dir)

    done, rows = sweep(("pp=2,4,8",), tmp_path, monkeypatch, interrupt_second)
    assert (done.code, len(done.calls), files(tmp_path)) == (130, 2, FILES[:3])
    assert [(row["pp"], row["status"]) for row in rows] == [("2", "done"), ("4", "interrupted")]
    assert len(panels(tmp_path)) == 1


def test_a_sweep_into_the_same_folder_shows_nothing_of_the_earlier_one(tmp_path, monkeypatch):
    sweep(("pp=2,4",), tmp_path, monkeypatch)

    def refuse(config: LaunchConfig, run_dir: Path) -> int:
        raise PlanError("no")

    done, rows = sweep(("pp=2,4",), tmp_path, monkeypatch, refuse)
    assert (done.code, files(tmp_path)) == (2, FILES[:3])
    assert [row["makespan"] for row in rows] == ["", ""]


def test_a_defect_of_the_report_does_not_change_the_exit_code(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    monkeypatch.delitem(sys.modules, "matplotlib.backends.backend_agg", raising=False)
    done, _ = sweep(("pp=2,4",), tmp_path, monkeypatch)
    assert (done.code, files(tmp_path)) == (0, FILES[:3])
    assert done.errors.startswith("sweep.png was not written")


def test_folders_may_have_any_name(tmp_path, monkeypatch):
    words = ("-m", "mode=simulate", "pp=1,2", "hydra.sweep.dir='a b%$x$'")
    subdir = "hydra.sweep.subdir='j:${hydra.job.num} #'"
    done = run_here([*words, subdir], tmp_path, monkeypatch, simulate)
    assert (done.code, done.errors) == (0, "")
    text = (tmp_path / "a b%$x$" / "sweep.html").read_text()
    assert 'href="j%3A1%20%23/timeline.html"' in text
    assert (tmp_path / "a b%$x$" / "j:1 #" / "timeline.html").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pp=2,4", "one"], "=one of job 1 is the folder of job 0 as well"),
        (["pp=2,4", "sweep.parallel=2", "./one/"], "=./one/ of job 1 is the folder of job 0"),
        (["schedule=1f1b,zb_v", "pp=2,4", "${schedule.name}"], "=1f1b of job 1 is the folder of"),
        (["pp=2,4", "../${hydra.job.num}"], "=../0 of job 0 lies outside"),
        (["pp=2,4", "a/../../${hydra.job.num}"], "=a/../../0 of job 0 lies outside"),
        (["pp=2", "/tmp/x"], "=/tmp/x of job 0 lies outside"),
        (["pp=2", "sweep.json"], "of job 0: sweep.json is a file that the sweep itself writes"),
        (["pp=2,4", "jobs.json/${pp}"], "jobs.json is a file that the sweep itself writes"),
        (["pp=2,4", "${nothing}"], "cannot be resolved: Interpolation key 'nothing' not found"),
        (["pp=2,4", "'${oc.env:\"SOME_TOKEN\"}${pp}'"], "reads a credential from the environment"),
        (["pp=2,4", "'${oc.env:NAME}${pp}'"], "a line break"),
    ],
)  # fmt: skip
def test_every_job_has_a_folder_of_its_own_below_the_sweeps(words, message, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setenv("SOME_TOKEN", "ghp_" + "x1Y2" * 9)
    monkeypatch.setenv("NAME", "a\nb")
    *own, subdir = words
    request = ["-m", "costs=uniform", *own, f"hydra.sweep.subdir={subdir}"]
    done = run_here([*request, "mode=simulate"], tmp_path, monkeypatch)
    done.assert_refused()
    assert message in done.errors
    assert not list(tmp_path.rglob("*"))


def test_of_a_search_only_numbers_tell_folders_apart():
    def ask(subdir: str) -> None:
        node = {"hydra": {"job": {}, "sweep": {"subdir": subdir}}, "pp": 2}
        check_subdirs([OmegaConf.create(node)], searched=True)

    ask("${pp}_${hydra.job.num}")
    with pytest.raises(PlanError, match="=2 of job 1 is the folder of job 0 as well"):
        ask("${pp}")


def test_folders_that_options_tell_apart_are_taken(tmp_path, monkeypatch):
    words = ("schedule=1f1b,foldx_fifo", "pp=4", "hydra.sweep.subdir='${schedule.name}'")
    done, rows = sweep(words, tmp_path, monkeypatch)
    assert (done.code, [row["makespan"] for row in rows]) == (0, ["33.0", "28.5"])
    assert (tmp_path / "s" / "foldx_fifo" / "timeline.html").is_file()


def test_modes_without_a_timeline_have_a_table(tmp_path, monkeypatch):
    def evaluate(config: LaunchConfig, run_dir: Path) -> int:
        (run_dir / "result.json").write_text('{"status": "done", "val_loss": 2.25}')
        return 0

    done, rows = sweep(("pp=1,2",), tmp_path, monkeypatch, evaluate)
    assert (done.code, files(tmp_path)) == (0, FILES[:3])
    assert [row["val_loss"] for row in rows] == ["2.25", "2.25"]


def collected(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What ``mode=collect`` prints about a sweep in this folder."""
    config = LaunchConfig(mode="collect", sweep=SweepConfig(dir=str(folder / "s")))
    capsys.readouterr()
    assert collect.run(config) == 0
    return capsys.readouterr().out.splitlines()


def test_collecting_writes_the_same_files_from_the_folders_alone(tmp_path, monkeypatch, capsys):
    sweep(("schedule=1f1b,dualpipe", "pp=2"), tmp_path, monkeypatch)
    first = {name: (tmp_path / "s" / name).read_bytes() for name in FILES}
    for name in FILES:
        (tmp_path / "s" / name).unlink()
    printed = collected(tmp_path, capsys)
    assert {name: (tmp_path / "s" / name).read_bytes() for name in FILES} == first
    assert not any("no timelines" in line for line in printed)


def test_collecting_folders_of_another_version_names_the_missing_pictures(
    tmp_path, monkeypatch, capsys
):
    sweep(("schedule=1f1b,gpipe", "pp=2"), tmp_path, monkeypatch)
    for index in (0, 1):
        file = tmp_path / "s" / str(index) / "trace.json"
        trace = json.loads(file.read_text())
        if index:
            trace["otherData"]["timelines"]["kinds"].reverse()
        else:
            del trace["otherData"]["timelines"]
        file.write_text(json.dumps(trace))
    printed = collected(tmp_path, capsys)
    assert [line for line in printed if "timelines" in line] == [
        "no timelines of job 0, 1: trace.json there is from another version, which keeps none "
        "that this one reads; each job's own timeline.html has them"
    ]
    assert files(tmp_path) == FILES[:3]
    assert panels(tmp_path) == []


def test_no_process_pays_for_the_picture_before_it_is_drawn(tmp_path):
    done = launch(["mode=simulate", "costs=uniform"], tmp_path / "a", PYTHONPROFILEIMPORTTIME="1")
    imported = {line.rpartition("|")[2].strip() for line in done.errors.splitlines()}
    assert "launcher.report.html" in imported
    assert not {"matplotlib", "PIL", "torch", "launcher.report.sweep.files"} & imported
    # Nor a sweep, before its jobs have ended.
    code = "import sys, launcher.compose.multirun; print(*sys.modules)"
    loaded = subprocess.check_output(
        [sys.executable, "-c", code], text=True, cwd=Path(__file__).parents[2]
    )
    assert "launcher.report.sweep.files" in loaded.split()
    assert not {"matplotlib", "PIL", "torch"} & set(loaded.split())


@pytest.mark.distributed
def test_runs_are_compared_with_their_predictions(tmp_path):
    words = [
        *MODEL, "-m", "schedule=1f1b,gpipe", "pp=2", "trainer.max_steps=2", "tracking=none",
        "trainer.limit_val_batches=0", "hydra.sweep.dir=s",
    ]  # fmt: skip
    done = launch(words, tmp_path).assert_done()
    assert files(tmp_path) == FILES
    assert done.errors == ""
    with (tmp_path / "s" / "sweep.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    for index, row in enumerate(rows):
        result = json.loads((tmp_path / "s" / str(index) / "result.json").read_text())
        for key in ("step_time_s", "predicted_step_time_s", "measured_bubble_ratio", "loss_last"):
            assert float(row[key]) == result[key], key
    found = panels(tmp_path)
    assert [panel["unit"] for panel in found] == ["s"] * 4
    assert found[0]["makespan"] == pytest.approx(float(rows[0]["makespan"]), rel=1e-6)
    assert "measured beside predicted\n" in done.output
