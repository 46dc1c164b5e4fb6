"""Who is reported, and who is left alone however long it takes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from launcher.processes.watchdog import Pages, State, Watchdog, own_heartbeat, state_of
from strategies.heartbeat import STATE, WAITING, Heartbeat, Phase

F, RECV = 0, 1


class Bench:
    """Ranks that do what a test says, and a clock that goes when it says."""

    def __init__(self, count: int, **options: float) -> None:
        self.pages = Pages.make(count)
        self.states = [State.RUNNING] * count
        self.now = 100.0
        self.ranks = [Heartbeat(file) for file in self.pages.files]
        for rank, heartbeat in enumerate(self.ranks):
            names = [("F mb=0 of stage 0", (), ""), ("RECV act mb=0 from stage 0", (rank - 1,), "")]
            where = heartbeat.names(names)
            heartbeat.begin(where, fresh=True)
            heartbeat.begin(where, fresh=False)
        self.dog = Watchdog(
            self.pages, 10.0, self.states.__getitem__, clock=lambda: self.now, **options
        )

    def waits(self, rank: int) -> None:
        self.ranks[rank].words[STATE] = RECV << 1 | WAITING

    def computes(self, rank: int) -> None:
        self.ranks[rank].words[STATE] = F << 1

    def after(self, seconds: float):
        """Looks every second; the first report."""
        end = self.now + seconds
        while self.now < end:
            found = self.dog.look()
            if found is not None:
                return found
            self.now += 1
        return self.dog.look()


@pytest.fixture
def bench():
    made = []

    def make(count: int, **options: float) -> Bench:
        made.append(Bench(count, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.pages.close()


def test_the_one_that_others_wait_for_is_named_not_the_neighbour(bench):
    it = bench(4)
    it.computes(0)
    for rank in (1, 2, 3):
        it.waits(rank)
    assert it.after(9) is None
    found = it.after(2)
    assert (found.index, found.kind) == (0, "no progress")
    assert found.message == (
        "it has not gone on for 10.0 s and others wait for it (trainer.watchdog_s=10)"
    )


def test_ranks_that_all_wait_have_lost_a_message(bench):
    it = bench(2)
    it.waits(1)
    names = it.ranks[0].names([("", (), ""), ("RECV grad mb=0 from stage 1", (1,), "")])
    it.ranks[0].begin(names, fresh=False)
    it.waits(0)
    assert "waits itself, so a message is lost" in it.after(11).message


@pytest.mark.parametrize("phase", [Phase.BETWEEN, Phase.SAVING, Phase.SETTING_UP, Phase.STARTING])
def test_loading_saving_and_starting_may_take_as_long_as_they_like(bench, phase):
    it = bench(2)
    it.ranks[0].phase(phase)
    it.waits(1)
    assert it.after(1000) is None


def test_a_first_pass_may_compile_and_compiled_code_has_its_own_patience(bench):
    it = bench(2)
    it.ranks[0].begin((0, 0), fresh=True)
    it.computes(0)
    it.waits(1)
    assert it.after(1000) is None
    patient = bench(2, patience_s=100.0)
    patient.computes(0)
    patient.waits(1)
    assert patient.after(98) is None
    assert patient.after(3).index == 0


def test_slow_ranks_that_go_on_are_left_alone(bench):
    it = bench(3)
    it.waits(1)
    it.waits(2)  # for the whole warm-up of rank 0
    for _ in range(20):
        it.ranks[0].words[STATE] = F << 1
        assert it.after(4) is None
        it.ranks[0].words[STATE] = RECV << 1
        assert it.after(4) is None


def test_nobody_waits_for_a_single_rank(bench):
    it = bench(1)
    it.computes(0)
    assert it.after(1000) is None


def test_a_stopped_process_is_named_wherever_it_is(bench):
    it = bench(2)
    it.ranks[1].phase(Phase.BETWEEN)
    assert it.after(5) is None
    it.states[1] = State.STOPPED
    assert it.after(9) is None
    found = it.after(3)
    assert (found.index, found.kind) == (1, "SIGSTOP")
    assert found.message == "its process has been stopped for 10.0 s (trainer.watchdog_s=10)"


def test_a_process_in_a_debugger_or_stopped_for_a_moment_is_left_alone(bench):
    it = bench(2)
    it.computes(0)
    it.waits(1)
    it.states[0] = State.TRACED
    assert it.after(1000) is None
    for _ in range(5):
        it.states[1] = State.STOPPED
        assert it.after(6) is None
        it.states[1] = State.RUNNING
        assert it.after(1) is None


def test_a_stopped_rank_that_waits_itself_is_named_and_not_those_that_wait_for_it(bench):
    it = bench(2)
    names = it.ranks[0].names([("", (), ""), ("RECV grad mb=0 from stage 1", (1,), "")])
    it.ranks[0].begin(names, fresh=False)
    it.waits(0)
    it.waits(1)
    it.now += 0.5
    it.states[1] = State.STOPPED
    found = it.after(15)
    assert (found.index, found.kind) == (1, "SIGSTOP")


def test_time_in_which_the_watching_process_did_not_run_does_not_count(bench):
    it = bench(2)
    it.computes(0)
    it.waits(1)
    assert it.after(5) is None
    it.now += 3600
    assert it.dog.look() is None
    assert it.after(9) is None
    assert it.after(2).index == 0


def test_a_pause_is_known_for_a_while(bench):
    it = bench(2)
    assert it.after(5) is None
    assert it.dog.paused_s(10) == 0
    it.now += 3600
    assert it.dog.paused_s(10) == 3600  # it has not looked since
    assert it.after(9) is None
    assert it.dog.paused_s(10) == 3600
    it.after(2)
    assert it.dog.paused_s(10) == 0


def test_a_deadline_of_0_never_ends_a_run(bench):
    it = bench(2)
    it.dog.deadline_s = 0.0
    it.computes(0)
    it.waits(1)
    it.states[0] = State.STOPPED
    assert it.after(1000) is None
    assert it.dog.idle_s(0) == 1000


def test_what_the_kernel_says_of_a_process():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert state_of(process.pid) is State.RUNNING
        process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 5
        while state_of(process.pid) is not State.STOPPED:
            assert time.monotonic() < until
    finally:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert state_of(process.pid) is State.GONE  # a zombie
        process.wait()
    assert state_of(process.pid) is State.GONE


def test_a_rank_finds_its_page_in_its_environment():
    pages = Pages.make(2)
    own_heartbeat(pages.variables(1)).step(3)
    assert (pages.beat(0).step, pages.beat(1).step) == (0, 3)
    assert own_heartbeat({}).beat().step == 0
    pages.close()


def test_ranks_that_all_load_data_are_told_and_then_ended(bench):
    told: list[str] = []
    it = bench(2, data_s=60.0, warn=told.append)
    for rank in (0, 1):
        it.ranks[rank].phase(Phase.BETWEEN)
    assert it.after(40) is None
    assert told == [
        "warning: no rank has gone on for 30 s: all are between two steps, so a loader or a "
        "callback has not come back yet"
    ]
    found = it.after(30)
    assert (found.index, found.kind) == (0, "no data")
    assert found.message.endswith("has not come back (trainer.data_timeout_s=60)")


def test_one_rank_that_goes_on_keeps_the_others_from_being_ended(bench):
    it = bench(2, data_s=60.0)
    it.ranks[0].phase(Phase.BETWEEN)
    for _ in range(30):
        it.computes(1)
        assert it.after(5) is None
        it.ranks[1].phase(Phase.BETWEEN)
        assert it.after(5) is None
    it.ranks[1].phase(Phase.SAVING)
    assert it.after(9) is None
