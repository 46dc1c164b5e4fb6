"""The page that a rank writes and its watching process reads."""

from __future__ import annotations

import os

import pytest

from strategies.heartbeat import (
    PHASE,
    STATE,
    WAITING,
    Heartbeat,
    Phase,
    new_page,
    read_beat,
    read_mark,
    read_note,
    tell_to_leave,
)


@pytest.fixture
def page():
    file = new_page()
    yield file
    os.close(file)


class Watched(list):
    """Words that are looked at behind every write."""

    def __init__(self, words, look):
        super().__init__(words)
        self.look = look

    def __setitem__(self, index, value):
        super().__setitem__(index, value)
        self.look()


def test_a_reader_between_two_writes_sees_the_names_of_one_program():
    heartbeat = Heartbeat()
    first = heartbeat.names([("R", (), "")])
    second = heartbeat.names([("F mb=0 of stage 1", (), "")])
    heartbeat.words[STATE] = 0
    heartbeat.begin(first, fresh=False)
    seen = []
    heartbeat.words = Watched(heartbeat.words, lambda: seen.append(heartbeat.beat().doing))
    heartbeat.begin(second, fresh=False)
    assert set(seen) == {"F mb=0 of stage 1"}


def test_the_reader_sees_the_instruction_by_name_and_for_whom_it_waits(page):
    heartbeat = Heartbeat(page)
    assert read_beat(page).describe() == "in starting: imports and data"
    where = heartbeat.names(
        [("F mb=0 of stage 1", (), ""), ("RECV act mb=1 from stage 0", (3,), "rank 3 on b")]
    )
    heartbeat.step(7)
    heartbeat.begin(where, fresh=True)
    heartbeat.words[STATE] = 1 << 1 | WAITING
    beat = read_beat(page)
    assert beat.describe() == "at step 7 in RECV act mb=1 from stage 0 (rank 3 on b)"
    assert (beat.waiting, beat.in_pass) == (True, False)  # it may be compiling
    heartbeat.begin(where, fresh=False)
    heartbeat.words[STATE] = 0
    beat = read_beat(page)
    assert (beat.doing, beat.peers, beat.waiting, beat.in_pass) == (
        "F mb=0 of stage 1", (), False, True,
    )  # fmt: skip
    assert heartbeat.beat() == beat


def test_a_new_pass_over_the_same_place_is_a_new_mark(page):
    heartbeat = Heartbeat(page)
    marks = set()
    for _ in range(3):
        heartbeat.begin((0, 0), fresh=False)
        heartbeat.words[STATE] = 5 << 1
        marks.add(read_mark(page))
    assert len(marks) == 3


def test_only_a_flush_counts_as_part_of_a_pass(page):
    heartbeat = Heartbeat(page)
    heartbeat.begin((0, 0), fresh=False)
    found = {}
    for phase in Phase:
        heartbeat.phase(phase)
        assert heartbeat.words[STATE] == PHASE | phase
        found[phase.name] = read_beat(page).in_pass
    flushes = {"SENDING", "SHARING", "REDUCING", "UPDATING"}
    assert {name for name, counts in found.items() if counts} == flushes


def test_notes_names_and_commands_do_not_overwrite_each_other(page):
    first, second = Heartbeat(page), Heartbeat(page)  # two parts of one process
    assert read_note(page) == (None, 0.0)
    first.tell("/a/run", watch_s=2.5)
    where = second.names([("STEP of stage 0", (), "")])
    second.begin(where, fresh=False)
    second.words[STATE] = 0
    assert read_note(page) == ("/a/run", 2.5)
    assert read_beat(page).doing == "STEP of stage 0"
    assert not second.told_to_leave
    first.others("rank 0 on a; rank 1 on b")
    first.phase(Phase.SHARING)
    assert read_beat(page).describe().endswith("its pipeline (rank 0 on a; rank 1 on b)")
    tell_to_leave(page)
    assert first.told_to_leave
    assert second.told_to_leave


def test_a_heartbeat_that_nobody_reads_works_alike():
    heartbeat = Heartbeat()
    heartbeat.begin(heartbeat.names([("F mb=0 of stage 0", (), "")]), fresh=False)
    heartbeat.words[STATE] = 0
    heartbeat.tell("/a/run", watch_s=1)
    assert heartbeat.beat().doing == "F mb=0 of stage 0"
    assert not heartbeat.told_to_leave
