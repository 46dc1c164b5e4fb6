"""Two threads of one rank: only one runs at a time, and what either raises is raised."""

import threading

import pytest
import torch

from strategies.models.expert_parallel import TwoThreads


def body(turns, name, seen, times=2):
    def run():
        for number in range(times):
            seen.append(f"{name}{number}")
            turns.switch()
        seen.append(f"{name} ends")

    return run


@pytest.fixture
def turns():
    made = TwoThreads(torch.device("cpu"))
    yield made
    made.close()


def test_threads_take_turns_until_one_has_ended(turns):
    for _ in range(2):
        seen = []
        turns.run(body(turns, "F", seen), body(turns, "B", seen, 3))
        assert seen == ["B0", "F0", "B1", "F1", "B2", "F ends", "B ends"]


def test_a_thread_may_go_on_in_a_thread_of_its_own(turns):
    seen = []

    def elsewhere():
        thread = threading.Thread(target=body(turns, "B", seen))
        thread.start()
        thread.join()

    turns.run(body(turns, "F", seen), elsewhere)
    assert seen == ["B0", "F0", "B1", "F1", "B ends", "F ends"]


def test_outside_of_a_pair_nobody_waits(turns):
    turns.switch()
    seen = []
    turns.run(body(turns, "F", seen, 0), body(turns, "B", seen))
    turns.switch()
    assert seen == ["B0", "F ends", "B1", "B ends"]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_either_breaks_the_other_off(turns, failing):
    seen = []

    def fails():
        turns.switch()
        raise ValueError("mine")

    threads = [body(turns, "S", seen, 5), body(turns, "S", seen, 5)]
    threads[failing] = fails
    with pytest.raises(ValueError, match="mine"):
        turns.run(*threads)
    assert "S ends" not in seen
    turns.run(body(turns, "F", seen), body(turns, "B", seen))  # as good as new


def test_random_numbers_of_a_thread_are_its_own(turns):
    drawn = {}

    def draws(name, seed):
        def run():
            torch.manual_seed(seed)
            first = torch.rand(1)
            turns.switch()
            drawn[name] = [float(first), float(torch.rand(1))]

        return run

    turns.run(draws("F", 1), draws("B", 2))
    for name, seed in (("F", 1), ("B", 2)):
        torch.manual_seed(seed)
        assert drawn[name] == [float(torch.rand(1)), float(torch.rand(1))]
