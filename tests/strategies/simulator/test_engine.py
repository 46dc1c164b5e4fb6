"""Small cases worked out by hand, and laws that hold for all programs."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.report.ascii import draw
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.bounds import lower_bound
from strategies.compiler import Plan, compile_compute, compile_plan
from strategies.errors import CostError, ProgramError
from strategies.ir import Kind, verify
from strategies.simulator.engine import unroll
from tests.strategies.programs import lines, plans, uneven, written

TWO = written(
    """
    0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0STEP
    1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1STEP
    """,
    num_microbatches=2,
    lowered=True,
)


def spans(timeline, rank=None):
    """Name -> (start, end)."""
    ranks = range(len(timeline.program.ranks)) if rank is None else (rank,)
    return {
        str(event.instruction): (event.start, event.end)
        for each in ranks
        for event in timeline.events(each)
    }


def compiled(schedule, pp, num_microbatches, **options):
    return compile_program(schedule=schedule, pp=pp, num_microbatches=num_microbatches, **options)


def test_free_messages():
    assert verify(TWO)
    timeline = simulate(TWO, UniformCosts())
    assert spans(timeline) == {
        "0F0": (0, 1),
        "0SEND_F0>1": (1, 1),
        "1RECV_F0<0": (1, 1),
        "0F1": (1, 2),
        "0SEND_F1>1": (2, 2),
        "1RECV_F1<0": (2, 2),
        "1F0": (1, 2),
        "1B0": (2, 4),
        "1SEND_B0>0": (4, 4),
        "0RECV_B0<1": (4, 4),
        "0B0": (4, 6),
        "1F1": (4, 5),
        "1B1": (5, 7),
        "1SEND_B1>0": (7, 7),
        "0RECV_B1<1": (7, 7),
        "0B1": (7, 9),
        "0STEP": (9, 9),
        "1STEP": (7, 7),
    }
    assert (timeline.time_unit, timeline.origin) == ("F", "simulated")


def test_latency_delays_the_receiver_not_the_sender():
    found = spans(simulate(TWO, UniformCosts(p2p=0.5)))
    assert found["0SEND_F0>1"] == found["1RECV_F0<0"] == (1, 1.5)
    assert found["0F1"] == (1, 2)
    assert found["1F0"] == (1.5, 2.5)
    assert found["1B0"] == (2.5, 4.5)
    assert found["0B0"] == (5, 7)
    assert found["1F1"] == (4.5, 5.5)
    assert found["1B1"] == (5.5, 7.5)
    assert found["0B1"] == (8, 10)


def test_a_message_keeps_its_link_for_its_transfer_and_the_next_one_queues():
    """Transfers of 3 on the way down: the second leaves at 4, when the first one has passed."""
    costs = uneven(TWO, [1, 1], occupancy=3)
    found = spans(simulate(TWO, costs))
    assert found["0SEND_F0>1"] == (1, 4)
    assert found["0SEND_F1>1"] == (4, 7)
    assert found["1F0"] == (4, 5)
    assert found["1B0"] == (5, 7)
    assert found["1SEND_B0>0"] == (7, 10)
    assert found["1F1"] == (7, 8)
    assert found["1B1"] == (8, 10)
    assert found["1SEND_B1>0"] == (10, 13)
    assert found["0B1"] == (13, 15)


def test_the_two_directions_between_two_ranks_are_two_links():
    found = spans(simulate(TWO, uneven(TWO, [1, 1], occupancy=4)))
    assert found["0SEND_F1>1"] == (5, 9)
    assert found["1SEND_B0>0"] == (8, 12)


def test_latency_comes_behind_the_transfer_and_keeps_no_link():
    found = spans(simulate(TWO, uneven(TWO, [1, 1], occupancy=3, latency=2)))
    assert found["0SEND_F0>1"] == (1, 6)
    assert found["0SEND_F1>1"] == (4, 9)


def test_the_links_of_a_step_are_still_busy_in_the_next():
    program = compile_plan(Plan("gpipe", 2, 2)).forward
    first, second = unroll(program, uneven(program, [1, 1], occupancy=3), steps=2)
    assert spans(first)["0SEND_F1>1"] == (4, 7)
    assert spans(second)["0F0"] == (2, 3)
    assert spans(second)["0SEND_F0>1"] == (7, 10)


def test_rendezvous_sends_hold_both_ranks():
    found = spans(simulate(TWO, UniformCosts(transport="rendezvous", p2p=0.5)))
    assert found["0F0"] == (0, 1)
    assert found["0SEND_F0>1"] == found["1RECV_F0<0"] == (1, 1.5)
    assert found["0F1"] == (1.5, 2.5)
    assert found["1F0"] == (1.5, 2.5)
    assert found["0SEND_F1>1"] == found["1RECV_F1<0"] == (2.5, 3)
    assert found["1B0"] == (3, 5)
    assert found["0RECV_B0<1"] == (5, 5.5)
    assert found["0B0"] == (5.5, 7.5)
    assert found["1F1"] == (5.5, 6.5)
    assert found["1B1"] == (6.5, 8.5)
    assert found["0B1"] == (9, 11)


def test_stages_may_cost_different_amounts():
    found = spans(simulate(TWO, uneven(TWO, [1, 3])))
    assert found["1F0"] == (1, 4)
    assert found["1B0"] == (4, 10)
    assert found["0B0"] == (10, 12)
    assert found["1F1"] == (10, 13)
    assert found["1B1"] == (13, 19)
    assert found["0B1"] == (19, 21)


def test_split_backwards_let_the_gradient_go_early():
    program = written(
        """
        0F0 0SEND_F0>1 0RECV_B0<1 0I0 0W0 0STEP
        1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0 1STEP
        """,
        num_microbatches=1,
        lowered=True,
    )
    found = spans(simulate(verify(program), UniformCosts(backward=3, backward_input=1)))
    assert found["1I0"] == (2, 3)
    assert found["1W0"] == (3, 5)
    assert found["0I0"] == (3, 4)
    assert found["0W0"] == (4, 6)


def test_a_recompute_takes_time_and_waits_for_its_edges():
    text = """
        0F0 0SEND_F0>1 0R0 0RECV_B0<1 0B0 0STEP
        1RECV_F0<0 1F0 1B0 1SEND_B0>0 1STEP
    """
    early = written(text, num_microbatches=1, lowered=True)
    assert spans(simulate(verify(early), UniformCosts(recompute=1.5)))["0R0"] == (1, 2.5)
    late = written(
        text.replace("0R0 0RECV_B0<1", "0RECV_B0<1 0R0@0RECV_B0<1"),
        num_microbatches=1,
        lowered=True,
    )
    found = spans(simulate(verify(late), UniformCosts(recompute=1.5)))
    assert found["0R0@0RECV_B0<1"] == (4, 5.5)
    assert found["0B0"] == (5.5, 7.5)


def test_buckets_are_released_inside_the_stages_last_backward():
    """Bucket k of K gets ready when (k+1)/K of it has passed."""
    program = compiled("1f1b", 1, 2, buckets=4)
    found = spans(simulate(program, UniformCosts(backward=4, grad_reduce=2)))
    assert found["0B1"] == (6, 10)
    assert [found[f"0REDUCE{bucket}"] for bucket in range(4)] == [
        (7, 7.5),
        (8, 8.5),
        (9, 9.5),
        (10, 10.5),
    ]
    assert found["0STEP"] == (10.5, 10.5)


def test_buckets_queue_on_the_channel():
    program = compiled("1f1b", 1, 1, buckets=2)
    found = spans(simulate(program, UniformCosts(grad_reduce=6)))
    assert found["0B0"] == (1, 3)
    assert found["0REDUCE0"] == (2, 5)
    assert found["0REDUCE1"] == (5, 8)


def test_a_split_backward_releases_its_buckets_inside_the_weight_gradient():
    program = written("0F0 0I0 0W0 0REDUCE0 0REDUCE1 0STEP", num_microbatches=1, lowered=True)
    found = spans(simulate(program, UniformCosts(backward=4, backward_input=2, grad_reduce=2)))
    assert found["0W0"] == (3, 5)
    assert found["0REDUCE0"] == (4, 5)
    assert found["0REDUCE1"] == (5, 6)


def test_without_overlap_reductions_wait_for_the_ranks_last_backward():
    program = compiled("foldx_aiao", 1, 1, overlap="none")
    found = spans(simulate(program, UniformCosts(grad_reduce=2)))
    assert found["0B0"] == (2, 3)
    assert found["1REDUCE0@0B0"] == (3, 4)
    assert found["0REDUCE0@0B0"] == (4, 5)
    overlapped = spans(simulate(compiled("foldx_aiao", 1, 1), UniformCosts(grad_reduce=2)))
    assert overlapped["1REDUCE0"] == (2, 3)
    assert overlapped["0REDUCE0"] == (3, 4)


def test_each_rank_reduces_on_a_channel_of_its_own():
    timeline = simulate(compiled("1f1b", 2, 1), UniformCosts(grad_reduce=4))
    assert lines(draw(timeline)) == lines(
        """
        rank 0 | 0F0  .   .   .  0B0  -   .   .   .   .
        comm 0 |  .   .   .   .   .   .  0.0  -   -   -
        rank 1 |  .  1F0 1B0  -   .   .   .   .   .   .
        comm 1 |  .   .   .   .  1.0  -   -   -   .   .
        """
    )


def test_an_optimizer_step_takes_the_time_the_table_gives_it():
    program = compiled("1f1b", 2, 1)
    costs = uneven(program, [1, 1], reduce=[(0,), (3,)], step=[0.5, 0.25])
    found = spans(simulate(program, costs))
    assert found["0STEP"] == (6, 6.5)
    assert found["1REDUCE0"] == (4, 7)
    assert found["1STEP"] == (7, 7.25)


def test_a_step_of_one_stage_holds_up_the_steps_behind_it():
    program = compiled("foldx_aiao", 1, 1)
    costs = uneven(program, [1, 1], reduce=[(0,), (9,)], step=[1, 1])
    found = spans(simulate(program, costs))
    assert found["1STEP"] == (13, 14)
    assert found["0STEP"] == (14, 15)


def test_a_second_step_begins_on_each_rank_when_its_own_is_done():
    first, second = unroll(TWO, UniformCosts(), steps=2)
    assert first == simulate(TWO, UniformCosts())
    assert spans(second)["0F0"] == (9, 10)
    # Rank 1 has been done since 7, but what it uses comes from rank 0.
    assert spans(second)["1F0"] == (10, 11)
    assert second.makespan == 9


def test_without_a_barrier_steps_follow_each_other_in_one_period():
    program = compiled("1f1b", 4, 8)
    costs = UniformCosts(grad_reduce=5)
    timelines = unroll(program, costs, steps=5)
    assert timelines[0].makespan == 33 + 5
    ends = [max(max(row) for row in timeline.end) for timeline in timelines]
    gaps = [later - sooner for sooner, later in itertools.pairwise(ends)]
    assert gaps == pytest.approx([timelines[0].period] * 4)


def test_a_reduction_runs_under_the_next_steps_compute_where_nothing_waits_for_it():
    """Without STEP the channel is still busy when the next pass begins."""
    program = written("0F0 0B0 0REDUCE0", num_microbatches=1, lowered=True)
    first, second = unroll(program, UniformCosts(grad_reduce=5), steps=2)
    assert spans(first)["0REDUCE0"] == (3, 8)
    assert spans(second)["0B0"] == (4, 6)
    assert spans(second)["0REDUCE0"] == (8, 13)


def test_a_program_without_messages_is_refused():
    with pytest.raises(ProgramError) as error:
        simulate(compile_compute(Plan("gpipe", 2, 2)), UniformCosts())
    assert str(error.value) == (
        "simulate() needs a lowered program, with messages. compile_program() returns one."
    )


@st.composite
def costs(draw, transport="buffered"):
    quarter = st.integers(1, 12).map(lambda n: n / 4)
    backward = draw(quarter)
    return UniformCosts(
        forward=draw(quarter),
        backward=backward,
        backward_input=draw(st.none() | st.just(backward / 4)),
        grad_reduce=draw(st.sampled_from((0.0, 1.0, 8.0))),
        p2p=draw(st.sampled_from((0.0, 0.25, 1.0))),
        transport=transport,
    )


@given(plans(), costs())
def test_a_simulation_obeys_the_program(plan, cost):
    """Nothing starts before what it needs has ended, and ranks do one thing at a time."""
    program = compile_plan(plan).train
    timeline = simulate(program, cost)
    assert timeline == simulate(program, cost)
    graph = program.graph
    start = [time for row in timeline.start for time in row]
    end = [time for row in timeline.end for time in row]
    for node, item in enumerate(graph.nodes):
        assert start[node] <= end[node]
        inside = item.kind is Kind.REDUCE and not item.after
        for need in graph.needs[node]:
            if item.kind is Kind.RECV:
                assert (start[node], end[node]) == (start[need], end[need])
            else:
                assert start[node] >= (start[need] if inside else end[need])
    for rank in range(len(program.ranks)):
        for kinds in ({Kind.REDUCE}, {Kind.F, Kind.B, Kind.STEP}):
            events = [e for e in timeline.events(rank) if e.instruction.kind in kinds]
            for sooner, later in itertools.pairwise(events):
                assert later.start >= sooner.end


@given(plans(), costs())
def test_no_program_beats_its_lower_bound(plan, cost):
    program = compile_plan(plan).train
    makespan = simulate(program, cost).makespan
    assert makespan >= lower_bound(program, cost.table(program)).value - 1e-9


@given(plans(), costs(transport="rendezvous"))
def test_rendezvous_ends_and_is_never_faster_than_buffered_sends(plan, cost):
    programs = compile_plan(plan)
    for program in programs.all:
        strict = simulate(program, cost)
        buffered = simulate(program, _buffered(cost))
        assert strict.makespan >= buffered.makespan - 1e-9
        pairs = zip(strict.start, buffered.start, strict=True)
        compute = [
            (late, soon, item)
            for (lates, soons), row in zip(pairs, program.ranks, strict=True)
            for late, soon, item in zip(lates, soons, row, strict=True)
        ]
        assert all(late >= soon - 1e-9 for late, soon, _ in compute)


def _buffered(cost):
    return UniformCosts(
        forward=cost.forward,
        backward=cost.backward,
        backward_input=cost.backward_input,
        grad_reduce=cost.grad_reduce,
        p2p=cost.p2p,
    )


@given(plans(), st.integers(2, 4))
def test_durations_only_scale(plan, factor):
    program = compile_plan(plan).train
    once = simulate(program, UniformCosts(grad_reduce=3, p2p=0.5))
    scaled = UniformCosts(
        forward=factor, backward=2 * factor, grad_reduce=3 * factor, p2p=0.5 * factor
    )
    assert simulate(program, scaled).makespan == pytest.approx(factor * once.makespan)


@given(plans())
def test_a_later_start_of_the_reductions_never_helps(plan):
    shape = (plan.schedule, plan.pp, plan.num_microbatches, plan.stages_per_rank, plan.group)
    cost = UniformCosts(grad_reduce=8)
    under = simulate(compile_plan(Plan(*shape, "grad_reduce", 2)).train, cost)
    behind = simulate(compile_plan(Plan(*shape, "none", 2)).train, cost)
    assert under.makespan <= behind.makespan + 1e-9


def test_what_is_no_program_or_has_no_costs_is_refused():
    program = compile_program(pp=2, num_microbatches=2)
    with pytest.raises(CostError, match=r"simulate\(program, \{\}\): expected costs. Try simulate"):
        simulate(program, {})
    with pytest.raises(ProgramError, match=r"simulate\('1f1b', ...\): expected a program. Try"):
        simulate("1f1b", UniformCosts())
    with pytest.raises(CostError, match=r"costs\.forward='1': expected a number"):
        UniformCosts(forward="1")
