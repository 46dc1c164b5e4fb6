from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.compiler import compile_plan
from strategies.errors import PlanError, ProgramError
from strategies.ir import Program, verify
from strategies.ir.kinds import Kind
from strategies.ir.program import bidirectional
from strategies.passes.updates import add_updates
from strategies.plan import Plan
from tests.strategies.programs import ALL_SCHEDULES, lines, texts, written

FIVE_KINDS = written(
    """
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """,
    num_microbatches=2,
    stages_per_rank=2,
)


def test_gathers_stand_first_in_the_order_in_which_stages_are_used():
    assert texts(verify(add_updates(FIVE_KINDS, (1, 2, 1, 1), gathered=True))) == lines(
        """
        0GATHER 2GATHER 0F0 0F1 2F0 2F1 2B0 2B1 2REDUCE0 0B0 0B1 0REDUCE0 2STEP 0STEP
        1GATHER 3GATHER 1F0 1F1 3F0 3B0 3F1 3B1 3REDUCE0 1B0 1B1 1REDUCE0 1REDUCE1 3STEP 1STEP
        """
    )


def test_what_is_not_reduced_is_not_gathered():
    rows = texts(add_updates(FIVE_KINDS, (0, 0, 2, 0), gathered=True))
    assert rows[0].startswith("2GATHER 0F0")
    assert rows[1].startswith("1F0")


def test_owners_of_copies_gather_in_one_order():
    text = """
        0F0 1F1 1B1 0B0
        1F0 0F1 0B1 1B0
    """
    compute = written(text, num_microbatches=2, placement=bidirectional(2))
    rows = texts(verify(add_updates(compute, (1, 1), gathered=True)))
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
    graph = add_updates(FIVE_KINDS, (1,) * 4, gathered=True).graph
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
    for program in (programs.train, programs.accumulate, compile_plan(plan, 3).train):
        for rank, row in enumerate(program.ranks):
            stages = program.placement.stages_of(rank)
            ahead = row[: len(stages)]
            assert {item.stage for item in ahead} == set(stages)
            assert all(item.kind is Kind.GATHER for item in ahead)
            assert not any(item.kind is Kind.GATHER for item in row[len(stages) :])
    assert not any(i.kind is Kind.GATHER for row in programs.forward.ranks for i in row)


COMPUTE = written(
    """
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """,
    num_microbatches=2,
    stages_per_rank=2,
)


def changed(program: Program, buckets, overlap):
    result = verify(add_updates(program, buckets, overlapped=overlap))
    assert result is not program
    return texts(result)


def test_overlapped_reductions_stand_behind_their_stages_last_gradient():
    assert changed(COMPUTE, (1, 1, 1, 1), overlap=True) == lines(
        """
        0F0 0F1 2F0 2F1 2B0 2B1 2REDUCE0 0B0 0B1 0REDUCE0 2STEP 0STEP
        1F0 1F1 3F0 3B0 3F1 3B1 3REDUCE0 1B0 1B1 1REDUCE0 3STEP 1STEP
        """
    )


def test_reductions_without_overlap_wait_for_the_ranks_last_gradient():
    assert changed(COMPUTE, (1, 1, 1, 1), overlap=False) == lines(
        """
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 2REDUCE0@0B1 0REDUCE0@0B1 2STEP 0STEP
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 3REDUCE0@1B1 1REDUCE0@1B1 3STEP 1STEP
        """
    )


def test_each_stage_has_its_own_number_of_buckets():
    assert changed(COMPUTE, (2, 0, 1, 3), overlap=True) == lines(
        """
        0F0 0F1 2F0 2F1 2B0 2B1 2REDUCE0 0B0 0B1 0REDUCE0 0REDUCE1 2STEP 0STEP
        1F0 1F1 3F0 3B0 3F1 3B1 3REDUCE0 3REDUCE1 3REDUCE2 1B0 1B1 3STEP 1STEP
        """
    )


def test_owners_of_two_copies_reduce_in_the_order_of_the_later_one():
    program = written(
        """
        0F0 1F1 1B1 0B0 0F2 0B2
        1F0 1B0 0F1 0B1 1F2 1B2
        """,
        num_microbatches=3,
        placement=bidirectional(2),
    )
    # Rank 1 has its share of stage 0 early, but stage 1 is complete on both owners before stage 0.
    assert changed(program, (1, 1), overlap=True) == lines(
        """
        0F0 1F1 1B1 1REDUCE0 0B0 0F2 0B2 0REDUCE0 1STEP 0STEP
        1F0 1B0 0F1 0B1 1F2 1B2 1REDUCE0 0REDUCE0@1B2 0STEP 1STEP
        """
    )


def test_a_copy_that_ran_nothing_reduces_and_steps_with_the_other():
    program = written(
        """
        0F0 0B0
        1F0 1B0
        """,
        num_microbatches=1,
        placement=bidirectional(2),
    )
    assert texts(verify(add_updates(program, (1, 1)))) == lines(
        """
        1REDUCE0 0F0 0B0 0REDUCE0 1STEP 0STEP
        1F0 1B0 1REDUCE0 0REDUCE0@1B0 0STEP 1STEP
        """
    )


def test_no_bucket_anywhere_is_no_reduction():
    for overlap in (True, False):
        steps = [" 2STEP 0STEP", " 3STEP 1STEP"]
        wanted = [row + more for row, more in zip(texts(COMPUTE), steps, strict=True)]
        assert changed(COMPUTE, (0, 0, 0, 0), overlap) == changed(COMPUTE, (), overlap) == wanted


def test_a_split_backward_is_reduced_behind_its_weight_gradient():
    split = written("0F0 0F1 0I0 0I1 0W1 0W0", num_microbatches=2)
    assert changed(split, (1,), overlap=True) == ["0F0 0F1 0I0 0I1 0W1 0W0 0REDUCE0 0STEP"]
    late = "0F0 0F1 0I0 0I1 0W1 0W0 0REDUCE0@0W0 0STEP"
    assert changed(split, (1,), overlap=False) == [late]


def test_an_edge_names_the_last_gradient_without_its_own_edges():
    """Text could not tell whose the edges of an edge are."""
    program = written("0F0 0F1 0B0 0B1@0F0+0F1", num_microbatches=2)
    wanted = "0F0 0F1 0B0 0B1@0F0+0F1 0REDUCE0@0B1 0STEP"
    assert changed(program, (1,), overlap=False) == [wanted]


def test_steps_stand_last_in_the_order_in_which_gradients_get_ready():
    assert texts(verify(add_updates(COMPUTE))) == lines(
        """
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 2STEP 0STEP
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 3STEP 1STEP
        """
    )


def test_both_copies_of_a_stage_are_reduced_and_stepped():
    from strategies.ir.program import bidirectional

    program = written(
        """
        0F0 1F1 1B1 0B0
        0F1 1F0 1B0 0B1
        """,
        num_microbatches=2,
        placement=bidirectional(2),
    )
    both = verify(add_updates(program, (1, 1), overlapped=False))
    assert texts(both) == lines(
        """
        0F0 1F1 1B1 0B0 1REDUCE0@0B0 0REDUCE0@0B0 1STEP 0STEP
        0F1 1F0 1B0 0B1 1REDUCE0@0B1 0REDUCE0@0B1 1STEP 0STEP
        """
    )
