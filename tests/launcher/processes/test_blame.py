"""Who failed first, where the first to complain is a neighbour."""

from __future__ import annotations

from launcher.processes.blame import blame
from launcher.processes.failure import Failure
from strategies.heartbeat import Beat


def failed(rank: int, message: str, *, at: float = 1.0, code: int = 1) -> Failure:
    return Failure(rank, "host", at, "RuntimeError", message, code)


def beat(doing: str, *peers: int, waiting: bool = False) -> Beat:
    return Beat(3, doing, peers, waiting, True, (1, 1))


TIMED_OUT = "Timed out waiting 5000ms for recv operation to complete\nmore"


def test_a_killed_rank_comes_before_those_that_have_lost_it():
    killed = Failure(2, "host", 2.0, "SIGKILL", "ended by SIGKILL", -9)
    reset = failed(1, "Connection reset by peer", at=1.0)
    beats = {rank: beat("F") for rank in range(3)}
    assert blame([reset, killed], beats, {0: 0.0}) is killed


def test_a_rank_that_says_why_comes_before_those_that_have_lost_it():
    reason = failed(0, "CUDA error", at=9.0)
    assert blame([failed(1, TIMED_OUT), reason], {0: beat("F"), 1: beat("F")}, {}) is reason


def test_who_gave_up_waiting_leads_to_the_one_that_was_waited_for():
    beats = {
        0: beat("between two passes"),
        1: beat("RECV", 0, waiting=True),
        2: beat("RECV", 1, waiting=True),
    }
    found = blame([failed(2, TIMED_OUT)], beats, {0: 130.0, 1: 120.0})
    assert (found.rank, found.kind, found.exit_code) == (0, "no progress", 1)
    assert found.message == (
        "it has not gone on for 130.0 s, and rank 2 has given up waiting: RuntimeError: "
        "Timed out waiting 5000ms for recv operation to complete"
    )


def test_where_everybody_has_given_up_the_first_one_speaks():
    beats = {0: beat("RECV", 1, waiting=True), 1: beat("RECV", 0, waiting=True)}
    first = failed(1, TIMED_OUT, at=1.0)
    assert blame([failed(0, TIMED_OUT, at=2.0), first], beats, {}) is first


def test_of_a_collective_the_rank_that_is_not_in_it_is_the_cause():
    sharing = beat("sharing loss", waiting=True)
    beats = {0: sharing, 1: sharing, 2: beat("F mb=1 of stage 2"), 3: sharing}
    assert blame([failed(3, TIMED_OUT)], beats, {0: 5.0, 1: 5.0, 2: 4.0}).rank == 2
