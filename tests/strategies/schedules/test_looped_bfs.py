import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import UniformCosts
from tests.strategies.programs import compute_texts, lines
from tests.strategies.schedules.figures import compiled, figures, picture


def test_stage_after_stage_and_back_the_same_way():
    assert picture("looped_bfs", 2, 3) == lines(
        """
        rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2  .   .   .  2B2  -  2B1  -  2B0  -  0B2  -  0B1  -  0B0  -
        rank 1 |  .  1F0 1F1 1F2 3F0 3F1 3F2 3B2  -  3B1  -  3B0  -  1B2  -  1B1  -  1B0  -   .   .
        """
    )


def test_fewer_microbatches_than_ranks_leave_gaps_between_stages():
    assert figures("looped_bfs", 4, 2).makespan == 13.5  # 10.5 by the formula


@settings(max_examples=25)
@given(
    pp=st.integers(1, 8),
    microbatches=st.integers(1, 16),
    stages=st.integers(1, 4),
    p2p=st.floats(0, 1),
)
def test_it_is_as_fast_as_ascending_backwards(pp, microbatches, stages, p2p):
    shape, costs = (pp, microbatches, stages), UniformCosts(p2p=p2p)
    ascending = figures("foldx_aiao", *shape, costs=costs)
    assert figures("looped_bfs", *shape, costs=costs).makespan == pytest.approx(ascending.makespan)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_it_is_the_order_of_torch(pp, microbatches, stages):
    torch = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    rows = torch.get_schedule_ops("LoopedBFS", pp, microbatches, stages)
    expected = [" ".join(str(action) for action in row if action is not None) for row in rows]
    assert compute_texts(compiled("looped_bfs", pp, microbatches, stages)) == expected
