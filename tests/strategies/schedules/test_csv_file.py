"""Text to cells: the notation, what spreadsheets add, and garbage at its line and column."""

from __future__ import annotations

import pytest

from strategies.errors import ProgramError
from strategies.ir.instruction import Instruction, backward, forward, overlap
from strategies.ir.kinds import Kind
from strategies.ir.text import format_rows
from strategies.plan import ScheduleFile
from strategies.schedules.csv_file import check_cells, parse_cells
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
    ["0Fgarbage", "0F0garbage", "0F", "F0", "0", "-1F0", "0F-1", "0F0 0F1", "0F0.0", "0X0", "0R0",
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
    ],
)
def test_common_mistakes_get_a_hint(text, hint):
    assert refusal(text).endswith(hint)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("(0F1;3F0)OVERLAP_F_B", "must fuse one forward and one backward"),
        ("(0B1;3B0)OVERLAP_F_B", "must fuse one forward and one backward"),
        ("(0F1;3W0)OVERLAP_F_B", "must fuse one forward and one backward"),
        ("(0F1;3B1)OVERLAP_F_B", "of its own microbatch"),
        ("(0F1)OVERLAP_F_B", "is not a fused pair"),
        ("(0F1;3B0;2F2)OVERLAP_F_B", "is not a fused pair"),
        ("(0F1;3Bx)OVERLAP_F_B", "'3Bx' is not an instruction"),
        ("((0F1;3B0)OVERLAP_F_B;2B2)OVERLAP_F_B", "is not a fused pair"),
        ("(0F1;3B0)OVERLAP", "is not an instruction"),
    ],
)
def test_a_wrong_pair_is_refused_at_its_cell(cell, expected):
    message = refusal(f"0F0,{cell}")
    assert message.startswith("my.csv, line 1, column 2: ")
    assert expected in message


def test_the_first_stage_has_nobody_before_it():
    assert refusal("0F0,0RECV_F0") == (
        "my.csv, line 1, column 2: 0RECV_F0: there is no stage before stage 0."
    )


@pytest.mark.parametrize(
    ("text", "line"), [("\n0F0", 1), ("0F0\n,,\n1F0", 2), ("0UNSHARD\n1F0", 1)]
)
def test_a_line_that_computes_nothing_is_refused(text, line):
    assert refusal(text).startswith(f"my.csv, line {line}, column 1: nothing is computed here.")


@pytest.mark.parametrize("text", ["", "\ufeff", "\n\r\n", ",,,\n"])
def test_an_empty_file_is_refused(text):
    assert refusal(text).startswith("my.csv has no instruction.")


# ------------------------------------------------------------------------------------ csv messages
#
# SEND and RECV cells of a compute_comms file: whole, or refused at the cell.


SOUND = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
    "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1I1,1SEND_B1,1W1,1REDUCE_GRAD,1RESHARD\n"
)


def read(text):
    return from_file(ScheduleFile("my.csv", text), pp=2)


def messages_refusal(text):
    with pytest.raises(ProgramError) as error:
        read(text)
    return str(error.value)


def test_a_sound_file_gives_its_computations():
    assert format_rows(read(SOUND)[2]) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1I1 1W1\n"


def test_a_file_without_messages_needs_none():
    words = ("0SEND_F0", "0SEND_F1", "0RECV_B0", "0RECV_B1", "1RECV_F0", "1RECV_F1", "1SEND_B0",
             "1SEND_B1")  # fmt: skip
    text = SOUND
    for word in words:
        text = text.replace(word, "")
    assert read(text) == read(SOUND)


@pytest.mark.parametrize(
    ("word", "place", "rest"),
    [
        ("0SEND_F1", "line 1, column 4: 0F1 has no 0SEND_F1, but its result goes to another rank.",
         " Write 0SEND_F1 after it, or leave out all SENDs and RECVs."),
        ("1RECV_F0", "line 2, column 3: 1F0 has no 1RECV_F0, but its input comes from another "
         "rank.", " Write 1RECV_F0 before it, or leave out all SENDs and RECVs."),
        ("1SEND_B0", "line 2, column 4: 1B0 has no 1SEND_B0, but its result goes to another rank.",
         " Write 1SEND_B0 after it, or leave out all SENDs and RECVs."),
        ("1SEND_B1", "line 2, column 8: 1I1 has no 1SEND_B1, but its result goes to another rank.",
         " Write 1SEND_B1 after it, or leave out all SENDs and RECVs."),
        ("0RECV_B1", "line 1, column 9: 0B1 has no 0RECV_B1, but its input comes from another "
         "rank.", " Write 0RECV_B1 before it, or leave out all SENDs and RECVs."),
    ],
)  # fmt: skip
def test_a_missing_message_is_refused_at_the_cell_that_needs_it(word, place, rest):
    assert messages_refusal(SOUND.replace(word, "")) == f"my.csv, {place}{rest}"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("0B1,", "0B1,0SEND_F1,", "line 1, column 10: 0SEND_F1 stands a second time, first in "
         "line 1, column 5. Every message has one SEND and one RECV."),
        ("1W1,", "1W1,1SEND_F1,", "line 2, column 11: 1SEND_F1: no value of that microbatch goes "
         "from one rank to another there. Remove it."),
        ("0B1,", "0B1,0SEND_F7,", "line 1, column 10: 0SEND_F7: no value of that microbatch goes "
         "from one rank to another there. Remove it."),
        ("1W1,", "1W1,0SEND_F0,", "line 2, column 11: 0SEND_F0 stands a second time, first in "
         "line 1, column 3. Every message has one SEND and one RECV."),
        ("0F1,0SEND_F1", "0SEND_F1,0F1", "line 1, column 4: 0SEND_F1 stands before 0F1 (column 5), "
         "whose result it sends."),
        ("1RECV_F0,1F0", "1F0,1RECV_F0", "line 2, column 3: 1RECV_F0 stands after 1F0 (column 2), "
         "whose input it receives."),
        ("1UNSHARD", "0UNSHARD", "line 2, column 1: 0UNSHARD stands on rank 1, but stage 0 is on "
         "rank 0."),
        ("1REDUCE_GRAD", "5REDUCE_GRAD", "line 2, column 11: 5REDUCE_GRAD stands on rank 1, but "
         "stage 5 is nowhere."),
    ],
)  # fmt: skip
def test_a_wrong_message_is_refused_at_its_cell(old, new, expected):
    assert messages_refusal(SOUND.replace(old, new, 1)) == f"my.csv, {expected}"


def test_a_message_on_the_wrong_rank_is_sent_to_its_line():
    text = SOUND.replace("0SEND_F0,", "").replace("1W1", "1W1,0SEND_F0")
    assert messages_refusal(text) == (
        "my.csv, line 2, column 11: 0SEND_F0 stands on rank 1, but 0F0 on rank 0 (line 1, column "
        "2). Move it to line 1."
    )


def test_stages_of_one_rank_exchange_no_messages():
    text = "0F0,1F0,1B0,0B0\n2F0,2B0\n"
    sound = "0F0,1F0,1SEND_F0,1RECV_B0,1B0,0B0\n2RECV_F0,2F0,2B0,2SEND_B0\n"
    assert read(sound) == read(text)
    assert messages_refusal(sound.replace("0F0,", "0F0,0SEND_F0,", 1)).startswith(
        "my.csv, line 1, column 2: 0SEND_F0: no value of that microbatch goes from one rank to"
    )


def test_two_weight_copies_exchange_messages_per_microbatch():
    text = (
        "0F0,0SEND_F0,1RECV_F1,1F1,1B1,1SEND_B1,0RECV_B0,0B0\n"
        "0F1,0SEND_F1,1RECV_F0,1F0,1B0,1SEND_B0,0RECV_B1,0B1\n"
    )
    placement, _, _ = read(text)
    assert (placement.name, placement.weight_copies) == ("bidirectional", 2)
    assert messages_refusal(text.replace("1SEND_B1,", "")).startswith(
        "my.csv, line 1, column 5: 1B1 has no 1SEND_B1"
    )


# --------------------------------------------------------------------------------------- csv rules
#
# Every computation once, without a gap: each broken rule at its line and column.


def check(text):
    return check_cells(parse_cells(text, name="my.csv"), name="my.csv")


def rules_refusal(text):
    with pytest.raises(ProgramError) as error:
        check(text)
    return str(error.value)


def test_every_computation_is_found_with_its_rank_also_inside_a_pair():
    index = check("0F0,(0F1;0B0)OVERLAP_F_B,0I1,0W1\n1F0,1B0,1F1,1B1\n")
    assert len(index) == 9
    cell, rank = index[Kind.B, 0, 0]
    assert (cell.text, cell.column, rank) == ("(0F1;0B0)OVERLAP_F_B", 2, 0)
    assert index[Kind.B, 1, 1][1] == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "0F0,0B0,0F0",
            "line 1, column 3: 0F0 stands a second time, first in line 1, column 1. "
            "Every instruction stands once.",
        ),
        (
            "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1,0B1",
            "line 2, column 5: 0B1 stands a second time, first in line 1, column 4. "
            "Every instruction stands once.",
        ),
        (
            "0F0,(0F1;0B0)OVERLAP_F_B,0B1,,0F1",
            "line 1, column 5: 0F1 stands a second time, first in line 1, column 2. "
            "Every instruction stands once.",
        ),
        (
            "0F0,0F1,0B0",
            "line 1, column 2: 0F1 has no backward. Write 0B1, or 0I1 and 0W1, after it.",
        ),
        ("0F0,0B0,0B1", "line 1, column 3: 0B1 has no forward. Write 0F1, before it."),
        (
            "0F0,0B0,0F1,0B1\n1F0,1B0",
            "line 1, column 3: 0F1 is of microbatch 1, which no line runs through stage 1. "
            "Write 1F1, and 1B1, or 1I1 and 1W1.",
        ),
        ("0F0,0I0", "line 1, column 2: 0I0 without 0W0. Write 0B0, or 0I0 and 0W0."),
        ("0F0,0W0", "line 1, column 2: 0W0 without 0I0. Write 0B0, or 0I0 and 0W0."),
        (
            "0F0,0B0,0W0",
            "line 1, column 3: 0W0 is a part of 0B0 in line 1, column 2. "
            "Write 0B0, or 0I0 and 0W0.",
        ),
        (
            "0F0,0B0\n2F0,2B0",
            "line 2, column 1: 2F0, but none of the stages is 1. "
            "Stages count from 0 without a gap.",
        ),
        (
            "0F0,0B0,0F2,0B2",
            "line 1, column 3: 0F2, but none of the microbatches is 1. "
            "Microbatches count from 0 without a gap.",
        ),
        (
            "0F1,0B1",
            "line 1, column 1: 0F1, but none of the microbatches is 0. "
            "Microbatches count from 0 without a gap.",
        ),
        (
            "1F0,1B0",
            "line 1, column 1: 1F0, but none of the stages is 0. "
            "Stages count from 0 without a gap.",
        ),
    ],
)
def test_what_is_repeated_or_missing_is_refused_at_its_line_and_column(text, expected):
    assert rules_refusal(text) == f"my.csv, {expected}"


def test_an_enormous_number_is_refused_at_once():
    assert "none of the microbatches is 1." in rules_refusal("0F0,0B0,0F9999999,0B9999999")
    assert "none of the stages is 1." in rules_refusal("0F0,0B0,9999999F0,9999999B0")
