import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.ir.kinds import Kind
from strategies.ir.program import Placement, Program, bidirectional, chain, loop, v
from strategies.ir.verify import verify
from strategies.lowering.send_recv import add_messages
from strategies.passes.updates import add_updates
from strategies.schedules.schedule import Durations
from strategies.schedules.search.best_order import NEVER, equal_durations
from strategies.schedules.search.greedy import Policy, Priorities, generate
from strategies.schedules.search.lanes import lanes_of
from tests.strategies.schedules.timed_orders import uneven_durations

PLACEMENTS = st.one_of(
    st.builds(loop, st.integers(1, 6), st.integers(1, 3)),
    st.builds(v, st.integers(1, 6), st.integers(1, 4)),
    st.builds(bidirectional, st.sampled_from([2, 4, 6])),
)


def in_turn(placement: Placement, num_microbatches: int) -> Priorities:
    """Microbatch after microbatch, each forwards and then backwards."""
    lanes = lanes_of(placement, num_microbatches)
    span = 2 * placement.num_stages

    def times(place):
        return tuple(
            tuple(span * index + place(lanes.stage[lane]) for index in range(size))
            for lane, size in enumerate(lanes.size)
        )

    return Priorities(times(lambda stage: stage), times(lambda stage: span - 1 - stage))


def most_held(program: Program) -> list[int]:
    """Per rank, the most (stage, microbatch) pairs between F and W."""
    most = []
    for row in program.ranks:
        held = [0]
        for item in row:
            held.append(held[-1] + (item.kind is Kind.F) - (item.kind is Kind.W))
        most.append(max(held))
    return most


def text(rows):
    return [" ".join(map(str, row)) for row in rows]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), placement=PLACEMENTS, microbatches=st.integers(1, 9))
def test_whatever_the_guide_asks_for_nothing_deadlocks_and_no_rank_holds_more_than_its_cap(
    data, placement, microbatches
):
    durations = data.draw(uneven_durations(placement.num_stages))
    lanes = lanes_of(placement, microbatches)
    least = [len(own) for own in lanes.of_rank]
    caps = tuple(count + data.draw(st.integers(0, 4)) for count in least)
    random = data.draw(st.randoms(use_true_random=False))

    def wishes():
        return tuple(
            tuple(sorted(random.uniform(0, 50) for _ in range(size))) for size in lanes.size
        )

    policy = Policy(
        Priorities(wishes(), wishes()),
        spare=data.draw(st.sampled_from([0, 1, 3, NEVER])),
        patience=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
    )
    rows = generate(placement, microbatches, durations, caps=caps, policy=policy)
    compute = Program("greedy", placement, microbatches, rows, chain(placement.num_stages))
    program = verify(add_messages(verify(add_updates(verify(compute)))))
    assert all(held <= cap for held, cap in zip(most_held(compute), caps, strict=True))
    assert program.lowered
    assert rows == generate(placement, microbatches, durations, caps=caps, policy=policy)


def test_a_rank_that_would_wait_runs_forwards_first_and_weight_gradients_last():
    placement = loop(2, 1)
    policy = Policy(in_turn(placement, 3))
    rows = generate(placement, 3, equal_durations(placement), caps=(3, 3), policy=policy)
    assert text(rows) == [
        "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2",
    ]


def test_a_full_rank_frees_memory_before_the_forward_that_is_next():
    placement = loop(2, 1)
    policy = Policy(in_turn(placement, 3))
    rows = generate(placement, 3, equal_durations(placement), caps=(1, 2), policy=policy)
    assert text(rows) == [
        "0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2",
        "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2",
    ]


def test_forwards_that_must_leave_room_do_not_fill_idle_time():
    placement = loop(2, 1)
    policy = Policy(in_turn(placement, 3), spare=2)
    rows = generate(placement, 3, equal_durations(placement), caps=(3, 3), policy=policy)
    assert text(rows)[0] == "0F0 0I0 0F1 0W0 0I1 0F2 0W1 0I2 0W2"


@pytest.mark.parametrize(
    ("patience", "expected"),
    [
        (0.0, "0F0 0F1 0I0 0I1 0W0 0W1"),
        (0.9, "0F0 0F1 0I0 0W0 0I1 0W1"),
    ],
)
def test_patience_says_how_much_a_weight_gradient_may_delay_what_is_next(patience, expected):
    placement = loop(2, 1)
    # 1I1 ends a quarter of a W after 0I0, and has begun before that.
    durations = Durations((1.0, 0.5), (1.0, 0.75), (1.0, 1.0))
    rows = generate(
        placement,
        2,
        durations,
        caps=(2, 2),
        policy=Policy(in_turn(placement, 2), patience=patience),
    )
    assert text(rows)[0] == expected


def test_a_cap_below_one_pair_per_stage_is_not_accepted():
    placement = v(2)
    policy = Policy(in_turn(placement, 1))
    with pytest.raises(AssertionError):
        generate(placement, 1, equal_durations(placement), caps=(1, 1), policy=policy)
