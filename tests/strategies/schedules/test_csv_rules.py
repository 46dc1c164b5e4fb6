"""Every computation once, without a gap: each broken rule at its line and column."""

import pytest

from strategies.errors import ProgramError
from strategies.ir.instruction import Kind
from strategies.schedules.csv_file import parse_cells
from strategies.schedules.csv_rules import check_cells


def check(text):
    return check_cells(parse_cells(text, name="my.csv"), name="my.csv")


def refusal(text):
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
    assert refusal(text) == f"my.csv, {expected}"


def test_an_enormous_number_is_refused_at_once():
    assert "none of the microbatches is 1." in refusal("0F0,0B0,0F9999999,0B9999999")
    assert "none of the stages is 1." in refusal("0F0,0B0,9999999F0,9999999B0")
