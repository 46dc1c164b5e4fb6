"""Messages and reductions on one interface: equal to links of their own while nothing meets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from strategies.compiler import compile_program
from strategies.costs.table import CostTable
from strategies.costs.uniform import UniformCosts
from strategies.ir.instruction import Kind
from strategies.ir.program import Program
from strategies.recompute import Recompute
from strategies.simulator.engine import simulate, unroll
from strategies.timeline import Timeline

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
