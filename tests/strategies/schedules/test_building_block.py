import pytest

from strategies.ir.placement import bidirectional, loop, v
from strategies.schedules.best_order import equal_durations
from strategies.schedules.building_block import Block, repeat
from strategies.schedules.lanes import lanes_of
from strategies.schedules.schedule import Durations


def first(times):
    """Of microbatch 0, per stage."""
    return [lane[0] for lane in times]


def test_the_block_of_v_min_goes_one_slot_per_rank():
    placement = v(3)
    guide = repeat(Block((1, 1, 1, 1)), lanes_of(placement, 2), equal_durations(placement))
    assert first(guide.forward) == [0, 1, 2, 3, 4, 5]
    assert first(guide.backward) == [11, 10, 9, 8, 7, 6]


def test_the_block_of_v_half_goes_down_at_two_slots_and_up_at_one():
    placement = v(3)
    guide = repeat(Block((2, 1, 2, 1)), lanes_of(placement, 2), equal_durations(placement))
    assert first(guide.forward) == [0, 2, 4, 5, 6, 7]
    assert first(guide.backward) == [15, 14, 13, 12, 10, 8]


def test_a_turn_delays_the_first_backward():
    placement = v(2)
    guide = repeat(Block((1, 1, 1, 1), turn=3), lanes_of(placement, 1), equal_durations(placement))
    assert first(guide.backward) == [10, 9, 8, 7]


def test_microbatches_follow_at_the_work_of_the_slowest_rank():
    placement = loop(2, 1)
    durations = Durations((1.0, 2.0), (1.0, 3.0), (1.0, 1.0))
    guide = repeat(Block((1.5, 1.5)), lanes_of(placement, 3), durations)
    assert guide.forward == ((0, 6, 12), (3, 9, 15))  # 1.5 slots of 2
    assert guide.backward[1] == (5, 11, 17)


def test_a_hop_never_takes_less_than_what_is_run_and_sent():
    placement = loop(2, 1)
    durations = Durations((1.0, 1.0), (2.0, 2.0), (0.5, 0.5), latency=0.25)
    guide = repeat(Block((0.0, 0.0)), lanes_of(placement, 1), durations)
    assert first(guide.forward) == [0, 1.25]
    assert first(guide.backward) == [4.5, 2.25]


def test_blocks_are_for_one_weight_copy():
    placement = bidirectional(2)
    with pytest.raises(AssertionError):
        repeat(Block((1, 1)), lanes_of(placement, 2), equal_durations(placement))
