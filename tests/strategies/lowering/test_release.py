import pytest
from hypothesis import given

from strategies import compile_program
from strategies.compiler import compile_plan
from strategies.ir import Kind, Program, verify
from strategies.lowering.release import release_points
from tests.strategies.programs import plans, written


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
    for program in (programs.train, programs.accumulate, programs.forward):
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
