import re

import pytest

from strategies.errors import ProgramError
from strategies.ir.program import Program, Updates, chain, loop
from strategies.ir.text import parse_rows
from strategies.ir.verify import verify

SOUND = """
0F0#0 0F1#0 0B0#0 0STEP#1 0F2#1 0B1#0 0STEP#2 0B2#1 0STEP#3
1F0#0 1B0#0 1STEP#1 1F1#1 1B1#1 1STEP#2 1F2#2 1B2#2 1STEP#3
""".strip()


GATHERED = """
0F0#0 0B0#0 0STEP#1 0GATHER#1 0F1#1 0B1#1 0STEP#2 0GATHER#2 0F2#2 0B2#2 0STEP#3
1F0#0 1B0#0 1STEP#1 1GATHER#1 1F1#1 1B1#1 1STEP#2 1GATHER#2 1F2#2 1B2#2 1STEP#3
""".strip()


UPDATES, AT_ONCE = Updates(1, (1, 0)), Updates(1, (0, 0))


def stashed(text, updates=UPDATES):
    rows = parse_rows(text + "\n")
    return Program("mine", loop(2, 1), 3, rows, chain(2), updates=updates)


def test_every_microbatch_may_have_an_update_of_its_own():
    program = stashed(SOUND)
    assert verify(program) is program


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # PipeDream without stashing: the backward finds what an update has made meanwhile.
        ("0B1#0", "0B1#1", "0B1#1 reads version 1 .* has read version 0"),
        ("1F1#1 1B1#1", "1F1#0 1B1#0", "1F1#0 uses version 0 of the weights, but the newest .* 1"),
        ("0B0#0 0STEP#1 0F2#1", "0STEP#1 0B0#0 0F2#1", "0STEP#1 on rank 0 stands before 0B0#0"),
        ("0B2#1 0STEP#3", "0B2#1", "rank 0 owns stage 0 and never runs 0STEP#3"),
        ("0B1#0 0STEP#2 0B2#1 0STEP#3", "0B1#0 0B2#1 0STEP#3 0STEP#2", "0STEP#3 makes version 3"),
        ("1B2#2 1STEP#3", "1B2#2 1STEP#3 1STEP#4", "1STEP#4 .* has no gradient"),
        ("1B2#2 1STEP#3", "1B2#2 1STEP#3 1STEP#3", "1STEP#3 stands a second time on rank 1"),
    ],
)  # fmt: skip
def test_a_wrong_version_is_refused_with_its_place(old, new, message):
    assert old in SOUND
    with pytest.raises(ProgramError, match=message):
        verify(stashed(SOUND.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "0GATHER#2 0F2#2",
            "0F2#2 0GATHER#2",
            "0F2#2 on rank 0 stands before 0GATHER#2, which it needs",
        ),
        ("0STEP#2 0GATHER#2", "0GATHER#2 0STEP#2", "0GATHER#2 uses version 2 .* is 1"),
        ("1GATHER#2", "1GATHER#1", "1GATHER#1 stands a second time on rank 1"),
    ],
)
def test_shares_are_gathered_before_they_are_read(old, new, message):
    assert verify(stashed(GATHERED, AT_ONCE))
    with pytest.raises(ProgramError, match=message):
        verify(stashed(GATHERED.replace(old, new), AT_ONCE))


def test_of_a_stage_all_versions_are_gathered_or_none():
    assert verify(stashed(re.sub(r" 1GATHER#\d", "", GATHERED), AT_ONCE))
    with pytest.raises(ProgramError, match="0F2#2 needs 0GATHER#2, which no rank runs"):
        verify(stashed(GATHERED.replace(" 0GATHER#2", ""), AT_ONCE))


def test_an_update_earlier_or_later_than_its_delay_is_refused():
    late = Updates(1, (2, 0))
    with pytest.raises(ProgramError, match=r"0F2#1 reads version 1 .* 0\. Write 0F2#0\.") as error:
        verify(stashed(SOUND, updates=late))
    assert error.value.place == (0, 4)


def test_before_its_updates_are_added_a_stream_names_no_version():
    bare = re.sub(r" \dSTEP#\d|#\d", "", SOUND)
    assert verify(stashed(bare))


def test_the_error_knows_its_place():
    with pytest.raises(ProgramError) as error:
        verify(stashed(SOUND.replace("0B1#0", "0B1#1")))
    assert error.value.place == (0, 5)


def test_a_program_with_one_update_names_no_version():
    with pytest.raises(ProgramError, match=r"0F1#0 on rank 0 names version 0 .* one update"):
        verify(stashed("0F0 0F1#0 0F2 0B0 0B1#0 0B2\n1F0 1F1 1F2 1B0 1B1 1B2", updates=None))


def test_with_several_updates_each_instruction_names_its_version():
    with pytest.raises(ProgramError, match=r"0B1 on rank 0 names no version .* several updates"):
        verify(stashed(SOUND.replace("0B1#0", "0B1")))
