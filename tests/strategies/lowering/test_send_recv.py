from __future__ import annotations

import pytest
from hypothesis import given

from strategies import compile_program
from strategies.compiler import compile_compute, compile_plan
from strategies.ir import Kind, Program, verify
from strategies.ir.program import Boundary, bidirectional, loop, v
from strategies.ir.text import format_instruction, parse_instruction
from strategies.lowering.send_recv import add_messages, localize_edges, release_points
from strategies.passes.updates import accumulate_only, add_updates, forward_only
from tests.strategies.programs import lines, plans, texts, written


def lowered(text, **options):
    """Lowered as what it is: accumulation, so that no optimizer step is asked for."""
    options.setdefault("role", "accumulate")
    return texts(verify(add_messages(verify(written(text, **options)))))


def test_a_message_leaves_behind_its_producer():
    text = """
        0F0 0B0
        1F0 1B0
    """
    assert lowered(text, num_microbatches=1) == lines(
        """
        0F0 0SEND_F0>1 0RECV_B0<1 0B0
        1RECV_F0<0 1F0 1B0 1SEND_B0>0
        """
    )


def test_receives_stand_where_the_producer_ends_not_where_the_value_is_used():
    text = """
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
    """
    assert lowered(text, num_microbatches=2) == lines(
        """
        0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1
        1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0
        """
    )


def test_stages_that_meet_on_a_rank_exchange_no_message():
    text = """
        0F0 3F0 3B0 0B0
        1F0 2F0 2B0 1B0
    """
    assert lowered(text, num_microbatches=1, placement=v(2)) == lines(
        """
        0F0 0SEND_F0>1 3RECV_F0<2 3F0 3B0 3SEND_B0>2 0RECV_B0<1 0B0
        1RECV_F0<0 1F0 2F0 2SEND_F0>3 2RECV_B0<3 2B0 1B0 1SEND_B0>0
        """
    )


def test_one_rank_needs_no_message():
    text = "0F0 1F0 1B0 0B0"
    assert lowered(text, num_microbatches=1, stages_per_rank=2) == [text]


def test_with_two_ranks_the_next_one_is_also_the_one_before():
    text = """
        0F0 2F0 2B0 0B0
        1F0 3F0 3B0 1B0
    """
    assert lowered(text, num_microbatches=1, stages_per_rank=2) == lines(
        """
        0F0 0SEND_F0>1 2RECV_F0<1 2F0 2SEND_F0>3 2RECV_B0<3 2B0 2SEND_B0>1 0RECV_B0<1 0B0
        1RECV_F0<0 1F0 1SEND_F0>2 3RECV_F0<2 3F0 3B0 3SEND_B0>2 1RECV_B0<2 1B0 1SEND_B0>0
        """
    )


def test_the_input_gradient_is_sent_before_the_weight_gradient_runs():
    text = """
        0F0 0I0 0W0
        1F0 1I0 1W0
    """
    assert lowered(text, num_microbatches=1) == lines(
        """
        0F0 0SEND_F0>1 0RECV_B0<1 0I0 0W0
        1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0
        """
    )


def test_odd_microbatches_of_two_copies_go_the_other_way():
    text = """
        0F0 1F1 1B1 0B0
        0F1 1F0 1B0 0B1
    """
    assert lowered(text, num_microbatches=2, placement=bidirectional(2)) == lines(
        """
        0F0 0SEND_F0>1 1RECV_F1<0 1F1 1B1 0RECV_B0<1 1SEND_B1>0 0B0
        0F1 1RECV_F0<0 0SEND_F1>1 1F0 1B0 1SEND_B0>0 0RECV_B1<1 0B1
        """
    )


def test_a_skip_connection_is_a_message_of_its_own():
    text = """
        0F0 0B0
        1F0 1B0
        2F0 2B0
    """
    boundaries = (Boundary(0, 1), Boundary(1, 2), Boundary(0, 2, ("skip",)))
    assert lowered(text, num_microbatches=1, boundaries=boundaries) == lines(
        """
        0F0 0SEND_F0>1 0SEND_F0>2 0RECV_B0<2 0RECV_B0<1 0B0
        1RECV_F0<0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 1SEND_B0>0
        2RECV_F0<0 2RECV_F0<1 2F0 2B0 2SEND_B0>0 2SEND_B0>1
        """
    )


def test_forwards_alone_send_no_gradients():
    text = """
        0F0 0F1
        1F0 1F1
    """
    assert lowered(text, num_microbatches=2, role="forward") == lines(
        """
        0F0 0SEND_F0>1 0F1 0SEND_F1>1
        1RECV_F0<0 1F0 1RECV_F1<0 1F1
        """
    )


def test_updates_keep_their_places():
    program = written("0F0 0B0\n1F0 1B0", num_microbatches=1)
    train = add_updates(program, (1, 2))
    assert texts(verify(add_messages(verify(train)))) == lines(
        """
        0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE0 0STEP
        1RECV_F0<0 1F0 1B0 1SEND_B0>0 1REDUCE0 1REDUCE1 1STEP
        """
    )


def test_a_program_is_lowered_once():
    with pytest.raises(AssertionError):
        add_messages(add_messages(written("0F0 0B0", num_microbatches=1)))


@given(plans())
def test_every_instruction_keeps_its_place_among_the_others(plan):
    compute = compile_compute(plan)
    stages = compute.placement.num_stages
    buckets = (plan.buckets,) * stages if isinstance(plan.buckets, int) else plan.buckets
    overlap = plan.overlap == "grad_reduce"
    train = add_updates(compute, buckets, overlapped=overlap)
    for program in (train, accumulate_only(train), forward_only(train)):
        result = add_messages(program)
        assert result.compute_rows() == program.ranks
        assert result.lowered
        assert (result.role, result.placement) == (program.role, program.placement)


@given(plans())
def test_every_rank_has_both_ends_of_its_messages_in_one_order_per_pair(plan):
    """What a transport without tags needs: between two ranks, sends and receives pair by order."""
    for program in (compile_plan(plan).train, compile_plan(plan).accumulate):
        rank_of = program.placement.rank_of
        for here, row in enumerate(program.ranks):
            for there in range(len(program.ranks)):
                sent = [
                    (item.payload, item.stage, item.peer, item.microbatch)
                    for item in row
                    if item.kind.value == "SEND" and rank_of(item.peer, item.microbatch) == there
                ]
                received = [
                    (item.payload, item.peer, item.stage, item.microbatch)
                    for item in program.ranks[there]
                    if item.kind.value == "RECV" and rank_of(item.peer, item.microbatch) == here
                ]
                assert sent == received


def released(program: Program, rank: int) -> dict[str, list[str]]:
    """Receive -> sends that its arrival proves ended."""
    row = program.ranks[rank]
    points = sorted(release_points(program, rank).items())
    return {str(row[place]): [str(item) for item in sends] for place, sends in points}


def test_a_gradient_that_comes_back_proves_that_its_activations_arrived():
    program = compile_program(schedule="1f1b", pp=2, num_microbatches=3)
    assert released(program, 0) == {
        "0RECV_B0<1": ["0SEND_F0>1", "0SEND_F1>1"],
        "0RECV_B2<1": ["0SEND_F2>1"],
    }


def test_what_no_later_message_proves_is_in_no_entry():
    program = compile_program(schedule="1f1b", pp=2, num_microbatches=3)
    assert released(program, 1) == {"1RECV_F2<0": ["1SEND_B0>0", "1SEND_B1>0"]}


def test_without_messages_back_nothing_is_proven():
    program = written(
        """
        0F0 0SEND_F0>1 0F1 0SEND_F1>1
        1RECV_F0<0 1F0 1RECV_F1<0 1F1
        """,
        num_microbatches=2,
        role="forward",
        lowered=True,
    )
    assert released(program, 0) == released(program, 1) == {}


def test_a_reply_through_a_third_rank_is_not_looked_for():
    """Rank 0 hears from rank 2 what rank 1 passed on; proofs are read off pairs of ranks."""
    program = written(
        """
        0F0 0SEND_F0>1 3RECV_F0<2 3F0 3SEND_F0>4
        1RECV_F0<0 1F0 1SEND_F0>2 4RECV_F0<3 4F0 4SEND_F0>5
        2RECV_F0<1 2F0 2SEND_F0>3 5RECV_F0<4 5F0
        """,
        num_microbatches=1,
        stages_per_rank=2,
        role="forward",
        lowered=True,
    )
    assert [released(verify(program), rank) for rank in range(3)] == [{}, {}, {}]


def what_must_have_happened(program: Program) -> tuple[list[int], list[int]]:
    """Per instruction, bit sets of instructions that were surely reached: when it was reached, and
    (receives) when its message was there.

    The weakest model of an executor: receives are posted and sends are started in list order, none
    is waited for in the list; only the instruction that uses a message waits for its arrival.
    """
    graph = program.graph
    reached = [0] * len(graph.nodes)
    arrived = [0] * len(graph.nodes)
    starts = set(graph.offsets)
    for node in graph.order:
        before = 0 if node in starts else reached[node - 1]
        for need in graph.needs[node]:
            if graph.nodes[need].kind is Kind.RECV and graph.nodes[node].kind is not Kind.RECV:
                before |= arrived[need]
        reached[node] = before | 1 << node
        if graph.nodes[node].kind is Kind.RECV:
            arrived[node] = reached[node] | reached[graph.partner[node]]
    return reached, arrived


@given(plans())
def test_a_send_is_let_go_only_where_its_receive_was_surely_posted(plan):
    programs = compile_plan(plan)
    for program in programs.all:
        graph = program.graph
        _, arrived = what_must_have_happened(program)
        for rank, row in enumerate(program.ranks):
            let_go = []
            for place, sends in release_points(program, rank).items():
                receive = graph.offsets[rank] + place
                assert row[place].kind is Kind.RECV
                for send in sends:
                    start = graph.offsets[rank] + row.index(send)
                    assert start < receive
                    assert arrived[receive] >> graph.partner[start] & 1
                let_go += sends
            assert len(set(let_go)) == len(let_go)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "foldx_fifo", "foldx_aiao"])
def test_in_a_training_program_every_activation_is_let_go_within_the_step(schedule):
    program = compile_program(schedule=schedule, pp=4, num_microbatches=8)
    for rank, row in enumerate(program.ranks):
        proven = {item for items in release_points(program, rank).values() for item in items}
        assert {i for i in row if i.kind is Kind.SEND and i.payload is Kind.F} <= proven


def seen(text, placement):
    return format_instruction(localize_edges(parse_instruction(text), placement))


def test_a_gradient_from_another_rank_is_known_by_its_receive():
    assert seen("0R3@1B3", loop(2, 1)) == "0R3@0RECV_B3<1"
    assert seen("0R3@1I3", loop(2, 1)) == "0R3@0RECV_B3<1"


def test_one_of_the_same_rank_keeps_its_name():
    assert seen("1R0@2B0", v(2)) == "1R0@2B0"


def test_other_edges_stay():
    assert seen("0R1@1B0", loop(2, 1)) == "0R1@1B0"
    assert seen("0R1", loop(2, 1)) == "0R1"
    assert seen("0REDUCE0@1B0", loop(2, 1)) == "0REDUCE0@1B0"
