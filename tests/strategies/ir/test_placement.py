import pytest

from strategies.ir.program import PLACEMENTS, Placement, bidirectional, loop, v


def test_a_loop_deals_stages_out_like_cards():
    placement = loop(3, 2)
    assert placement.copies == ((0, 1, 2, 0, 1, 2),)
    assert [placement.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert placement.stages_per_rank == placement.stages_per_microbatch == 2


def test_a_v_turns_around_on_the_last_rank():
    placement = v(3)
    assert placement.copies == ((0, 1, 2, 2, 1, 0),)
    assert placement.stages_of(0) == (0, 5)
    assert v(2, 3).copies == ((0, 1, 1, 0, 0, 1),)


def test_two_copies_run_in_opposite_directions():
    placement = bidirectional(4)
    assert placement.weight_copies == 2
    assert placement.num_stages == 4
    assert [placement.rank_of(0, microbatch) for microbatch in range(4)] == [0, 3, 0, 3]
    assert placement.owners(1) == (1, 2)
    assert placement.stages_of(3) == (0, 3)
    assert (placement.stages_per_rank, placement.stages_per_microbatch) == (2, 1)


def test_the_middle_of_an_odd_pipeline_owns_its_stage_twice():
    placement = bidirectional(3)
    assert placement.owners(1) == (1,)
    assert placement.stages_of(1) == (1,)


@pytest.mark.parametrize("placement", [loop(4, 3), v(4, 3), bidirectional(4)])
def test_owners_and_stages_are_two_views_of_one_map(placement: Placement):
    assert placement.name in PLACEMENTS
    for rank in range(placement.num_ranks):
        assert len(placement.stages_of(rank)) == placement.stages_per_rank
        for stage in range(placement.num_stages):
            assert (stage in placement.stages_of(rank)) == (rank in placement.owners(stage))
    for stage in range(placement.num_stages):
        seen = {placement.rank_of(stage, microbatch) for microbatch in range(4)}
        assert seen == set(placement.owners(stage))
