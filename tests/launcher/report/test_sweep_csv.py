import csv
import json

from launcher.report.sweep_csv import FIXED, columns, write_sweep_csv, write_sweep_json
from launcher.report.sweep_labels import make_sweep

from .sweeps import job, simulated, trained

HEADER = (
    "job folder status label schedule pp dp tp stages_per_rank num_microbatches makespan period "
    "bubble_ratio peak_activations_max peak_memory_bytes_max exposed_grad_reduce bound_gap "
    "gap_to_ideal weight_copies time_unit step_time_s predicted_step_time_s measured_bubble_ratio "
    "measured_makespan_s measured_period_s measured_exposed_grad_reduce_s "
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
