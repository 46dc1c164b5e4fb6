from dataclasses import replace

import pytest
from hypothesis import given

from launcher.config import from_dict
from launcher.resolve import resolve
from strategies.compiler import compile_plan
from strategies.errors import ProgramError
from strategies.ir import Kind, parse_instruction
from strategies.ir.graph import _walk
from strategies.ir.program import bidirectional
from tests.strategies.programs import plans, written


def needs(program, rank, text):
    """Names of what one instruction needs, as rank:name."""
    graph = program.graph
    place = program.ranks[rank].index(parse_instruction(text))
    found = graph.needs[graph.offsets[rank] + place]
    return sorted(f"{graph.rank[need]}:{graph.nodes[need]}" for need in found)


LOWERED = written(
    """
    0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE0 0STEP
    1RECV_F0<0 1F0 1R0@1F0 1I0 1SEND_B0>0 1W0 1REDUCE0 1REDUCE1 1STEP
    """,
    num_microbatches=1,
    lowered=True,
)


@pytest.mark.parametrize(
    ("rank", "text", "expected"),
    [
        (0, "0F0", []),
        (0, "0SEND_F0>1", ["0:0F0"]),
        (1, "1RECV_F0<0", ["0:0SEND_F0>1"]),
        (1, "1F0", ["1:1RECV_F0<0"]),
        (1, "1R0@1F0", ["1:1F0", "1:1F0"]),
        (1, "1I0", ["1:1R0@1F0"]),
        (1, "1SEND_B0>0", ["1:1I0"]),
        (1, "1W0", ["1:1I0"]),
        (0, "0B0", ["0:0F0", "0:0RECV_B0<1"]),
        (0, "0REDUCE0", ["0:0B0"]),
        (1, "1REDUCE1", ["1:1W0"]),
        (1, "1STEP", ["1:1REDUCE0", "1:1REDUCE1"]),
    ],
)
def test_each_kind_needs_what_it_uses(rank, text, expected):
    assert needs(LOWERED, rank, text) == expected


def test_without_messages_values_come_straight_from_their_producer():
    program = written("0F0 0B0\n1F0 1I0 1W0", num_microbatches=1)
    assert needs(program, 1, "1F0") == ["0:0F0"]
    assert needs(program, 0, "0B0") == ["0:0F0", "1:1I0"]


def test_without_reductions_a_step_needs_the_gradients():
    program = written("0F0 0F1 0I0 0W0 0B1 0STEP", num_microbatches=2)
    assert needs(program, 0, "0STEP") == ["0:0B1", "0:0W0"]


def test_both_ends_of_a_message_know_each_other():
    graph = LOWERED.graph
    pairs = {
        (str(graph.nodes[node]), str(graph.nodes[other]))
        for node, other in enumerate(graph.partner)
        if other >= 0
    }
    assert pairs == {
        ("0SEND_F0>1", "1RECV_F0<0"),
        ("1RECV_F0<0", "0SEND_F0>1"),
        ("1SEND_B0>0", "0RECV_B0<1"),
        ("0RECV_B0<1", "1SEND_B0>0"),
    }


def test_an_edge_to_a_reduction_means_that_of_the_same_rank():
    program = written(
        """
        0F0 0B0 0REDUCE0 1REDUCE0 0STEP@1REDUCE0 1STEP
        1F0 1B0 0REDUCE0 1REDUCE0 0STEP@1REDUCE0 1STEP
        """,
        num_microbatches=1,
        placement=bidirectional(2),
    )
    assert needs(program, 0, "0STEP@1REDUCE0") == ["0:0REDUCE0", "0:1REDUCE0"]
    assert needs(program, 1, "0STEP@1REDUCE0") == ["1:0REDUCE0", "1:1REDUCE0"]


def test_an_edge_finds_a_reduction_that_has_edges_itself():
    program = written("0F0 0B0 0REDUCE0@0B0 0STEP@0REDUCE0", num_microbatches=1)
    assert needs(program, 0, "0STEP@0REDUCE0") == ["0:0REDUCE0@0B0", "0:0REDUCE0@0B0"]


@pytest.mark.parametrize("edge", ["0F1", "0REDUCE1", "0SEND_F0>1", "1STEP"])
def test_an_edge_to_nothing_is_named(edge):
    program = written(f"0F0 0B0@{edge} 0REDUCE0 0STEP", num_microbatches=1)
    with pytest.raises(ProgramError) as error:
        _ = program.graph
    assert str(error.value) == f"written: 0B0@{edge} needs {edge}, which no rank runs."


def test_a_receive_waits_for_its_own_edges_too():
    text = """
        0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1
        1RECV_F0<0 1F0 1RECV_F1<0@0RECV_B0<1 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0
    """
    program = written(text, num_microbatches=2, role="accumulate", lowered=True)
    with pytest.raises(ProgramError, match=r"\[1RECV_F1<0@0RECV_B0<1\]"):
        _ = program.graph
    late = text.replace("0F1 0SEND_F1>1 0RECV_B0<1 0B0", "0RECV_B0<1 0B0 0F1 0SEND_F1>1")
    late = late.replace("1RECV_F1<0@0RECV_B0<1 1B0 1SEND_B0>0", "1B0 1SEND_B0>0 1RECV_F1<0@0B0")
    order = written(late, num_microbatches=2, role="accumulate", lowered=True).graph
    names = [str(order.nodes[node]) for node in order.order]
    assert names.index("0B0") < names.index("1RECV_F1<0@0B0")


def test_a_missing_input_is_named():
    program = written("1F0 1B0\n0F0 0B0", num_microbatches=1, stages_per_rank=1)
    alone = program.with_ranks((program.ranks[0], ()))
    with pytest.raises(ProgramError) as error:
        _ = alone.graph
    assert str(error.value) == (
        "written: no rank runs 0F0, and num_microbatches=1 go through every "
        "stage. Write 0F0, and 0B0, or 0I0 and 0W0."
    )


@given(plans())
def test_the_order_respects_lists_needs_and_rendezvous(plan):
    for program in (compile_plan(plan).train, compile_plan(plan).forward):
        graph = program.graph
        assert sorted(graph.order) == list(range(len(graph.nodes)))
        position = {node: place for place, node in enumerate(graph.order)}
        for first in range(len(graph.nodes) - 1):
            if graph.rank[first] == graph.rank[first + 1]:
                assert position[first] < position[first + 1]
        for node, found in enumerate(graph.needs):
            assert all(position[need] < position[node] for need in found)
            if graph.nodes[node].kind is Kind.RECV:
                assert position[node] == position[graph.partner[node]] + 1


class _Counted(tuple):
    reads = 0

    def __getitem__(self, index):
        _Counted.reads += 1
        return super().__getitem__(index)


def test_a_walk_takes_as_long_as_the_program_is():
    asked = {"mode": "simulate", "pp": 4, "num_microbatches": 400}
    program = resolve(from_dict(asked)).programs.train
    graph = program.graph
    assert _walk(program, replace(graph, needs=_Counted(graph.needs))) == graph.order
    assert _Counted.reads < 10 * len(graph.nodes)
