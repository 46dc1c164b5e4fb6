"""Text to cells: the notation, what spreadsheets add, and garbage at its line and column."""

from __future__ import annotations

import re

import pytest

from strategies.errors import ProgramError
from strategies.ir.instruction import Instruction, backward, forward, overlap
from strategies.ir.kinds import Kind
from strategies.ir.text import format_rows
from strategies.plan import ScheduleFile
from strategies.schedules.csv_file import parse_cells
from strategies.schedules.custom import from_file

PLAIN = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def words(text):
    return [[cell.text for cell in row] for row in parse_cells(text, name="my.csv")]


def refusal(text):
    with pytest.raises(ProgramError) as error:
        parse_cells(text, name="my.csv")
    return str(error.value)


def test_a_cell_knows_where_it_stands():
    (row,) = parse_cells("0F0,, 0B0", name="my.csv")
    assert [(cell.line, cell.column, cell.place) for cell in row] == [
        (1, 1, "line 1, column 1"),
        (1, 3, "line 1, column 3"),
    ]
    assert [cell.instruction for cell in row] == [forward(0, 0), backward(0, 0)]


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + PLAIN,
        PLAIN.replace("\n", "\r\n"),
        PLAIN.replace("\n", "\r"),
        PLAIN.rstrip(),
        PLAIN.replace("\n", ",,,\n"),
        PLAIN + "\n\n,,,,\n  \n",
        PLAIN.replace(",", " , "),
        PLAIN.replace(",", "\u00a0,\t"),
        PLAIN.replace(",", ",,,"),
        PLAIN.replace("0F1", '"0F1"').replace("1F1", ' " 1F1 " '),
        PLAIN.replace(",", ',"",'),
        PLAIN.replace("0F1", "00F01"),
    ],
    ids=[
        "byte order mark", "CRLF", "CR", "no newline at the end", "trailing commas", "empty lines",
        "spaces", "tabs and hard spaces", "bubbles", "quotes", "quoted bubbles", "leading zeros",
    ],
)  # fmt: skip
def test_what_spreadsheets_add_changes_nothing(text):
    def items(text):
        return [[cell.instruction for cell in row] for row in parse_cells(text, name="my.csv")]

    assert items(text) == items(PLAIN)


def test_a_fused_pair_is_read_in_either_order():
    for text in ("(0F1;3B0)OVERLAP_F_B", '"(3B0; 0F1)OVERLAP_F_B"'):
        ((cell,),) = parse_cells(text, name="my.csv")
        assert cell.instruction == overlap(forward(0, 1), backward(3, 0))
        assert cell.compute == (forward(0, 1), backward(3, 0))
        assert cell.stage == 0


@pytest.mark.parametrize(
    ("text", "kind", "payload", "peer"),
    [
        ("2SEND_F5", Kind.SEND, Kind.F, 3),
        ("2RECV_F5", Kind.RECV, Kind.F, 1),
        ("2SEND_B5", Kind.SEND, Kind.B, 1),
        ("2RECV_B5", Kind.RECV, Kind.B, 3),
    ],
)
def test_a_message_goes_to_the_neighbouring_stage(text, kind, payload, peer):
    ((_, cell),) = parse_cells(f"0F0,{text}", name="my.csv")
    assert cell.instruction == Instruction(kind, 2, 5, payload=payload, peer=peer)
    assert cell.compute == ()


def test_words_about_sharded_weights_name_a_stage_and_compute_nothing():
    ((_, *cells),) = parse_cells("0F0,3UNSHARD,3RESHARD,3REDUCE_GRAD", name="my.csv")
    assert [(cell.stage, cell.instruction, cell.compute) for cell in cells] == [(3, None, ())] * 3


@pytest.mark.parametrize(
    "cell",
    ["0Fgarbage", "0RECV_F0<0", "0REDUCE0",
     "0F0garbage", "0F", "F0", "0", "-1F0", "0F-1", "0F0 0F1", "0F0.0", "0X0", "0R0",
     "0STEP", "0SEND_F0>1", "0F0#", "0F0@0B0", "0UNSHARD3", "0SEND_W0", "0OVERLAP_F_B",
     "rank 0", "0F12345678", "\u0660F\u0660", '"0F0', "nan", "=A1", "#REF!"],
)  # fmt: skip
def test_garbage_is_refused_at_its_line_and_column(cell):
    message = refusal(f"0F0,0B0\n1F0,,{cell},1B0\n")
    assert message.startswith("my.csv, line 2, column 3: ")
    assert message.isascii()
    assert "\n" not in message


def test_garbage_is_quoted_in_plain_letters_and_cut():
    assert refusal("0F0\n1F\u00e9\n") == (
        "my.csv, line 2, column 1: '1F\\xe9' is not an instruction. Write stage, letter, "
        "microbatch, as in 2F0 2B0 2I0 2W0, and nothing for a bubble."
    )
    assert "'" + "x" * 37 + "...'" in refusal("x" * 5000)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("0f0,0b0", "Did you mean 0F0?"),
        ("0F0;0B0", "Cells are separated by commas."),
        ("0F0\t0B0", "Cells are separated by commas."),
        ("0R0", "Recomputation is no part of a file: leave it out and add recompute=full."),
        ("0RECV_F0", "There is no stage before stage 0."),
        ("0SEND_B0", "There is no stage before stage 0."),
    ],
)
def test_common_mistakes_get_a_hint(text, hint):
    assert refusal(text).endswith(hint)


@pytest.mark.parametrize(
    "cell",
    ["(0F1)OVERLAP_F_B", "(0F1;3B0;2F2)OVERLAP_F_B", "(0F1;3Bx)OVERLAP_F_B",
     "((0F1;3B0)OVERLAP_F_B;2B2)OVERLAP_F_B"],
)  # fmt: skip
def test_what_is_no_pair_is_told_how_pairs_are_written(cell):
    message = refusal(f"0F0,{cell}")
    assert message.startswith(f"my.csv, line 1, column 2: '{cell[:37]}")
    assert message.endswith("Write a fused pair as (0F1;3B0)OVERLAP_F_B.")


@pytest.mark.parametrize(
    ("text", "line"), [("\n0F0", 1), ("0F0\n,,\n1F0", 2), ("0UNSHARD\n1F0", 1)]
)
def test_a_line_that_computes_nothing_is_refused(text, line):
    assert refusal(text).startswith(f"my.csv, line {line}, column 1: nothing is computed here.")


@pytest.mark.parametrize("text", ["", "\ufeff", "\n\r\n", ",,,\n"])
def test_an_empty_file_is_refused(text):
    assert refusal(text).startswith("my.csv has no instruction.")


# ------------------------------------------------------------------------------------------ rules
#
# What the verifier refuses of a file, at the line and column of the cell.


SOUND = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
    "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1I1,1SEND_B1,1W1,1REDUCE_GRAD,1RESHARD\n"
)
WITHIN = "0F0,1F0,1SEND_F0,1RECV_B0,1B0,0B0\n2RECV_F0,2F0,2B0,2SEND_B0\n"
COPIES = (
    "0F0,0SEND_F0,1RECV_F1,1F1,1B1,1SEND_B1,0RECV_B0,0B0\n"
    "0F1,0SEND_F1,1RECV_F0,1F0,1B0,1SEND_B0,0RECV_B1,0B1\n"
)


def read(text):
    return from_file(ScheduleFile("my.csv", text), pp=text.strip().count("\n") + 1)


def test_a_sound_file_gives_its_computations():
    assert format_rows(read(SOUND)[2]) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1I1 1W1\n"
    placement, _, _ = read(COPIES)
    assert (placement.name, placement.weight_copies) == ("bidirectional", 2)


def test_a_file_without_messages_needs_none():
    assert read(re.sub(r"\d(SEND|RECV)_[FB]\d", "", SOUND)) == read(SOUND)
    assert read(WITHIN) == read("0F0,1F0,1B0,0B0\n2F0,2B0\n")


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        # Messages.
        (SOUND.replace("0SEND_F1", ""), (2, 6), "1RECV_F1 has no matching 0SEND_F1: the message "),
        (SOUND.replace("1RECV_F0", ""), (1, 3), "0SEND_F0 has no matching 1RECV_F0: the message "),
        (SOUND.replace("1SEND_B0", ""), (1, 6), "0RECV_B0 has no matching 1SEND_B0: the message "),
        (SOUND.replace("1SEND_B1", ""), (1, 8), "0RECV_B1 has no matching 1SEND_B1: the message "),
        (SOUND.replace("0RECV_B1", ""), (1, 9), "0B1 needs 0RECV_B1, which no rank runs. Write 0"),
        (SOUND.replace("0B1,", "0B1,0SEND_F1,"), (1, 10), "0SEND_F1 stands a second time on rank"),
        (SOUND.replace("1W1,", "1W1,1SEND_F1,"), (2, 11), "1SEND_F1 has no matching 2RECV_F1"),
        (SOUND.replace("0B1,", "0B1,0SEND_F7,"), (1, 10), "0SEND_F7 on rank 0, but there are 2 mi"),
        (SOUND.replace("1W1,", "1W1,0SEND_F0,"), (2, 11), "0SEND_F0 stands on rank 1, but the loo"),
        (SOUND.replace("0F1,0SEND_F1", "0SEND_F1,0F1"), (1, 4), "0SEND_F1 stands before 0F1"),
        (SOUND.replace("1RECV_F0,1F0", "1F0,1RECV_F0"), (2, 2), "1F0 stands before 1RECV_F0, whic"),
        (SOUND.replace("1UNSHARD", "0UNSHARD"), (2, 1), "0UNSHARD stands on rank 1, which does no"),
        (SOUND.replace("1REDUCE", "5REDUCE"), (2, 11), "5REDUCE_GRAD stands on rank 1, which does"),
        (SOUND.replace("0SEND_F0,", "").replace("1W1", "1W1,0SEND_F0"), (2, 11),
         "0SEND_F0 stands on rank 1, but the loop placement has its stage on rank 0. Move it"),
        (WITHIN.replace("0F0,", "0F0,0SEND_F0,", 1), (1, 2), "0SEND_F0 has no matching 1RECV_F0"),
        (WITHIN.replace("0F0,", "0F0,0SEND_F0,1RECV_F0,", 1), (1, 3), "1RECV_F0 on rank 0 brings "),
        (COPIES.replace("1SEND_B1,", ""), (2, 7), "0RECV_B1 has no matching 1SEND_B1"),
        # Every computation once.
        ("0F0,0B0,0F0", (1, 3), "0F0 stands a second time on rank 0."),
        ("0F0,(0F1;0B0)OVERLAP_F_B,0B1,,0F1", (1, 5), "0F1 stands a second time on rank 0."),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1,0B1", (2, 5), "0B1 stands on rank 1, but the loop plac"),
        ("0F0,0B0,0W0", (1, 3), "0W0 on rank 0 makes what 0B0 makes. Write 0B0, or 0I0 and 0W0."),
        ("0F0,0F1,0B0", (1, 2), "0F1 on rank 0 has no whole backward. Write 0B1, or 0I1 and 0W1"),
        ("0F0,0I0", (1, 1), "0F0 on rank 0 has no whole backward."),
        ("0F0,0W0", (1, 2), "0W0 needs 0I0, which no rank runs. Write 0I0 before it."),
        ("0F0,0B0,0B1", (1, 3), "0B1 needs 0F1, which no rank runs. Write 0F1 before it."),
        ("0F0,0B0,0F1,0B1\n1F0,1B0", (2, 1), "1F0, but no line runs 1F1."),
        ("0F0,0B0\n2F0,2B0", (2, 1), "2F0, but no line runs 1F0. Stages and microbatches count f"),
        ("0F0,0B0,0F2,0B2", (1, 3), "no rank runs 0F1, and num_microbatches=3 go through every st"),
        ("0F1,0B1", (1, 1), "0F1, but no line runs 0F0. Stages and microbatches count from 0"),
        ("1F0,1B0", (1, 1), "1F0, but no line runs 0F0. Stages and microbatches count from 0"),
        ("0F0,0B0,0F9999999,0B9999999", (1, 3), "no rank runs 0F1, and num_microbatches=10000000 "),
        ("0F0,0B0,9999999F0,9999999B0", (1, 3), "9999999F0, but no line runs 1F0."),
        # Pairs.
        ("0F0,0B0,(0F1;0F2)OVERLAP_F_B", (1, 3), "(0F1;0F2)OVERLAP_F_B on rank 0 does not fuse a"),
        ("0F0,0F1,0I0,0I1,(0F2;0W0)OVERLAP_F_B", (1, 5), "(0F2;0W0)OVERLAP_F_B on rank 0 does no"),
        ("0F0,(0F1;0B1)OVERLAP_F_B,0B0", (1, 2), "(0F1;0B1)OVERLAP_F_B on rank 0 does not fuse a"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_refused_at_its_line_and_column(text, place, words):
    with pytest.raises(ProgramError) as error:
        read(text)
    line, column = place
    assert str(error.value).startswith(f"my.csv, line {line}, column {column}: {words}")
    assert "\n" not in str(error.value)
