"""Text to cells: the notation, what spreadsheets add, and garbage at its line and column."""

import pytest

from strategies.errors import ProgramError
from strategies.ir.instruction import Instruction, Kind, backward, forward, overlap
from strategies.schedules.csv_file import parse_cells

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
     "0STEP", "0SEND_F0>1", "0F0#1", "0F0@0B0", "0UNSHARD3", "0SEND_W0", "0OVERLAP_F_B",
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
