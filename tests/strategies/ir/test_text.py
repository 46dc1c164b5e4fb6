from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import compile_program
from strategies.errors import ProgramError
from strategies.ir import Instruction, Kind, format_instruction, parse_instruction
from strategies.ir.instruction import backward, forward, input_gradient, overlap
from strategies.ir.kinds import EXCHANGE_KINDS, MESSAGE_KINDS, MICROBATCH_KINDS
from strategies.ir.text import format_rows, parse_rows

SPELLINGS = {
    "2F0": Instruction(Kind.F, 2, 0),
    "2B10": Instruction(Kind.B, 2, 10),
    "0I3": Instruction(Kind.I, 0, 3),
    "0W3": Instruction(Kind.W, 0, 3),
    "1R0": Instruction(Kind.R, 1, 0),
    "2SEND_F0>3": Instruction(Kind.SEND, 2, 0, payload=Kind.F, peer=3),
    "3RECV_F0<2": Instruction(Kind.RECV, 3, 0, payload=Kind.F, peer=2),
    "3SEND_B7>2": Instruction(Kind.SEND, 3, 7, payload=Kind.B, peer=2),
    "12RECV_B7<15": Instruction(Kind.RECV, 12, 7, payload=Kind.B, peer=15),
    "2REDUCE1": Instruction(Kind.REDUCE, 2, bucket=1),
    "2GATHER": Instruction(Kind.GATHER, 2),
    "2STEP": Instruction(Kind.STEP, 2),
    "3LOSS": Instruction(Kind.LOSS, 3),
    "0F3#1": Instruction(Kind.F, 0, 3, version=1),
    "2STEP#0": Instruction(Kind.STEP, 2, version=0),
    "1R0@2B0": Instruction(Kind.R, 1, 0, after=(Instruction(Kind.B, 2, 0),)),
    "1R0#4@2B0+1RECV_B0<2": Instruction(
        Kind.R,
        1,
        0,
        version=4,
        after=(
            Instruction(Kind.B, 2, 0),
            Instruction(Kind.RECV, 1, 0, payload=Kind.B, peer=2),
        ),
    ),
    "(0F1;3B0)OVERLAP_F_B": overlap(forward(0, 1), backward(3, 0)),
    "(0F1;3I0)OVERLAP_F_B@0F0": replace(
        overlap(forward(0, 1), input_gradient(3, 0)), after=(forward(0, 0),)
    ),
    "0STEP@0REDUCE0": Instruction(Kind.STEP, 0, after=(Instruction(Kind.REDUCE, 0, bucket=0),)),
}


@pytest.mark.parametrize("text", SPELLINGS)
def test_every_kind_has_one_spelling(text):
    assert parse_instruction(text) == SPELLINGS[text]
    assert format_instruction(SPELLINGS[text]) == text
    assert str(SPELLINGS[text]) == text


def test_every_kind_is_among_the_spellings():
    assert {item.kind for item in SPELLINGS.values()} == set(Kind) - EXCHANGE_KINDS


@st.composite
def plain_instructions(draw):
    kind = draw(st.sampled_from([kind for kind in Kind if kind not in EXCHANGE_KINDS]))
    small = st.integers(0, 99)
    if kind is Kind.OVERLAP:
        second = draw(st.sampled_from((backward, input_gradient)))
        return overlap(forward(draw(small), draw(small)), second(draw(small), draw(small)))
    message = kind in MESSAGE_KINDS
    return Instruction(
        kind,
        draw(small),
        draw(small) if message or kind in MICROBATCH_KINDS else None,
        bucket=draw(small) if kind is Kind.REDUCE else None,
        payload=draw(st.sampled_from((Kind.F, Kind.B))) if message else None,
        peer=draw(small) if message else None,
        version=draw(st.none() | small),
    )


@st.composite
def instructions(draw):
    item = draw(plain_instructions())
    edges = draw(st.lists(plain_instructions(), max_size=3))
    # An edge names the half of a fused pair that it waits for.
    return replace(item, after=tuple(edge.parts[-1] for edge in edges))


@given(instructions())
def test_text_is_read_back_as_the_same_instruction(item):
    assert parse_instruction(format_instruction(item)) == item


@given(st.lists(st.lists(instructions(), max_size=4), max_size=4))
def test_rows_are_read_back_as_the_same_rows(rows):
    ranks = tuple(map(tuple, rows))
    assert parse_rows(format_rows(ranks)) == ranks


def test_a_rank_is_a_line():
    assert parse_rows("0F0 0B0\n\n1F0\n") == (
        (Instruction(Kind.F, 0, 0), Instruction(Kind.B, 0, 0)),
        (),
        (Instruction(Kind.F, 1, 0),),
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0",
        "0F",
        "0X0",
        "0f0",
        "-1F0",
        "0F-1",
        "0F0 0B0",
        "0F0,",
        "0F0junk",
        "0REDUCE",
        "0STEP0",
        "0GATHER1",
        "0SEND_F0>",
        "0SEND_W0>1",
        "0SEND_I0>1",
        "0RECV_0<1",
        "0F0#",
        "0F0#x",
        "0F0@",
        "0F0@1B0+",
        "0F0@+1B0",
        "0F0@nothing",
        "0F0@1B0#",
    ],
)
def test_what_is_no_instruction_is_refused_whole(text):
    with pytest.raises(ProgramError, match=r"is not an instruction\. Write stage, letter"):
        parse_instruction(text)


@pytest.mark.parametrize("text", ["2SEND_F0<3", "3RECV_F0>2"])
def test_an_arrow_the_wrong_way_round_is_refused(text):
    with pytest.raises(ProgramError) as error:
        parse_instruction(text)
    assert str(error.value) == (
        f"'{text}': a SEND points to its target with '>', a RECV to its source with '<'."
    )


def test_a_bad_word_is_named_with_its_line():
    with pytest.raises(ProgramError, match=r"^line 2: '1Q0' is not an instruction"):
        parse_rows("0F0 0B0\n1F0 1Q0\n")


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        ("naive", "programs/naive"),
        ("gpipe", "programs/gpipe"),
        ("1f1b", "programs/1f1b"),
        ("interleaved_1f1b", "programs/interleaved_1f1b"),
        ("foldx_fifo", "programs/foldx_fifo"),
        ("foldx_aiao", "programs/foldx_aiao"),
    ],
)
def test_whole_programs(golden, schedule, name):
    """Three ranks, four microbatches, two buckets per stage: messages and updates included."""
    program = compile_program(schedule=schedule, pp=3, num_microbatches=4, buckets=2)
    text = format_rows(program.ranks)
    assert parse_rows(text) == program.ranks
    golden(name, text)


@pytest.mark.parametrize(
    ("text", "whole"),
    [("2SEND_F5", "2SEND_F5>3"), ("2RECV_F5", "2RECV_F5<1"), ("2SEND_B5", "2SEND_B5>1")],
)
def test_a_message_without_a_peer_goes_to_the_neighbour(text, whole):
    assert parse_instruction(text) == parse_instruction(whole)


def test_the_first_stage_has_no_stage_before_it():
    with pytest.raises(ProgramError, match="no stage before stage 0"):
        parse_instruction("0RECV_F0")
