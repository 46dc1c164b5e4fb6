import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.compiler import compile_plan, compile_short
from strategies.errors import PlanError, ProgramError
from strategies.ir import verify
from strategies.ir.instruction import Kind
from strategies.ir.placement import bidirectional
from strategies.passes.gather_weights import add_gathers
from strategies.plan import Plan
from tests.strategies.programs import ALL_SCHEDULES, lines, texts, written

COMPUTE = written(
    """
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """,
    num_microbatches=2,
    stages_per_rank=2,
)


def test_gathers_stand_first_in_the_order_in_which_stages_are_used():
    assert texts(verify(add_gathers(COMPUTE, (1, 3, 1, 1)))) == lines(
        """
        0GATHER 2GATHER 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1GATHER 3GATHER 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
        """
    )


def test_what_is_not_reduced_is_not_gathered():
    rows = texts(add_gathers(COMPUTE, (0, 0, 2, 0)))
    assert rows[0].startswith("2GATHER 0F0")
    assert rows[1].startswith("1F0")


def test_owners_of_copies_gather_in_one_order():
    text = """
        0F0 1F1 1B1 0B0
        1F0 0F1 0B1 1B0
    """
    compute = written(text, num_microbatches=2, placement=bidirectional(2))
    rows = texts(verify(add_gathers(compute, (1, 1))))
    assert [row[:15] for row in rows] == ["0GATHER 1GATHER"] * 2


def test_owners_that_gather_in_different_orders_are_refused():
    text = """
        0GATHER 1GATHER 0F0 1F1 1B1 0B0
        1GATHER 0GATHER 0F1 1F0 1B0 0B1
    """
    compute = written(text, num_microbatches=2, placement=bidirectional(2))
    with pytest.raises(ProgramError, match="in the same order, but rank 0 runs 0GATHER 1GATHER"):
        verify(compute)


def test_the_first_forward_of_a_stage_waits_for_its_gather_and_no_other_does():
    graph = add_gathers(COMPUTE, (1,) * 4).graph
    for node, item in enumerate(graph.nodes):
        gathers = [graph.nodes[need] for need in graph.needs[node]]
        kinds = [need.kind for need in gathers]
        first = item.kind is Kind.F and item.microbatch == 0
        assert kinds.count(Kind.GATHER) == first
        if first:
            assert Kind.GATHER in kinds
            assert all(need.stage == item.stage for need in gathers if need.kind is Kind.GATHER)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(ALL_SCHEDULES), st.sampled_from((2, 4)), st.sampled_from((4, 8)))
def test_every_schedule_verifies_with_sharded_weights(schedule, pp, microbatches):
    plan = Plan(schedule, pp, microbatches, overlap="zero1", buckets=2)
    try:
        programs = compile_plan(plan)
    except PlanError:  # The schedule has another rule for the numbers.
        return
    for program in (programs.train, programs.accumulate, compile_short(plan, 3).train):
        for rank, row in enumerate(program.ranks):
            stages = program.placement.stages_of(rank)
            ahead = row[: len(stages)]
            assert {item.stage for item in ahead} == set(stages)
            assert all(item.kind is Kind.GATHER for item in ahead)
            assert not any(item.kind is Kind.GATHER for item in row[len(stages) :])
    assert not any(i.kind is Kind.GATHER for row in programs.forward.ranks for i in row)
