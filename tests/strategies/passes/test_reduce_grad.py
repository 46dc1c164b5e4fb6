from strategies.ir import Program, verify
from strategies.ir.placement import bidirectional
from strategies.passes.reduce_grad import add_grad_reduce, add_steps
from tests.strategies.programs import lines, texts, written

COMPUTE = written(
    """
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """,
    num_microbatches=2,
    stages_per_rank=2,
)


def changed(program: Program, buckets, overlap):
    result = verify(add_grad_reduce(program, buckets, overlap=overlap))
    assert result is not program
    return texts(result)


def test_overlapped_reductions_stand_behind_their_stages_last_gradient():
    assert changed(COMPUTE, (1, 1, 1, 1), overlap=True) == lines(
        """
        0F0 0F1 2F0 2F1 2B0 2B1 2REDUCE0 0B0 0B1 0REDUCE0
        1F0 1F1 3F0 3B0 3F1 3B1 3REDUCE0 1B0 1B1 1REDUCE0
        """
    )


def test_reductions_without_overlap_wait_for_the_ranks_last_gradient():
    assert changed(COMPUTE, (1, 1, 1, 1), overlap=False) == lines(
        """
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 2REDUCE0@0B1 0REDUCE0@0B1
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 3REDUCE0@1B1 1REDUCE0@1B1
        """
    )


def test_each_stage_has_its_own_number_of_buckets():
    assert changed(COMPUTE, (2, 0, 1, 3), overlap=True) == lines(
        """
        0F0 0F1 2F0 2F1 2B0 2B1 2REDUCE0 0B0 0B1 0REDUCE0 0REDUCE1
        1F0 1F1 3F0 3B0 3F1 3B1 3REDUCE0 3REDUCE1 3REDUCE2 1B0 1B1
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
        0F0 1F1 1B1 1REDUCE0 0B0 0F2 0B2 0REDUCE0
        1F0 1B0 0F1 0B1 1F2 1B2 1REDUCE0 0REDUCE0@1B2
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
    reduced = verify(add_grad_reduce(program, (1, 1), overlap=True))
    assert texts(verify(add_steps(reduced))) == lines(
        """
        1REDUCE0 0F0 0B0 0REDUCE0 1STEP 0STEP
        1F0 1B0 1REDUCE0 0REDUCE0@1B0 0STEP 1STEP
        """
    )


def test_no_bucket_anywhere_leaves_the_lists_as_they_are():
    for overlap in (True, False):
        assert changed(COMPUTE, (0, 0, 0, 0), overlap) == texts(COMPUTE)


def test_a_split_backward_is_reduced_behind_its_weight_gradient():
    split = written("0F0 0F1 0I0 0I1 0W1 0W0", num_microbatches=2)
    assert changed(split, (1,), overlap=True) == ["0F0 0F1 0I0 0I1 0W1 0W0 0REDUCE0"]
    assert changed(split, (1,), overlap=False) == ["0F0 0F1 0I0 0I1 0W1 0W0 0REDUCE0@0W0"]


def test_an_edge_names_the_last_gradient_without_its_own_edges():
    """Text could not tell whose the edges of an edge are."""
    program = written("0F0 0F1 0B0 0B1@0F0+0F1", num_microbatches=2)
    assert changed(program, (1,), overlap=False) == ["0F0 0F1 0B0 0B1@0F0+0F1 0REDUCE0@0B1"]


def test_steps_stand_last_in_the_order_in_which_gradients_get_ready():
    assert texts(verify(add_steps(COMPUTE))) == lines(
        """
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 2STEP 0STEP
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 3STEP 1STEP
        """
    )


def test_steps_stand_behind_held_reductions():
    reduced = add_grad_reduce(COMPUTE, (1, 1, 1, 1), overlap=False)
    assert texts(verify(add_steps(reduced)))[0].endswith(
        "0B1 2REDUCE0@0B1 0REDUCE0@0B1 2STEP 0STEP"
    )


def test_both_copies_of_a_stage_are_reduced_and_stepped():
    from strategies.ir.placement import bidirectional

    program = written(
        """
        0F0 1F1 1B1 0B0
        0F1 1F0 1B0 0B1
        """,
        num_microbatches=2,
        placement=bidirectional(2),
    )
    both = verify(add_steps(add_grad_reduce(program, (1, 1), overlap=False)))
    assert texts(both) == lines(
        """
        0F0 1F1 1B1 0B0 1REDUCE0@0B0 0REDUCE0@0B0 1STEP 0STEP
        0F1 1F0 1B0 0B1 1REDUCE0@0B1 0REDUCE0@0B1 1STEP 0STEP
        """
    )
