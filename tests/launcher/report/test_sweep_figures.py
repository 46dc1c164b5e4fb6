import pytest

from launcher.report.sweep_figures import (
    FIGURES,
    PREDICTED,
    best_jobs,
    by_time_unit,
    measured_figures,
)

from .sweeps import job, simulated, trained


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
