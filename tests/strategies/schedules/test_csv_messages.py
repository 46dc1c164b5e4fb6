"""SEND and RECV cells of a compute_comms file: whole, or refused at the cell."""

import pytest

from strategies.errors import ProgramError
from strategies.ir.text import format_rows
from strategies.schedule_file import ScheduleFile
from strategies.schedules.custom import from_file

SOUND = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
    "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1I1,1SEND_B1,1W1,1REDUCE_GRAD,1RESHARD\n"
)


def read(text):
    return from_file(ScheduleFile("my.csv", text), pp=2)


def refusal(text):
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
    assert refusal(SOUND.replace(word, "")) == f"my.csv, {place}{rest}"


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
    assert refusal(SOUND.replace(old, new, 1)) == f"my.csv, {expected}"


def test_a_message_on_the_wrong_rank_is_sent_to_its_line():
    text = SOUND.replace("0SEND_F0,", "").replace("1W1", "1W1,0SEND_F0")
    assert refusal(text) == (
        "my.csv, line 2, column 11: 0SEND_F0 stands on rank 1, but 0F0 on rank 0 (line 1, column "
        "2). Move it to line 1."
    )


def test_stages_of_one_rank_exchange_no_messages():
    text = "0F0,1F0,1B0,0B0\n2F0,2B0\n"
    sound = "0F0,1F0,1SEND_F0,1RECV_B0,1B0,0B0\n2RECV_F0,2F0,2B0,2SEND_B0\n"
    assert read(sound) == read(text)
    assert refusal(sound.replace("0F0,", "0F0,0SEND_F0,", 1)).startswith(
        "my.csv, line 1, column 2: 0SEND_F0: no value of that microbatch goes from one rank to"
    )


def test_two_weight_copies_exchange_messages_per_microbatch():
    text = (
        "0F0,0SEND_F0,1RECV_F1,1F1,1B1,1SEND_B1,0RECV_B0,0B0\n"
        "0F1,0SEND_F1,1RECV_F0,1F0,1B0,1SEND_B0,0RECV_B1,0B1\n"
    )
    placement, _, _ = read(text)
    assert (placement.name, placement.weight_copies) == ("bidirectional", 2)
    assert refusal(text.replace("1SEND_B1,", "")).startswith(
        "my.csv, line 1, column 5: 1B1 has no 1SEND_B1"
    )
