"""Ranks that share cores: small cases by hand, and laws that hold for all programs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import UniformCosts, compile_program, simulate
from strategies.compiler import compile_plan
from strategies.errors import CostError
from strategies.ir.instruction import MICROBATCH_KINDS
from strategies.simulator.engine import _flat_durations, unroll
from strategies.simulator.shared_cores import run_shared
from tests.strategies.programs import plans, written

# Two ranks that compute side by side after the first forward, and one message each way.
TWO = written(
    """
    0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0STEP
    1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1STEP
    """,
    num_microbatches=2,
    lowered=True,
)


def ends(timeline):
    ranks = range(len(timeline.program.ranks))
    return {str(e.instruction): e.end for rank in ranks for e in timeline.compute(rank)}


def test_two_ranks_on_one_core_take_the_sum_of_their_work_where_both_have_some():
    found = ends(simulate(TWO, UniformCosts(), cores=1))
    assert found["0F0"] == 1
    # 0F1 and 1F0 at half the speed from 1 on; then 1B0 is alone.
    assert found["0F1"] == found["1F0"] == 3
    assert found["1B0"] == 5
    # 1F1 has done its work of 1 at 7, 0B0 half of its 2; 1B1 begins at 7 and shares until 0B0 ends.
    assert found["1F1"] == 7
    assert found["0B0"] == 9
    assert found["1B1"] == 10
    assert found["0B1"] == 12


def test_half_a_core_more_than_one_is_shared_by_two():
    found = ends(simulate(TWO, UniformCosts(), cores=1.5))
    assert found["0F0"] == 1
    assert found["0F1"] == found["1F0"] == pytest.approx(1 + 1 / 0.75)


def test_latency_needs_no_core():
    found = ends(simulate(TWO, UniformCosts(p2p=0.5), cores=1))
    # 0F1 is alone from 1 to 1.5, then shares: half of its work is left for one unit of time.
    assert found["0F1"] == 2.5
    assert found["1F0"] == 3


def test_a_reduction_gets_ready_when_its_share_of_the_work_is_done():
    program = compile_program(schedule="1f1b", pp=2, num_microbatches=1, buckets=2)
    timeline = simulate(program, UniformCosts(grad_reduce=0.1, num_buckets=2), cores=0.5)
    reduced = [e.start for e in timeline.events(1) if str(e.instruction).startswith("1REDUCE")]
    # F0 takes 2, F1 2, B1 4 seconds alone on half a core: its halves are done at 6 and 8.
    assert reduced == pytest.approx([6, 8])


def test_enough_cores_change_nothing():
    program = compile_program(schedule="zb_v", pp=4, num_microbatches=8)
    free = simulate(program, UniformCosts(p2p=0.1))
    assert simulate(program, UniformCosts(p2p=0.1), cores=4) == free


def test_no_core_is_refused():
    with pytest.raises(CostError, match=r"hardware\.cores=0: at least one is needed"):
        simulate(TWO, UniformCosts(), cores=0)


@settings(max_examples=40, deadline=None)
@given(plan=plans(), transport=st.sampled_from(["buffered", "rendezvous"]))
def test_with_a_core_per_rank_the_replay_is_the_engine_s(plan, transport):
    costs = UniformCosts(p2p=0.13, grad_reduce=2.5, transport=transport)
    program = compile_plan(plan).train
    table = costs.table(program)
    cores = len(program.ranks)
    spans = run_shared(program, table, _flat_durations(program, table), cores=cores, steps=2)
    for timeline, (start, end) in zip(unroll(program, costs, steps=2), spans, strict=True):
        assert [v for row in timeline.start for v in row] == pytest.approx(start)
        assert [v for row in timeline.end for v in row] == pytest.approx(end)


@settings(max_examples=40, deadline=None)
@given(plan=plans(), cores=st.sampled_from([0.5, 1, 2, 3]))
def test_no_core_does_more_than_its_work(plan, cores):
    program = compile_plan(plan).train
    alone = simulate(program, UniformCosts())
    shared = simulate(program, UniformCosts(), cores=cores)
    ranks = range(len(program.ranks))
    work = sum(map(alone.busy, ranks))
    assert shared.makespan >= max(alone.makespan, work / cores) - 1e-9
    if cores <= 1:  # A core that is never idle: something can always run.
        assert shared.makespan == pytest.approx(work / cores)
    for rank in ranks:  # The order of a rank is its list's.
        begun = [e.start for e in shared.compute(rank) if e.instruction.kind in MICROBATCH_KINDS]
        assert begun == sorted(begun)
