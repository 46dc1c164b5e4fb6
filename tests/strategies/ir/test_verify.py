"""Broken programs, rule by rule: what is refused, at which place, in which words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strategies import compile_program
from strategies.analysis.memory import peak_activations
from strategies.errors import DeadlockError, ProgramError
from strategies.ir import Instruction, Kind, verify
from strategies.ir.instruction import backward, forward, overlap
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


def alone(text, count=1, **options):
    return written(text, num_microbatches=count, **options)


def with_extra(item):
    program = compute()
    return program.with_ranks((program.ranks[0], (*program.ranks[1], item)))


TWO_COPIES = """
    0F0 0F1 0B1 0B0
    1F0 1F1 1B1 1B0
"""
WITHIN = "0F0 0SEND_F0>1 1RECV_F0<0 1F0 1B0 0B0 0STEP 1STEP"
SPLIT = """
    0F0 0SEND_F0>1 0RECV_B0<1 0I0 0W0 0STEP
    1RECV_F0<0 1F0 1SEND_B0>0 1I0 1W0 1STEP
"""
AWAITED = """
    0F0 0SEND_F0>1 0R0@0RECV_B0<1 0RECV_B0<1 0B0 0STEP
    1RECV_F0<0 1F0 1R0@1F0 1B0 1SEND_B0>0 1STEP
"""
REFUSED = [
    # 1. Its fields, and the program's role.
    (with_extra("1F0"), (1, 4), "rank 1 has '1F0', which is no Instruction. Make them with"),
    *(
        (with_extra(item), (1, 4), f"{item!r} on rank 1 is malformed. F B I W R have a microbatch")
        for item in (
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
        )
    ),
    *(
        (with_extra(overlap(forward(1, 1), other)), (1, 4), f"(1F1;{other})OVERLAP_F_B on rank 1 d")
        for other in (backward(1, 1), forward(1, 0))
    ),
    (alone("0F0 0B0", role="forward"), (0, 1), "0B0 on rank 0 in a program that is to forward onl"),
    (alone("0F0 0R0", role="forward"), (0, 1), "0R0 on rank 0 in a program that is to forward onl"),
    (alone("0F0 0STEP", role="forward"), (0, 1), "0STEP on rank 0 in a program that is to forward"),
    (alone("0F0 0B0 0STEP", role="accumulate"), (0, 2), "0STEP on rank 0 in a program that is to"),
    (compute(("0B1", "0B1#1")), (0, 3), "0B1#1 on rank 0 names version 1 of the weights in a prog"),
    # 2. Its rank.
    (compute(("0B1", "0B1 1STEP")), (0, 4), "1STEP stands on rank 0, but the loop placement has"),
    (compute(("0B1", "1B1"), ("1B1", "0B1")), (0, 3), "1B1 stands on rank 0, but the loop placeme"),
    (compute(("1B1", "1B1 2F0")), (1, 4), "2F0 on rank 1 names stage 2, but there are 2 stages, 0"),
    (compute(("1B1", "1B1 1F2")), (1, 4), "1F2 on rank 1, but there are 2 microbatches, counted"),
    (with_extra(Instruction(Kind.F, -1, 0)), (1, 4), "-1F0 on rank 1 names stage -1, but there"),
    (with_extra(Instruction(Kind.F, 1, -1)), (1, 4), "1F-1 on rank 1, but there are 2 microbatch"),
    (alone("0F0 1R0 0B0\n1F0 1B0"), (0, 1), "1R0 stands on rank 0"),
    (
        alone(TWO_COPIES, 2, placement=bidirectional(2)), (0, 1),
        "0F1 stands on rank 0, but the bidirectional placement has its stage on rank 1. Move it",
    ),
    (alone("0F0 0B0", placement=v(2, 1)), None, "1 rows for 2 ranks. Write one row per rank."),
    (alone("0F0 0B0\n1F0 1B0\n", placement=v(1, 1)), None, "2 rows for 1 ranks. Write one row"),
    # 3. A value is made once.
    (compute(("0F0", "0F0 0F0")), (0, 1), "0F0 stands a second time on rank 0."),
    (compute(("0B1", "0B1 0F0")), (0, 4), "0F0 stands a second time on rank 0."),
    (compute(("0B1", "0B1 0F0@0B0")), (0, 4), "0F0 stands a second time on rank 0."),
    (compute(("0B1", "0B1 0REDUCE0 0REDUCE0")), (0, 5), "0REDUCE0 stands a second time on rank 0."),
    (compute(("0B1", "0B1 0STEP 0STEP")), (0, 5), "0STEP stands a second time on rank 0."),
    (lowered(("0SEND_F0>1", "0SEND_F0>1 0SEND_F0>1")), (0, 2), "0SEND_F0>1 stands a second time"),
    (alone("0F0 0R0 0R0 0B0"), (0, 2), "0R0 stands a second time on rank 0."),
    (compute(("1B0", "1I0 1B0")), (1, 2), "1B0 on rank 1 makes what 1I0 makes. Write 1B0, or 1I0"),
    (compute(("1B0", "1I0 1W0 1B0")), (1, 3), "1B0 on rank 1 makes what 1I0 makes. Write 1B0, or"),
    # 4. What is used is made.
    (compute(("0F1", "")), (0, 2), "0B1 needs 0F1, which no rank runs. Write 0F1 before it."),
    (alone("0F0 0W0"), (0, 1), "0W0 needs 0I0, which no rank runs. Write 0I0 before it."),
    (alone("0R0 0B0"), (0, 0), "0R0 needs 0F0, which no rank runs."),
    (compute(("0B1", "0B1@1R0")), (0, 3), "0B1@1R0 needs 1R0, which no rank runs."),
    (lowered(("0SEND_F0>1", "")), (1, 0), "1RECV_F0<0 has no matching 0SEND_F0>1: the message n"),
    (lowered(("1RECV_F1<0", "")), (0, 3), "0SEND_F1>1 has no matching 1RECV_F1<0: the message n"),
    (lowered(("1SEND_B1>0", "")), (0, 6), "0RECV_B1<1 has no matching 1SEND_B1>0: the message n"),
    (lowered(("0RECV_B0<1", "")), (0, 4), "0B0 needs 0RECV_B0<1, which no rank runs."),
    (lowered(("0F0", "0F0 0SEND_B0>1")), (0, 1), "0SEND_B0>1 has no matching 1RECV_B0<0: the mes"),
    (lowered(("0F0", "0F0 0RECV_F0<1")), (0, 1), "0RECV_F0<1 has no matching 1SEND_F0>0: the mes"),
    (lowered(("0SEND_F0>1", ""), ("1RECV_F0<0", "")), (1, 0), "1F0 needs 1RECV_F0<0, which no ran"),
    # 5. What is received is used.
    (alone(WITHIN, stages_per_rank=2, lowered=True), (0, 2), "1RECV_F0<0 on rank 0 brings what n"),
    (replace(lowered(), lowered=False), (0, 4), "0RECV_B0<1 on rank 0 brings what nothing there"),
    # 6. All of it.
    (compute(("1B0", "")), (1, 0), "1F0 on rank 1 has no whole backward. Write 1B0, or 1I0 and"),
    (compute(("1B0", "1I0")), (1, 0), "1F0 on rank 1 has no whole backward. Write 1B0, or 1I0 and"),
    (alone("0F0 0R0"), (0, 0), "0F0 on rank 0 has no whole backward."),
    (alone("0F0 0B0", 2), (0, 0), "no rank runs 0F1, and num_microbatches=2 go through every"),
    (alone("0F0", 2, role="forward"), (0, 0), "no rank runs 0F1, and num_microbatches=2 go"),
    (lowered(("1STEP", "")), None, "rank 1 owns stage 1 and never runs 1STEP."),
    (lowered(("0STEP", ""), ("1STEP", "")), None, "rank 0 owns stage 0 and never runs 0STEP."),
    # 7. Updates.
    (compute(("0B1", "0STEP 0B1")), (0, 4), "0B1 on rank 0 stands behind a STEP, with which a ran"),
    (
        compute(("0B1", "0B1 0STEP 0REDUCE0"), ("1B1", "1B1 1STEP")), (0, 5),
        "0REDUCE0 on rank 0 stands behind a STEP",
    ),
    (compute(("0B1", "0B1 0REDUCE0 0REDUCE2")), None, "rank 0 reduces buckets [0, 2] of stage 0."),
    # 8. Lists that end; one that waits for itself is named.
    (compute(("0F0", "0B0"), ("0B0", "0F0")), (0, 0), "0B0 on rank 0 stands before 0F0, which it"),
    (compute(("0B1", "0REDUCE0 0B1")), (0, 3), "0REDUCE0 on rank 0 stands before 0B1, which it ne"),
    (compute(("0B1", "0I1 0REDUCE0 0W1")), (0, 4), "0REDUCE0 on rank 0 stands before 0W1, which"),
    (compute(("0F1", "0F1 0GATHER")), (0, 0), "0F0 on rank 0 stands before 0GATHER, which it need"),
    (alone("0F0 0W0 0I0"), (0, 1), "0W0 on rank 0 stands before 0I0, which it needs"),
    (alone("0R0 0F0 0B0"), (0, 0), "0R0 on rank 0 stands before 0F0, which it needs"),
    (alone("0F0 0B0 0R0"), (0, 1), "0B0 on rank 0 stands before 0R0, which it needs"),
    (alone("0F0 0I0 0R0 0W0"), (0, 1), "0I0 on rank 0 stands before 0R0, which it needs"),
    (
        alone("0F0 (0F1;0B0)OVERLAP_F_B 0R0 0B1", 2), (0, 1),
        "(0F1;0B0)OVERLAP_F_B on rank 0 stands before 0R0, which it needs",
    ),
    (alone(SPLIT, lowered=True), (1, 2), "1SEND_B0>0 on rank 1 stands before 1I0, which it needs"),
    (alone(AWAITED, lowered=True), (0, 2), "0R0@0RECV_B0<1 on rank 0 stands before 0RECV_B0<1, w"),
    (compute(("1F0", "1F0@0B1")), (0, 2), "0B0 on rank 0 never begins: the program deadlocks."),
]  # fmt: skip


@pytest.mark.parametrize(("program", "place", "words"), REFUSED)
def test_a_broken_rule_is_refused_at_its_place(program, place, words):
    with pytest.raises(ProgramError) as error:
        verify(program)
    assert str(error.value).startswith(f"written: {words}")
    assert error.value.place == place
    deadlock = "deadlocks" in str(error.value)
    assert isinstance(error.value, DeadlockError) is deadlock


def test_what_waits_for_itself_is_named_above_the_grid():
    message = refusal(compute(("0F0", "0B0"), ("0B0", "0F0")))
    assert message == (
        "written: 0B0 on rank 0 stands before 0F0, which it needs: the program deadlocks.\n"
        "rank 0 | [0B0] 0F1 0F0 0B1  <-- waits for step 0F0\n"
        "rank 1 | [1F0] 1B0 1F1 1B1  <-- waits for step 0F0"
    )


@pytest.mark.parametrize(
    "program",
    [
        compute(("0F0", "0GATHER 0F0"), ("1F0", "1GATHER 1F0")),
        alone(SPLIT.replace("1SEND_B0>0 1I0", "1I0 1SEND_B0>0"), lowered=True),
        alone(
            AWAITED.replace("0R0@0RECV_B0<1 0RECV_B0<1", "0RECV_B0<1 0R0@0RECV_B0<1"), lowered=True
        ),
        alone("0F0 0R0 (0F1;0B0)OVERLAP_F_B 0B1", 2),
    ],
)
def test_what_is_in_order_is_accepted(program):
    assert verify(program) is program


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


def test_crossing_sends_deadlock_under_rendezvous_and_the_grid_shows_where():
    """Each rank sends before it posts the receive that the other one's send waits for."""
    message = refusal(lowered(("1RECV_F1<0", ""), ("1SEND_B0>0", "1SEND_B0>0 1RECV_F1<0")))
    assert message == (
        "written: 0SEND_F1>1 on rank 0 never begins: the program deadlocks.\n"
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
    assert "never begins: the program deadlocks.\n" in message
    grid = message.splitlines()[1:]
    assert len(grid) == pp
    assert all(
        line.startswith(f"rank {rank} | ") and ("[" in line or line.endswith("ended"))
        for rank, line in enumerate(grid)
    )


def test_split_backwards_are_accepted():
    text = """
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1I0 1F1 1I1 1W0 1W1
    """
    program = verify(written(text, num_microbatches=2))
    assert peak_activations(program) == (2, 2)


def test_one_r_between_forward_and_backward_is_right():
    program = written("0F0 0F1 0R0 0B0 0B1", num_microbatches=2)
    assert verify(program) is program
    assert recomputed_pairs(program) == {(0, 0)}


@pytest.mark.parametrize("text", ["0F0 0R0 0I0 0W0", "0F0 0R0 0B0"])
def test_it_serves_whole_and_split_backwards(text):
    assert verify(written(text, num_microbatches=1))
