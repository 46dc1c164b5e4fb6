from strategies.ir.placement import bidirectional, loop, v
from strategies.schedules.lanes import F, I, W, lanes_of
from strategies.schedules.zb_v import ZB_V
from tests.strategies.schedules.timed_orders import rows_of


def test_a_lane_is_a_stage_of_a_weight_copy():
    lanes = lanes_of(bidirectional(2), 5)
    assert lanes.rank == (0, 1, 1, 0)
    assert lanes.stage == (0, 1, 0, 1)
    assert lanes.size == (3, 3, 2, 2)
    assert lanes.of_rank == ((0, 3), (2, 1))
    assert (lanes.num_stages, lanes.num_copies, lanes.num_microbatches) == (2, 2, 5)


def test_a_rank_names_its_lowest_stage_first():
    assert lanes_of(v(3), 1).of_rank == ((0, 5), (1, 4), (2, 3))
    assert lanes_of(loop(2, 2), 1).of_rank == ((0, 2), (1, 3))


def test_odd_microbatches_run_on_the_second_copy():
    lanes = lanes_of(bidirectional(2), 4)
    rows = lanes.rows([[(F, 0, 1), (I, 3, 0)], [(F, 2, 1), (W, 1, 0)]])
    assert [" ".join(map(str, row)) for row in rows] == ["0F2 1I1", "0F3 1W0"]
    assert lanes.steps(rows) == [[(F, 0, 1), (I, 3, 0)], [(F, 2, 1), (W, 1, 0)]]


def test_instructions_come_back_as_they_were():
    rows = rows_of(ZB_V.name, 3, 7, None)
    lanes = lanes_of(v(3), 7)
    assert lanes.rows(lanes.steps(rows)) == rows
