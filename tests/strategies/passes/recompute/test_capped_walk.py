import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.ir.program import bidirectional, loop, v
from strategies.passes.recompute.capped_walk import Pace, R, Work, best_orders, capped_order
from strategies.passes.recompute.critical_moves import improve
from strategies.schedules.search.lanes import F, I, W, lanes_of


def work(placement, microbatches, room, *, split=False, hop=0.0):
    lanes = lanes_of(placement, microbatches)
    count = len(lanes.rank)
    took = (1.0, 1.0, 1.0, 1.0) if split else (1.0, 2.0, 0.0, 1.0)
    return Work(
        lanes=lanes,
        took=tuple((value,) * count for value in took),
        hop=(hop,) * count,
        turn=tuple(tuple(map(float, range(size))) for size in lanes.size),
        room=(room,) * placement.num_ranks,
        split=split,
    )


def most_held(work, order, rank):
    held = most = 0
    again = {step[1:] for step in order.steps[rank] if step[0] == R}
    for kind, lane, index in order.steps[rank]:
        held += kind == R or (kind == F and (lane, index) not in again)
        most = max(most, held)
        held -= kind == (W if work.split else I)
    assert held == 0
    return most


def test_one_activation_is_kept_by_the_first_and_the_others_are_recomputed():
    given_work = work(loop(2, 1), 3, 1)
    order = capped_order(given_work, (Pace(0, 3, 1),) * 2)
    first = [(kind, index) for kind, _, index in order.steps[0]]
    assert first == [(F, 0), (F, 1), (F, 2), (I, 0), (R, 1), (I, 1), (R, 2), (I, 2)]


@given(st.data())
def test_every_pace_ends_within_its_room(data):
    placement = data.draw(
        st.sampled_from(
            [
                loop(1, 1),
                loop(3, 1),
                loop(2, 2),
                loop(2, 3),
                v(2),
                v(3),
                v(2, 4),
                bidirectional(2),
                bidirectional(4),
            ]
        )
    )
    microbatches = data.draw(st.integers(placement.weight_copies, 7))
    room = data.draw(st.integers(1, 6))
    split = data.draw(st.booleans())
    given_work = work(
        placement, microbatches, room, split=split, hop=data.draw(st.sampled_from((0.0, 0.7)))
    )
    paces = []
    for _ in range(placement.num_ranks):
        high = data.draw(st.integers(1, microbatches))
        paces.append(
            Pace(
                data.draw(st.integers(0, high - 1)),
                high,
                data.draw(st.integers(0, room)),
                data.draw(st.integers(0, 2)),
                data.draw(st.integers(0, 2)),
            )
        )
    order = capped_order(given_work, tuple(paces))
    for rank in range(placement.num_ranks):
        assert most_held(given_work, order, rank) <= room
        steps = [step for step in order.steps[rank] if step[0] != R]
        kinds = (F, I, W) if split else (F, I)
        own = given_work.lanes.of_rank[rank]
        assert sorted(steps) == sorted(
            (kind, lane, index)
            for kind in kinds
            for lane in own
            for index in range(given_work.lanes.size[lane])
        )


@pytest.mark.parametrize("placement", [loop(1, 2), loop(1, 3), v(1), v(1, 4)], ids=str)
@pytest.mark.parametrize("room", [1, 2])
def test_a_rank_that_has_all_stages_finds_an_order(placement, room):
    given_work = work(placement, 2, room)
    for order in best_orders(given_work, goal=0.0, share=1.0, wanted=3):
        assert most_held(given_work, order, 0) <= room


@pytest.mark.parametrize("goal", [0.0, 21.0])
def test_a_search_is_never_slower_than_its_first_pace_and_always_the_same(goal):
    given_work = work(loop(4, 1), 4, 1)
    orders = best_orders(given_work, goal=goal, share=1.0, wanted=3)
    assert orders == best_orders(given_work, goal=goal, share=1.0, wanted=3)
    assert orders[0].makespan == 21.0


def test_small_moves_leave_long_programs_and_fused_pairs_alone():
    from strategies import UniformCosts
    from strategies.compiler import compile_compute
    from strategies.plan import Plan

    costs = UniformCosts()
    for plan in (Plan("1f1b", 16, 64), Plan("dualpipe", 4, 8, costs=UniformCosts(fused=2))):
        program = compile_compute(plan)
        table = costs.table(program)
        assert improve(program, table, (100,) * plan.pp, goal=0.0) is program
