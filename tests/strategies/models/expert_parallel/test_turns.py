"""Two strands of one rank: only one runs at a time, and what either raises is raised."""

import threading

import pytest
import torch

from strategies.models.expert_parallel import Turns


def strand(turns, name, seen, times=2):
    def run():
        for number in range(times):
            seen.append(f"{name}{number}")
            turns.hand_on()
        seen.append(f"{name} ends")

    return run


@pytest.fixture
def turns():
    made = Turns(torch.device("cpu"))
    yield made
    made.close()


def test_strands_take_turns_until_one_has_ended(turns):
    for _ in range(2):
        seen = []
        turns.run(strand(turns, "F", seen), strand(turns, "B", seen, 3))
        assert seen == ["B0", "F0", "B1", "F1", "B2", "F ends", "B ends"]


def test_a_strand_may_go_on_in_a_thread_of_its_own(turns):
    seen = []

    def elsewhere():
        thread = threading.Thread(target=strand(turns, "B", seen))
        thread.start()
        thread.join()

    turns.run(strand(turns, "F", seen), elsewhere)
    assert seen == ["B0", "F0", "B1", "F1", "B ends", "F ends"]


def test_outside_of_a_pair_nobody_waits(turns):
    turns.hand_on()
    seen = []
    turns.run(strand(turns, "F", seen, 0), strand(turns, "B", seen))
    turns.hand_on()
    assert seen == ["B0", "F ends", "B1", "B ends"]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_either_breaks_the_other_off(turns, failing):
    seen = []

    def fails():
        turns.hand_on()
        raise ValueError("mine")

    strands = [strand(turns, "S", seen, 5), strand(turns, "S", seen, 5)]
    strands[failing] = fails
    with pytest.raises(ValueError, match="mine"):
        turns.run(*strands)
    assert "S ends" not in seen
    turns.run(strand(turns, "F", seen), strand(turns, "B", seen))  # as good as new


def test_random_numbers_of_a_strand_are_its_own(turns):
    drawn = {}

    def draws(name, seed):
        def run():
            torch.manual_seed(seed)
            first = torch.rand(1)
            turns.hand_on()
            drawn[name] = [float(first), float(torch.rand(1))]

        return run

    turns.run(draws("F", 1), draws("B", 2))
    for name, seed in (("F", 1), ("B", 2)):
        torch.manual_seed(seed)
        assert drawn[name] == [float(torch.rand(1)), float(torch.rand(1))]
