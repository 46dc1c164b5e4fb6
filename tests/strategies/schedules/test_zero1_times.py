"""Sharded weights: reduce-scatter under the backward, all-gather under the next forwards.

F=1, B=2 per rank, V=4, M=16, a whole reduction of A=32 per rank (a half for each direction). One
step holds the gathers of the step before, so a single makespan is the time of a step in a long run.
"""

from itertools import pairwise

import pytest

from strategies import UniformCosts, compile_program, simulate
from strategies.costs.uniform import gathered_stages
from strategies.simulator.engine import unroll

COSTS = UniformCosts(grad_reduce=32)


def compiled(schedule, pp=4, stages=4, overlap="zero1", **options):
    return compile_program(
        schedule=schedule,
        pp=pp,
        num_microbatches=16,
        stages_per_rank=stages,
        overlap=overlap,
        **options,
    )


@pytest.mark.parametrize(
    ("schedule", "time"),
    [("interleaved_1f1b", 73.25), ("foldx_fifo", 73.25), ("looped_bfs", 58.25),
     ("foldx_aiao", 58.25)],
)  # fmt: skip
def test_a_step_hides_both_halves_of_the_reduction(schedule, time):
    program = compiled(schedule)
    timeline = simulate(program, COSTS)
    assert timeline.makespan == pytest.approx(time)
    assert timeline.period == pytest.approx(time)
    ends = [0.0, *(max(map(max, step.end)) for step in unroll(program, COSTS, steps=5))]
    assert [after - before for before, after in pairwise(ends)] == pytest.approx([time] * 5)


@pytest.mark.parametrize("group", [4, 8, 16])
def test_the_closed_form_of_the_group(group):
    time = 16 * 3 + 3 * 3 / 4
    scatter = max(4, 16 - 3 * group * 2 / 4)
    gather = max(4, 16 - 3 * group * 1 / 4)
    program = compiled("foldx", group=group)
    assert simulate(program, COSTS).makespan == pytest.approx(time + scatter + gather)


def test_a_gather_starts_when_its_rank_begins_the_step():
    program = compiled("1f1b", stages=1)
    first, second = unroll(program, COSTS, steps=2)
    for rank in range(4):
        assert second.start[rank][0] == max(first.end[rank])
        assert second.end[rank][0] == second.start[rank][0] + 16


def test_both_halves_take_what_the_whole_takes():
    whole = COSTS.table(compiled("1f1b", stages=1, overlap="grad_reduce", buckets=2))
    halves = COSTS.table(compiled("1f1b", stages=1, buckets=2))
    assert whole.gather == (0,) * 4
    assert halves.gather == (16,) * 4
    assert halves.reduce == ((8, 8),) * 4
    assert whole.reduce == ((16, 16),) * 4


@pytest.mark.parametrize("transport", ["buffered", "rendezvous"])
def test_a_first_forward_waits_whatever_the_transport(transport):
    costs = UniformCosts(grad_reduce=6, transport=transport)
    program = compile_program(schedule="gpipe", pp=1, num_microbatches=2, overlap="zero1")
    timeline = simulate(program, costs)
    assert gathered_stages(program) == {0}
    # Gather 3, two forwards, two backwards, reduce-scatter 3.
    assert timeline.makespan == pytest.approx(3 + 2 + 4 + 3)
