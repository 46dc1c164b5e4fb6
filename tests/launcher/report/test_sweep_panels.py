from itertools import pairwise

import pytest

from launcher.report.sweep_labels import make_sweep
from launcher.report.sweep_panels import Bar, picture_panels

from .sweeps import job, predicted, simulated, trained


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
