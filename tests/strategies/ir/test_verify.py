"""One broken program per rule; the message tells which rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strategies import compile_program
from strategies.analysis.memory import peak_activations
from strategies.ir import Instruction, Kind, verify
from strategies.ir.program import Boundary, bidirectional, recomputed_pairs, v
from tests.strategies.programs import lines, refusal, written

COMPUTE = """
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
"""
LOWERED = """
    0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0REDUCE0 0REDUCE1 0STEP
    1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1REDUCE0 1STEP
"""


def edited(text, *edits):
    """The text with words replaced, all at once; each old word must stand in it exactly once."""
    words = [line.split() for line in lines(text)]
    for old, _ in edits:
        assert sum(row.count(old) for row in words) == 1, old
    new = dict(edits)
    return "\n".join(" ".join(new.get(word, word) for word in row) for row in words)


def compute(*edits, **options):
    return written(edited(COMPUTE, *edits), num_microbatches=2, **options)


def lowered(*edits, **options):
    return written(edited(LOWERED, *edits), num_microbatches=2, lowered=True, **options)


@pytest.mark.parametrize("program", [compute(), lowered()])
def test_a_correct_program_is_returned_as_it_is(program):
    assert verify(program) is program


@pytest.mark.parametrize(
    ("edit", "have"),
    [
        (("1B0", ""), "stage 1, microbatch 0 has F,"),
        (("0F1", ""), "stage 0, microbatch 1 has B,"),
        (("1B0", "1I0"), "stage 1, microbatch 0 has F I,"),
        (("1B0", "1W0"), "stage 1, microbatch 0 has F W,"),
        (("1B0", "1I0 1B0"), "stage 1, microbatch 0 has B F I,"),
        (("1B0", "1I0 1W0 1B0"), "stage 1, microbatch 0 has B F I W,"),
    ],
)
def test_a_microbatch_without_one_whole_gradient_is_refused(edit, have):
    assert refusal(compute(edit)) == (
        f"written: {have} a train program needs F and B, or F, I and W."
    )


def test_a_microbatch_that_nobody_runs_is_refused():
    message = refusal(written("0F0 0B0", num_microbatches=2))
    assert message.startswith("written: stage 0, microbatch 1 has nothing, a train program")


def test_a_gradient_in_a_forward_program_is_refused():
    message = refusal(written("0F0 0B0", num_microbatches=1, role="forward"))
    assert message == "written: stage 0, microbatch 0 has B F, a forward program needs F."


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (("0F0", "0F0 0F0"), "0F0"),
        (("0B1", "0B1 0F0"), "0F0"),
        (("0B1", "0B1 0REDUCE0 0REDUCE0"), "0REDUCE0"),
        (("0B1", "0B1 0STEP 0STEP"), "0STEP"),
    ],
)
def test_an_instruction_that_stands_twice_is_refused(edit, name):
    assert refusal(compute(edit)) == (
        f"written: rank 0 runs {name} 2 times. Every instruction stands once."
    )


def test_a_message_that_stands_twice_is_refused():
    message = refusal(lowered(("0SEND_F0>1", "0SEND_F0>1 0SEND_F0>1")))
    assert message == "written: rank 0 runs 0SEND_F0>1 2 times. Every instruction stands once."


def test_two_spellings_of_one_instruction_count_as_twice():
    message = refusal(compute(("0B1", "0B1 0F0#1@0B0")))
    assert message == "written: rank 0 runs 0F0 2 times. Every instruction stands once."


def test_an_instruction_on_the_wrong_rank_is_refused():
    message = refusal(compute(("0B1", "0B1 1STEP")))
    assert message == (
        "written: 1STEP stands on rank 0, but the loop placement has its stage on ranks (1,)."
    )
    message = refusal(compute(("0B1", "1B1"), ("1B1", "0B1")))
    assert message == (
        "written: 1B1 stands on rank 0, but the loop placement has its stage on rank 1."
    )


def test_a_copys_microbatches_belong_to_its_rank():
    text = """
        0F0 0F1 0B1 0B0
        1F0 1F1 1B1 1B0
    """
    message = refusal(written(text, num_microbatches=2, placement=bidirectional(2)))
    assert message == (
        "written: 0F1 stands on rank 0, but the bidirectional placement has its stage on rank 1."
    )


@pytest.mark.parametrize("rows", ["0F0 0F1 0B0 0B1", COMPUTE + "    2F0 2F1 2B0 2B1"])
def test_a_row_too_few_or_too_many_is_refused(rows):
    program = written(rows, num_microbatches=2, placement=v(2, 1))
    count = len(lines(rows))
    assert refusal(program) == f"written: {count} rows for 2 ranks. Write one row per rank."


def test_a_stage_too_many_is_refused():
    assert refusal(compute(("1B1", "1B1 2F0"))) == (
        "written: 2F0 on rank 1 names stage 2, but there are 2 stages, 0 to 1."
    )


def test_a_microbatch_too_many_is_refused():
    assert refusal(compute(("1B1", "1B1 1F2"))) == (
        "written: 1F2 on rank 1, but there are 2 microbatches, counted from 0."
    )


def with_extra(item):
    program = compute()
    return program.with_ranks((program.ranks[0], (*program.ranks[1], item)))


def test_negative_numbers_do_not_count_from_the_end():
    assert refusal(with_extra(Instruction(Kind.F, -1, 0))) == (
        "written: -1F0 on rank 1 names stage -1, but there are 2 stages, 0 to 1."
    )
    assert refusal(with_extra(Instruction(Kind.F, 1, -1))) == (
        "written: 1F-1 on rank 1, but there are 2 microbatches, counted from 0."
    )


@pytest.mark.parametrize(
    "item",
    [
        Instruction(Kind.F, 1),
        Instruction(Kind.STEP, 1, 0),
        Instruction(Kind.GATHER, 1, bucket=0),
        Instruction(Kind.REDUCE, 1),
        Instruction(Kind.REDUCE, 1, 0, bucket=0),
        Instruction(Kind.F, 1, 0, payload=Kind.F),
        Instruction(Kind.F, 1, 0, peer=0),
        Instruction(Kind.SEND, 1, 0, payload=Kind.B),
        Instruction(Kind.SEND, 1, 0, peer=0),
        Instruction(Kind.SEND, 1, payload=Kind.B, peer=0),
        Instruction(Kind.RECV, 1, 0, payload=Kind.W, peer=0),
    ],
)
def test_fields_that_do_not_belong_to_the_kind_are_refused(item):
    message = refusal(with_extra(item))
    assert message.startswith(f"written: {item!r} on rank 1 is malformed. F B I W R have a")


def test_what_is_used_before_it_is_made_deadlocks():
    message = refusal(compute(("0F0", "0B0"), ("0B0", "0F0")))
    assert message == (
        "written: the program deadlocks. Every rank waits for another one:\n"
        "rank 0 | [0B0] 0F1 0F0 0B1  <-- waits for step 0F0\n"
        "rank 1 | [1F0] 1B0 1F1 1B1  <-- waits for step 0F0"
    )


def test_a_rank_that_has_ended_is_shown_as_ended():
    text = """
        0F0 0F1 0B1 0B0
        1F0 1B0 1F1 1B1@0F0
        2F0 2F1 2B0 2B1
    """
    boundaries = (Boundary(0, 1),)
    assert verify(written(text, num_microbatches=2, boundaries=boundaries))
    stuck = text.replace("0B1 0B0", "0B0@1B1 0B1").replace("1F1 1B1@0F0", "1F1@0B1 1B1")
    message = refusal(written(stuck, num_microbatches=2, boundaries=boundaries))
    assert message.splitlines()[1:] == [
        "rank 0 | 0F0 0F1 [0B0@1B1] 0B1  <-- waits for step 1B1",
        "rank 1 | 1F0 1B0 [1F1@0B1] 1B1  <-- waits for step 0B1",
        "rank 2 | ended",
    ]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("0SEND_F0>1", ""), "the SEND of F0 from stage 0 to stage 1 is missing."),
        (("1RECV_F1<0", ""), "the RECV of F1 from stage 0 to stage 1 is missing."),
        (("1SEND_B1>0", ""), "the SEND of B1 from stage 1 to stage 0 is missing."),
        (("0RECV_B0<1", ""), "the RECV of B0 from stage 1 to stage 0 is missing."),
        (("0F0", "0F0 0SEND_B0>1"), "the SEND of B0 from stage 0 to stage 1 is one too many."),
        (("0F0", "0F0 0RECV_F0<1"), "the RECV of F0 from stage 1 to stage 0 is one too many."),
    ],
)
def test_a_message_missing_or_too_many_is_refused(edit, message):
    assert refusal(lowered(edit)) == f"written: {message}"


def test_a_message_inside_a_rank_is_refused():
    text = """
        0F0 0SEND_F0>1 1RECV_F0<0 1F0 1B0 0B0 0STEP 1STEP
    """
    message = refusal(written(text, num_microbatches=1, stages_per_rank=2, lowered=True))
    assert message == "written: the SEND of F0 from stage 0 to stage 1 is one too many."


def test_messages_in_a_program_that_calls_itself_not_lowered_are_refused():
    message = refusal(replace(lowered(), lowered=False))
    assert message == (
        "written: the SEND of F0 from stage 0 to stage 1 is one too many: "
        "the program is not lowered."
    )


def test_crossing_sends_deadlock_under_rendezvous_and_the_grid_shows_where():
    """Each rank sends before it posts the receive that the other one's send waits for."""
    message = refusal(lowered(("1RECV_F1<0", ""), ("1SEND_B0>0", "1SEND_B0>0 1RECV_F1<0")))
    assert message == (
        "written: the program deadlocks. Every rank waits for another one:\n"
        "rank 0 | 0F0 0SEND_F0>1 0F1 [0SEND_F1>1] 0RECV_B0<1 0B0 0RECV_B1<1 0B1 ..."
        "  <-- waits for step 1RECV_F1<0 to be posted\n"
        "rank 1 | 1RECV_F0<0 1F0 1B0 [1SEND_B0>0] 1RECV_F1<0 1F1 1B1 1SEND_B1>0 ..."
        "  <-- waits for step 0RECV_B0<1 to be posted"
    )


def just_before_use(program):
    """Every receive right before the compute that uses it, every send right after its producer."""
    rows = []
    for row in program.ranks:
        sends = {}
        receives = {}
        for item in row:
            if item.kind is Kind.SEND:
                sends.setdefault((item.payload, item.stage, item.microbatch), []).append(item)
            elif item.kind is Kind.RECV:
                receives[item.payload, item.stage, item.microbatch] = item
        order = []
        for item in row:
            if item.kind in (Kind.SEND, Kind.RECV):
                continue
            name = (item.kind, item.stage, item.microbatch)
            order += [receives[name]] if name in receives else []
            order += [item, *sends.get(name, [])]
        rows.append(tuple(order))
    return program.with_ranks(tuple(rows))


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "foldx_fifo", "foldx_aiao"])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8)])
def test_receiving_just_before_use_deadlocks_with_virtual_stages(schedule, pp, microbatches):
    program = compile_program(schedule=schedule, pp=pp, num_microbatches=microbatches)
    message = refusal(just_before_use(program))
    assert message.startswith(f"{schedule}: the program deadlocks. Every rank waits for another")
    grid = message.splitlines()[1:]
    assert len(grid) == pp
    assert all(
        line.startswith(f"rank {rank} | ") and ("[" in line or line.endswith("ended"))
        for rank, line in enumerate(grid)
    )


@pytest.mark.parametrize("item", ["0REDUCE0", "0STEP"])
def test_an_update_before_the_last_gradient_is_refused(item):
    message = refusal(compute(("0B1", f"{item} 0B1")))
    assert message == (
        f"written: {item} on rank 0 stands before 0B1, which still adds to the gradient."
    )
    message = refusal(compute(("0B1", f"0I1 {item} 0W1")))
    assert message == (
        f"written: {item} on rank 0 stands before 0W1, which still adds to the gradient."
    )


def test_a_reduction_after_the_optimizer_step_is_refused():
    message = refusal(compute(("0B1", "0B1 0STEP 0REDUCE0"), ("1B1", "1B1 1STEP")))
    assert message == "written: 0REDUCE0 on rank 0 after its STEP."


def test_a_stage_that_is_never_stepped_is_refused():
    message = refusal(lowered(("1STEP", "")))
    assert message == "written: rank 1 steps stages [], but owns [1]."
    message = refusal(lowered(("0STEP", ""), ("1STEP", "")))
    assert message == "written: rank 0 steps stages [], but owns [0]."


@pytest.mark.parametrize("role", ["accumulate", "forward"])
def test_an_update_in_a_program_that_makes_none_is_refused(role):
    text = "0F0 0B0 0STEP" if role == "accumulate" else "0F0 0STEP"
    message = refusal(written(text, num_microbatches=1, role=role))
    assert message == f"written: 0STEP on rank 0 in a program that is to {role} only."


def test_buckets_have_no_gap():
    message = refusal(compute(("0B1", "0B1 0REDUCE0 0REDUCE2")))
    assert message == (
        "written: rank 0 reduces buckets [0, 2] of stage 0. Buckets count from 0 without a gap."
    )


def test_weights_are_gathered_before_they_are_used():
    assert verify(compute(("0F0", "0GATHER 0F0"), ("1F0", "1GATHER 1F0")))
    message = refusal(compute(("0F1", "0GATHER 0F1")))
    assert message == (
        "written: 0GATHER on rank 0 stands after a forward of its stage, "
        "which then uses the old weights."
    )


def test_split_backwards_are_accepted():
    text = """
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1I0 1F1 1I1 1W0 1W1
    """
    program = verify(written(text, num_microbatches=2))
    assert peak_activations(program) == (2, 2)


def test_a_weight_gradient_before_its_input_gradient_deadlocks():
    text = """
        0F0 0W0 0I0
    """
    message = refusal(written(text, num_microbatches=1))
    assert message.splitlines()[1] == "rank 0 | 0F0 [0W0] 0I0  <-- waits for step 0I0"


def test_a_split_backwards_gradient_travels_when_the_input_gradient_has_run():
    text = """
        0F0 0SEND_F0>1 0RECV_B0<1 0I0 0W0 0STEP
        1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0 1STEP
    """
    assert verify(written(text, num_microbatches=1, lowered=True))
    early = text.replace("1I0 1SEND_B0>0", "1SEND_B0>0 1I0")
    message = refusal(written(early, num_microbatches=1, lowered=True))
    assert "rank 1 | 1RECV_F0<0 1F0 [1SEND_B0>0] 1I0 1W0 1STEP  <-- waits for step 1I0" in message


def test_a_recompute_stands_between_forward_and_backward():
    assert verify(written("0F0 0R0 0B0", num_microbatches=1))
    for text in ("0R0 0F0 0B0", "0F0 0B0 0R0"):
        assert "deadlocks" in refusal(written(text, num_microbatches=1))
    message = refusal(written("0R0 0B0", num_microbatches=1))
    assert message.startswith("written: stage 0, microbatch 0 has B R,")


def test_a_recompute_may_wait_for_its_gradient():
    text = """
        0F0 0SEND_F0>1 0RECV_B0<1 0R0@0RECV_B0<1 0B0 0STEP
        1RECV_F0<0 1F0 1R0@1F0 1B0 1SEND_B0>0 1STEP
    """
    assert verify(written(text, num_microbatches=1, lowered=True))
    early = text.replace("0RECV_B0<1 0R0@0RECV_B0<1", "0R0@0RECV_B0<1 0RECV_B0<1")
    message = refusal(written(early, num_microbatches=1, lowered=True))
    assert "[0R0@0RECV_B0<1] 0RECV_B0<1" in message
    assert "<-- waits for step 0RECV_B0<1 to be posted" in message


def test_an_edge_to_what_nobody_runs_is_refused():
    message = refusal(compute(("0B1", "0B1@1R0")))
    assert message == "0B1@1R0 needs 1R0, which no rank runs."


def test_edges_that_go_round_in_a_circle_deadlock():
    message = refusal(compute(("1F0", "1F0@0B1")))
    assert "[1F0@0B1]" in message
    assert "<-- waits for step 0B1" in message


def test_one_r_between_forward_and_backward_is_right():
    program = written("0F0 0F1 0R0 0B0 0B1", num_microbatches=2)
    assert verify(program) is program
    assert recomputed_pairs(program) == {(0, 0)}


@pytest.mark.parametrize("text", ["0F0 0R0 0I0 0W0", "0F0 0R0 0B0"])
def test_it_serves_whole_and_split_backwards(text):
    assert verify(written(text, num_microbatches=1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0R0 0F0 0B0", "0R0 on rank 0 stands before 0F0, which keeps the input"),
        ("0F0 0B0 0R0", "0B0 on rank 0 stands before 0R0, which rebuilds the graph"),
        ("0F0 0I0 0R0 0W0", "0I0 on rank 0 stands before 0R0"),
        ("0F0 0R0 0R0 0B0", "runs 0R0 2 times"),
        ("0F0 0R0", "needs F and B"),
    ],
)
def test_an_r_in_another_place_is_refused(text, message):
    assert message in refusal(written(text, num_microbatches=1))


def test_an_r_on_another_rank_is_refused():
    program = written("0F0 1R0 0B0\n1F0 1B0", num_microbatches=1)
    assert "1R0 stands on rank 0" in refusal(program)


def test_a_fused_pair_reads_what_was_rebuilt_before_it():
    assert verify(written("0F0 0R0 (0F1;0B0)OVERLAP_F_B 0B1", num_microbatches=2))
    late = written("0F0 (0F1;0B0)OVERLAP_F_B 0R0 0B1", num_microbatches=2)
    assert "0B0 on rank 0 stands before 0R0" in refusal(late)
