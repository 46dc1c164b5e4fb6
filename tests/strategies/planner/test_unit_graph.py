"""Cuts that send little: against every cut of a chain, and of graphs with long skips."""

from __future__ import annotations

import random
from itertools import accumulate, combinations, pairwise

import pytest

from strategies.planner.cut import Tensor, cut_chain, handed_on


def chain(draw: random.Random) -> list[Tensor]:
    return [Tensor(i, (i + 1,), draw.randint(1, 9)) for i in range(draw.randint(4, 11))]


def two_towers(draw: random.Random) -> list[Tensor]:
    """Two chains, one after the other in the order, that meet in the last unit."""
    first, second = draw.randint(2, 4), draw.randint(2, 4)
    last = first + second
    tensors = [Tensor(i, (i + 1,), draw.randint(1, 9)) for i in range(first - 1)]
    tensors += [Tensor(i, (i + 1,), draw.randint(1, 9)) for i in range(first, last)]
    return [*tensors, Tensor(first - 1, (last,), draw.randint(1, 9))]


def u_net(draw: random.Random) -> list[Tensor]:
    """A chain whose unit i is also used by the unit that mirrors it."""
    count = 2 * draw.randint(2, 5)
    return [
        Tensor(i, tuple(sorted({i + 1, max(i + 1, count - 1 - i)})), draw.randint(1, 9))
        for i in range(count - 1)
    ]


def sent_behind(tensors: list[Tensor], count: int) -> list[float]:
    """What a cut behind each unit sends: all that is used further on, each tensor once."""
    return [
        sum(t.num_bytes for t in tensors if t.producer <= unit < max(t.consumers))
        for unit in range(count)
    ]


@pytest.mark.parametrize("make", [chain, two_towers, u_net])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("ratio", [0.0, 1.3])
def test_no_cut_within_the_balance_sends_less(make, seed, num_stages, ratio):
    draw = random.Random(seed)
    tensors = make(draw)
    count = 1 + max(max(t.consumers) for t in tensors)
    times = [draw.randint(1, 9) for _ in range(count)]
    behind = sent_behind(tensors, count)

    def slowest(ends):
        return max(sum(times[low:high]) for low, high in pairwise((0, *ends, count)))

    every = list(combinations(range(1, count), num_stages - 1))
    limit = max(ratio * sum(times) / num_stages, min(map(slowest, every))) * (1 + 1e-9)
    least = min(sum(behind[end - 1] for end in ends) for ends in every if slowest(ends) <= limit)
    units = cut_chain(times, num_stages, sent=behind, balance_ratio=ratio)
    assert units is not None
    ends = tuple(accumulate(units))[:-1]
    assert slowest(ends) <= limit
    assert sum(behind[end - 1] for end in ends) == least
    # What stages hand on, over all boundaries that it crosses, is what the cut goes by.
    handed = handed_on(tensors, units)
    assert sum(size * (target - source) for source, target, size in handed) == least


def test_a_tensor_with_several_users_behind_a_cut_is_sent_once():
    tensors = (Tensor(0, (1, 2), 8.0), Tensor(1, (2,), 1.0))
    assert handed_on(tensors, (1, 2)) == ((0, 1, 8),)
    assert handed_on(tensors, (1, 1, 1)) == ((0, 1, 8), (1, 2, 9))
