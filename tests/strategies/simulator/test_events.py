"""Shared interfaces, shared cores, and both: equal to their own while nothing meets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.analysis.timeline import Timeline
from strategies.compiler import compile_plan, compile_program
from strategies.costs.table import CostTable
from strategies.costs.uniform import UniformCosts
from strategies.errors import CostError
from strategies.ir.kinds import MICROBATCH_KINDS, Kind
from strategies.ir.program import Program
from strategies.plan import Recompute
from strategies.simulator.engine import _items, flat_durations, simulate, unroll
from strategies.simulator.events import run_events
from tests.strategies.programs import FixedCosts, plans, uneven, written

SCHEDULES = ("1f1b", "interleaved_1f1b", "looped_bfs", "foldx_aiao", "zb_v", "chimera", "dualpipe")


@dataclass(frozen=True, slots=True)
class Costs:
    """F = 1, B = 2; messages that keep a link for a time; reductions of a rank's gradient."""

    grad_reduce: float = 0.0
    occupancy: float = 0.0
    latency: float = 0.0
    one_link: bool = True

    def table(self, program: Program) -> CostTable:
        table = UniformCosts(grad_reduce=self.grad_reduce, p2p=self.latency).table(program)
        occupancy = (self.occupancy,) * len(program.boundaries)
        return replace(table, occupancy=occupancy, one_link=self.one_link)


def _end(timeline: Timeline, rank: int, text: str) -> float:
    return next(e.end for e in timeline.events(rank) if str(e.instruction).startswith(text))


@pytest.mark.parametrize("overlap", ["grad_reduce", "none", "zero1"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_reductions_alone_are_as_quick_as_on_a_channel_of_their_own(schedule: str, overlap: str):
    program = compile_program(
        schedule=schedule,
        pp=4,
        num_microbatches=8,
        buckets=2,
        overlap=overlap,  # type: ignore[arg-type]
    )
    costs = Costs(grad_reduce=7.0, latency=0.25)
    for shared, own in zip(
        unroll(program, costs, steps=3),
        unroll(program, replace(costs, one_link=False), steps=3),
        strict=True,
    ):
        for rank in range(4):
            assert shared.start[rank] == pytest.approx(own.start[rank])
            assert shared.end[rank] == pytest.approx(own.end[rank])


def test_recomputed_activations_take_their_time_here_too():
    program = compile_program(
        schedule="1f1b", pp=4, num_microbatches=8, recompute=Recompute(policy="full")
    )
    costs = Costs(grad_reduce=7.0, latency=0.25)
    shared, own = (simulate(program, replace(costs, one_link=one)) for one in (True, False))
    assert any(item.kind is Kind.R for item in program.ranks[0])
    assert shared.end == tuple(pytest.approx(row) for row in own.end)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "foldx_fifo", "zb_v"])
def test_messages_of_two_ranks_alone_meet_nothing(schedule: str):
    program = compile_program(schedule=schedule, pp=2, num_microbatches=6, buckets=0)
    costs = Costs(occupancy=0.3, latency=0.1)
    shared, own = (simulate(program, replace(costs, one_link=one)) for one in (True, False))
    for rank in range(2):
        assert shared.end[rank] == pytest.approx(own.end[rank])


def test_a_message_beside_a_reduction_takes_twice_as_long():
    """Rank 0 has stage 2 reduced while the gradient that stage 2 handed back is on its way.

    One microbatch, a stage's F takes 0.5 and its B 1. Stage 2's B ends at 4.2 at the earliest:
    0F 0-0.5, message 0.4, 1F 0.9-1.4, message, 2F 1.8-2.3, message, 3F 2.7-3.2, 3B 3.2-4.2, message
    beside 3's reduction.
    """
    program = compile_program(schedule="looped_bfs", pp=2, num_microbatches=1)
    timeline = simulate(program, Costs(grad_reduce=4.0, occupancy=0.4))
    assert _end(timeline, 1, "3B0") == pytest.approx(4.2)
    # From 4.2 the message and the reduction of stage 3 (2.0 alone) share what rank 1 sends.
    assert _end(timeline, 0, "2RECV_B0") == pytest.approx(5.0)
    assert _end(timeline, 0, "2B0") == pytest.approx(6.0)
    # The reduction had 0.4 of its 2.0 by 5.0, and 1.0 more by 6.0. Then stage 2's gradient comes
    # in, beside which it ends: of 0.6 and 0.4 the message is through at 6.8, with 0.2 to go.
    assert _end(timeline, 1, "1RECV_B0") == pytest.approx(6.8)
    assert _end(timeline, 1, "3REDUCE0") == pytest.approx(7.0)


def test_transfers_that_meet_never_end_earlier_than_on_links_of_their_own():
    for schedule in SCHEDULES:
        program = compile_program(schedule=schedule, pp=4, num_microbatches=8, buckets=2)
        costs = Costs(grad_reduce=9.0, occupancy=0.2)
        shared = simulate(program, costs)
        own = simulate(program, replace(costs, one_link=False))
        assert shared.makespan > own.makespan
        reduced = sum(
            e.end - e.start for e in shared.events(0) if e.instruction.kind is Kind.REDUCE
        )
        assert reduced >= 9.0 - 1e-9


def test_the_next_step_begins_when_its_rank_is_free():
    program = compile_program(schedule="1f1b", pp=2, num_microbatches=4)
    first, second = unroll(program, Costs(grad_reduce=3.0, occupancy=0.2), steps=2)
    for rank in range(2):
        done = max(e.end for e in first.compute(rank))
        assert min(e.start for e in second.compute(rank)) >= done - 1e-9


# ------------------------------------------------------------------------------------ shared cores
#
# Ranks that share cores: small cases by hand, and laws that hold for all programs.


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
    durations = flat_durations(table, program.flat.fused)
    items = _items(program, table)
    spans = run_events(program, items, table, durations, cores=cores, steps=2)
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


# ------------------------------------------------------------------------------------ both at once
#
# Computations share cores while messages and reductions share interfaces.


# Like TWO, with a reduction on rank 1.
REDUCED = written(
    """
    0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0STEP
    1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1REDUCE0 1STEP
    """,
    num_microbatches=2,
    lowered=True,
)


def spans(timeline):
    ranks = range(len(timeline.program.ranks))
    return {str(e.instruction): (e.start, e.end) for r in ranks for e in timeline.events(r)}


def on_one_interface(program, **options):
    """F = 1 and B = 2 on both stages, messages of 1, a reduction of 2 on the second stage."""
    options = {"occupancy": 1.0, "reduce": [(), (2.0,)], **options}
    table = uneven(program, [1, 1], **options).table(program)
    return FixedCosts(replace(table, one_link=True))


def test_one_core_and_one_interface_by_hand():
    found = spans(simulate(REDUCED, on_one_interface(REDUCED), cores=1))
    # Until 6 one rank computes at a time, and the message that comes for rank 0 then is alone.
    assert found["0F1"] == found["0SEND_F0>1"] == (1, 2)
    assert found["1F0"] == found["0SEND_F1>1"] == (2, 3)
    assert found["1B0"] == (3, 5)
    assert found["1F1"] == found["1SEND_B0>0"] == (5, 6)
    # Two backwards on one core, then a message beside a reduction on one interface.
    assert found["0B0"] == found["1B1"] == (6, 10)
    assert found["1SEND_B1>0"] == (10, 12)
    assert found["1REDUCE0"] == (10, 13)
    assert found["0B1"] == (12, 14)
    assert found["1STEP"] == (13, 13)


def test_what_shares_a_core_gets_ready_later_and_meets_other_transfers():
    """Half a core: what was by hand above with all computation, and no transfer, twice as long."""
    program = compile_program(schedule="looped_bfs", pp=2, num_microbatches=1)
    timeline = simulate(program, Costs(grad_reduce=4.0, occupancy=0.4), cores=0.5)
    assert _end(timeline, 1, "3B0") == pytest.approx(7.2)
    assert _end(timeline, 0, "2RECV_B0") == pytest.approx(8.0)
    assert _end(timeline, 0, "2B0") == pytest.approx(10.0)
    # With a core per rank it is still there when stage 2's gradient comes in; here it is through.
    assert _end(timeline, 1, "3REDUCE0") == pytest.approx(9.6)
    assert _end(timeline, 1, "1RECV_B0") == pytest.approx(10.8)
    assert _end(timeline, 1, "1B0") == pytest.approx(12.8)


def test_transfers_of_two_steps_that_meet_share_the_interface():
    program = written(
        """
        0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE0
        1RECV_F0<0 1F0 1B0 1SEND_B0>0
        """,
        num_microbatches=1,
        lowered=True,
    )
    costs = on_one_interface(program, reduce=[(5.0,), ()])
    first, second = map(spans, unroll(program, costs, steps=2))
    assert first["0B0"] == (6, 8)
    # Alone until the next forward's message leaves at 9, beside it until 11, alone again.
    assert first["0REDUCE0"] == (8, 14)
    assert second["0SEND_F0>1"] == (9, 11)
    assert second["1SEND_B0>0"] == (14, 15)


@settings(max_examples=25, deadline=None)
@given(plan=plans(max_pp=4, max_microbatches=8))
def test_enough_cores_leave_the_interface_alone(plan):
    program = compile_plan(plan).train
    costs = Costs(grad_reduce=5.0, occupancy=0.3, latency=0.1)
    alone = unroll(program, costs, steps=2)
    cores = len(program.ranks)
    assert unroll(program, costs, steps=2, cores=cores) == alone
    table = costs.table(program)
    durations = flat_durations(table, program.flat.fused)
    found = run_events(program, program.flat.steps, table, durations, cores=cores, steps=2)
    for timeline, (start, end) in zip(alone, found, strict=True):
        assert [v for row in timeline.start for v in row] == pytest.approx(start)
        assert [v for row in timeline.end for v in row] == pytest.approx(end)


@pytest.mark.parametrize("cores", [0.5, 1, 1.5])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "foldx_fifo", "zb_v"])
def test_transfers_that_meet_nothing_leave_the_cores_alone(schedule: str, cores: float):
    program = compile_program(schedule=schedule, pp=2, num_microbatches=6, buckets=0)
    costs = Costs(occupancy=0.3, latency=0.1)
    shared, own = (
        unroll(program, replace(costs, one_link=one), steps=2, cores=cores) for one in (True, False)
    )
    for both, alone in zip(shared, own, strict=True):
        assert both.end == tuple(pytest.approx(row) for row in alone.end)


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_together_are_as_slow_as_either(schedule: str, cores: float):
    """Within 1 %: a rank that a slow transfer holds up leaves its core to others."""
    program = compile_program(schedule=schedule, pp=4, num_microbatches=8, buckets=2)
    costs = Costs(grad_reduce=9.0, occupancy=0.2)
    both = simulate(program, costs, cores=cores)
    assert both.makespan >= 0.99 * simulate(program, costs).makespan
    own = replace(costs, one_link=False)
    assert both.makespan >= 0.99 * simulate(program, own, cores=cores).makespan


@settings(max_examples=40, deadline=None)
@given(plan=plans(), cores=st.sampled_from([0.5, 1, 2, 3]))
def test_nothing_runs_earlier_than_with_cores_and_links_of_its_own(plan, cores):
    program = compile_plan(plan).train
    costs = Costs(grad_reduce=5.0, occupancy=0.3, latency=0.1)
    own = simulate(program, replace(costs, one_link=False))
    both = simulate(program, costs, cores=cores)
    for mine, shared in ((own.start, both.start), (own.end, both.end)):
        for soon, late in zip(mine, shared, strict=True):
            assert all(b >= a - 1e-9 for a, b in zip(soon, late, strict=True))
    ranks = range(len(program.ranks))
    assert both.makespan >= sum(map(own.busy, ranks)) / cores - 1e-9
    for rank in ranks:  # An interface carries a second per second.
        kinds = [event.instruction.kind for event in own.events(rank)]
        reduced = sum(
            e.end - e.start for e in own.events(rank) if e.instruction.kind is Kind.REDUCE
        )
        for way in (Kind.SEND, Kind.RECV):
            carried = reduced + 0.3 * kinds.count(way)
            assert max(e.end for e in both.events(rank)) >= carried - 1e-9
