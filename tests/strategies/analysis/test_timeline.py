import pytest

from strategies.analysis.timeline import Timeline
from strategies.ir import Kind
from tests.strategies.programs import written

PROGRAM = written(
    """
    0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE0 0STEP
    1RECV_F0<0 1F0 1R0 1B0 1SEND_B0>0 1REDUCE0 1STEP
    """,
    num_microbatches=1,
    lowered=True,
)
# Measured somewhere else, hence from 10 on.
TIMELINE = Timeline(
    PROGRAM,
    start=((10, 11, 16, 17, 19, 23), (11, 12, 13, 14, 16, 16, 21)),
    end=((11, 12, 17, 19, 23, 24), (12, 13, 14, 16, 17, 21, 21)),
    time_unit="s",
    origin="measured",
)


def test_times_are_counted_from_the_first_start():
    assert TIMELINE.origin_time == 10
    assert TIMELINE.makespan == 14


def test_the_period_is_the_longest_rank():
    assert TIMELINE.period == 14


def test_events_come_in_list_order():
    assert [(str(e.instruction), e.start, e.end) for e in TIMELINE.events(0)][:3] == [
        ("0F0", 10, 11),
        ("0SEND_F0>1", 11, 12),
        ("0RECV_B0<1", 16, 17),
    ]
    assert {event.rank for event in TIMELINE.events(1)} == {1}


def test_compute_is_what_occupies_the_rank():
    assert [e.instruction.kind for e in TIMELINE.compute(1)] == [Kind.F, Kind.R, Kind.B, Kind.STEP]


def test_busy_counts_microbatches_only():
    assert TIMELINE.busy(0) == 3
    assert TIMELINE.busy(1) == 4
    assert TIMELINE.bubble_ratio == pytest.approx(1 - 7 / 28)


def test_exposed_is_what_outlasts_the_last_compute():
    assert TIMELINE.exposed_grad_reduce == 4


def test_an_empty_program_takes_no_time():
    program = written("0F0", num_microbatches=1).with_ranks(((),))
    empty = Timeline(program, ((),), ((),), "s", "measured")
    assert (empty.makespan, empty.period, empty.bubble_ratio) == (0, 0, 0)
    assert empty.exposed_grad_reduce == 0
