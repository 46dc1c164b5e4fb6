import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.report.ascii import draw
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.metrics import measure
from tests.strategies.programs import compute_texts, lines


def compiled(pp, microbatches, stages=None):
    return compile_program(
        schedule="looped_bfs", pp=pp, num_microbatches=microbatches, stages_per_rank=stages
    )


def figures(pp, microbatches, stages=None, **costs):
    timeline = simulate(compiled(pp, microbatches, stages), UniformCosts(**costs))
    return measure(timeline, UniformCosts(**costs))


def test_stage_after_stage_and_back_the_same_way():
    assert lines(draw(simulate(compiled(2, 3), UniformCosts()))) == lines(
        """
        rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2  .   .   .  2B2  -  2B1  -  2B0  -  0B2  -  0B1  -  0B0  -
        rank 1 |  .  1F0 1F1 1F2 3F0 3F1 3F2 3B2  -  3B1  -  3B0  -  1B2  -  1B1  -  1B0  -   .   .
        """
    )


def test_one_rank_with_one_stage():
    assert compute_texts(compiled(1, 2, 1)) == ["0F0 0F1 0B1 0B0"]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_the_papers_bubble_and_memory(pp, rounds, stages):
    microbatches = rounds * pp
    result = figures(pp, microbatches, stages)
    assert result.makespan == pytest.approx(microbatches * 3 + (pp - 1) * 3 / stages)
    assert result.bound_gap == pytest.approx(0, abs=1e-9)
    assert result.peak_activations == pytest.approx((microbatches,) * pp)


def test_fewer_microbatches_than_ranks_leave_gaps_between_stages():
    assert figures(4, 2).makespan == 13.5  # 10.5 by the formula


@settings(max_examples=25)
@given(
    pp=st.integers(1, 8),
    microbatches=st.integers(1, 16),
    stages=st.integers(1, 4),
    p2p=st.floats(0, 1),
)
def test_it_runs_for_every_shape_as_fast_as_ascending_backwards(pp, microbatches, stages, p2p):
    result = figures(pp, microbatches, stages, p2p=p2p)
    assert result.bound_gap >= -1e-9
    ascending = compile_program(
        schedule="foldx_aiao", pp=pp, num_microbatches=microbatches, stages_per_rank=stages
    )
    assert result.makespan == pytest.approx(simulate(ascending, UniformCosts(p2p=p2p)).makespan)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_it_is_the_order_of_torch(pp, microbatches, stages):
    torch = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    rows = torch.get_schedule_ops("LoopedBFS", pp, microbatches, stages)
    expected = [" ".join(str(action) for action in row if action is not None) for row in rows]
    assert compute_texts(compiled(pp, microbatches, stages)) == expected
