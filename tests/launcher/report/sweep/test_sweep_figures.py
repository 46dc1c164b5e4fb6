from __future__ import annotations

import csv
import json

import pytest

from launcher.report.sweep.sweep_figures import (
    FIGURES,
    FIXED,
    PREDICTED,
    best_jobs,
    by_time_unit,
    columns,
    measured_figures,
    write_column,
    write_sweep_csv,
    write_sweep_json,
)
from launcher.report.sweep.sweep_jobs import make_sweep
from tests.launcher.report.sweep.sweeps import job, simulated, trained


@pytest.fixture
def jobs(tmp_path):
    names = ("1f1b", "gpipe", "foldx_fifo")
    return [simulated(tmp_path, index, name) for index, name in enumerate(names)]


def best(name, jobs):
    return sorted(best_jobs(FIGURES[name], jobs))


def test_the_largest_of_all_ranks_counts(jobs):
    assert [FIGURES["peak_activations_max"].value(j) for j in jobs] == [2.0, 4.0, 2.5]
    assert FIGURES["peak_memory_bytes_max"].value(jobs[0]) is None


def test_the_best_of_each_figure_is_found(jobs):
    assert best("makespan", jobs) == [2]
    assert best("peak_activations_max", jobs) == [0]
    assert best("weight_copies", jobs) == []  # no merit
    assert best("bound_gap", jobs) == []  # all equal


def test_ties_are_marked_alike(jobs):
    assert best("makespan", jobs[:2]) == []
    slow = simulated(jobs[0].folder.parent, 3, "1f1b", "seed=1", grad_reduce=8.0)
    assert best("makespan", [*jobs[:2], slow]) == [0, 1]


def test_only_jobs_that_are_done_compete(jobs, tmp_path):
    failed = job(tmp_path, 3, result={"makespan": 1.0, "time_unit": "F"}, exit_code=1)
    assert best("makespan", [*jobs, failed]) == [2]


def test_more_throughput_is_better(tmp_path):
    runs = [trained(tmp_path, index, "1f1b", scale=scale) for index, scale in ((0, 0.2), (1, 0.1))]
    assert best("tokens_per_s", runs) == [1]
    assert best("step_time_s", runs) == [1]


def test_times_in_f_are_not_compared_between_other_numbers_of_ranks_or_microbatches(tmp_path):
    ranks = [
        simulated(tmp_path, i, "1f1b", pp=pp, num_microbatches=8) for i, pp in enumerate((2, 4))
    ]
    assert best("makespan", ranks) == []
    assert best("bubble_ratio", ranks) == [0]
    batches = [simulated(tmp_path, i, "1f1b", num_microbatches=m) for i, m in enumerate((4, 8))]
    assert best("period", batches) == []
    assert best("bubble_ratio", batches) == [1]


def test_measured_figures_have_their_prediction_behind_them(jobs, tmp_path):
    assert measured_figures(jobs) == ()
    run = trained(tmp_path, 4, "1f1b")
    names = [figure.name for figure in measured_figures([*jobs, run])]
    assert names == [
        "step_time_s", "predicted_step_time_s", "measured_bubble_ratio", "bubble_ratio",
        "measured_exposed_grad_reduce_s", "exposed_grad_reduce", "peak_memory_bytes_max",
        "predicted_peak_memory_bytes_max", "tokens_per_s", "loss_last",
    ]  # fmt: skip


def test_measured_memory_is_no_prediction(tmp_path):
    run = trained(tmp_path, 0, "1f1b")
    (memory,) = (figure for figure in PREDICTED if figure.name == "peak_memory_bytes_max")
    assert memory.value(run) == 2**20
    assert FIGURES["peak_memory_bytes_max"].value(run) == 3 * 2**20


def test_jobs_with_other_time_units_stand_apart(jobs, tmp_path):
    refused = job(tmp_path, 5, exit_code=2)
    seconds = job(tmp_path, 6, result={"makespan": 1.0, "time_unit": "s"})
    assert by_time_unit([jobs[0], refused, jobs[1]]) == (("F", (jobs[0], refused, jobs[1])),)
    assert by_time_unit([seconds, jobs[0], refused, jobs[1]]) == (
        ("s", (seconds,)),
        ("F", (jobs[0], jobs[1])),
        (None, (refused,)),
    )
    assert by_time_unit([refused]) == ((None, (refused,)),)


COLUMNS = {
    "F": ([33.0, 28.5, None], "time", "F", ("F", ["33.0", "28.5", ""])),
    "seconds share a unit": ([1.25, 0.0125], "time", "s", ("s", ["1.250", "0.013"])),
    "zero": ([0.0, None], "seconds", None, ("s", ["0", ""])),
    "percent": ([0.375, 1.0], "percent", None, ("%", ["37.5", "100.0"])),
    "memory": ([3 * 2**30, 2**29], "bytes", None, ("GiB", ["3.0", "0.5"])),
    "little memory": ([2048], "bytes", None, ("KiB", ["2"])),
    "counts": ([12345.6, 1], "count", None, ("", ["12,346", "1"])),
    "losses": ([4.16354], "loss", None, ("", ["4.1635"])),
    "huge": ([1e9, 1.0], "number", None, ("", ["1,000,000,000.000", "1.000"])),
    "nothing": ([None, None], "time", "s", ("s", ["", ""])),
}


@pytest.mark.parametrize(("values", "quantity", "unit", "expected"), COLUMNS.values(), ids=COLUMNS)
def test_a_column_has_one_unit_and_aligned_decimals(values, quantity, unit, expected):
    assert write_column(values, quantity, unit) == expected


HEADER = (
    "job folder status label schedule pp dp tp stages_per_rank num_microbatches makespan period "
    "bubble_ratio peak_activations_max peak_memory_bytes_max exposed_grad_reduce bound_gap "
    "gap_to_ideal weight_copies synchronous time_unit step_time_s predicted_step_time_s "
    "measured_bubble_ratio measured_makespan_s measured_period_s measured_exposed_grad_reduce_s "
    "predicted_peak_memory_bytes_max loss_last val_loss tokens_per_s error"
)


def written(tmp_path, jobs):
    sweep = make_sweep(jobs, [j.overrides for j in jobs])
    path = tmp_path / "sweep.csv"
    write_sweep_csv(path, sweep)
    with path.open(newline="") as stream:
        return sweep, list(csv.DictReader(stream))


def test_the_columns_are_those_that_scripts_rely_on():
    assert " ".join(FIXED) == HEADER


def test_a_varied_key_has_a_column_unless_it_has_one_anyway(tmp_path):
    jobs = [simulated(tmp_path, i, s, f"seed={i}") for i, s in enumerate(("1f1b", "gpipe"))]
    sweep, rows = written(tmp_path, jobs)
    assert columns(sweep) == (*FIXED[:4], "seed", *FIXED[4:])
    assert [(row["seed"], row["schedule"]) for row in rows] == [("0", "1f1b"), ("1", "gpipe")]


def test_the_values_are_exactly_those_of_the_results(tmp_path):
    jobs = [simulated(tmp_path, 0, "foldx_fifo", grad_reduce=0.1), trained(tmp_path, 1, "1f1b")]
    _, rows = written(tmp_path, jobs)
    for found, row in zip(jobs, rows, strict=True):
        result = json.loads((found.folder / "result.json").read_text())
        for key in FIXED:
            if key in result and result[key] is not None and key != "status":
                assert row[key] == str(result[key]), key
        assert row["peak_activations_max"] == str(max(result["peak_activations"]))
        assert row["folder"] == str(found.index)
    assert rows[0]["peak_memory_bytes_max"] == rows[0]["step_time_s"] == ""
    assert rows[1]["peak_memory_bytes_max"] == str(3 * 2**20)


def test_a_failed_job_has_a_row_with_its_error(tmp_path):
    error = 'rank 1: "x", y\nTraceback\n'
    jobs = [
        simulated(tmp_path, 0, "1f1b"),
        job(tmp_path, 1, 'schedule=;,"\n', exit_code=1, error=error),
    ]
    _, rows = written(tmp_path, jobs)
    assert (rows[1]["status"], rows[1]["error"]) == ("failed", error)
    assert rows[1]["label"] == 'schedule=;,"\n'
    assert rows[1]["makespan"] == ""


def test_the_json_holds_whole_results(tmp_path):
    jobs = [simulated(tmp_path, 0, "1f1b"), job(tmp_path, 1, "schedule=x", exit_code=2, error="no")]
    sweep = make_sweep(jobs, [j.overrides for j in jobs] + [["schedule=y"]])
    write_sweep_json(tmp_path / "sweep.json", sweep)
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert (found["num_jobs"], found["varied"]) == (3, ["mode", "schedule"])
    first, second = found["jobs"]
    assert first["result"] == json.loads((tmp_path / "0" / "result.json").read_text())
    assert first["overrides"] == {"mode": "simulate", "schedule": "1f1b"}
    assert (second["status"], second["exit_code"], second["error"]) == ("refused", 2, "no")


def test_no_cell_of_the_table_is_calculated_or_obeyed(tmp_path):
    said = "=HYPERLINK(1)\x1b[2J"
    _, rows = written(tmp_path, [job(tmp_path, 0, "schedule=x", exit_code=1, error=said)])
    assert rows[0]["error"] == "'=HYPERLINK(1)\\x1b[2J"
