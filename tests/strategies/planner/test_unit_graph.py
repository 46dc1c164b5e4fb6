"""Cuts of graphs: along the order against the integer program, which needs scipy."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest

from strategies.errors import ModelError
from strategies.planner.cut import (
    Tensor,
    UnitGraph,
    chain_graph,
    crossing_bytes,
    cut_in_order,
)


def chain(draw: random.Random) -> UnitGraph:
    count = draw.randint(5, 12)
    return chain_graph(
        [draw.randint(1, 9) for _ in range(count)], [draw.randint(1, 9) for _ in range(count)]
    )


def two_towers(draw: random.Random) -> UnitGraph:
    """Two chains, one after the other in the order, that meet in the last unit."""
    first, second = draw.randint(2, 4), draw.randint(2, 4)
    count = first + second + 1
    tensors = [Tensor(i, (i + 1,), draw.randint(1, 9)) for i in range(first - 1)]
    tensors += [Tensor(i, (i + 1,), draw.randint(1, 9)) for i in range(first, first + second)]
    tensors.append(Tensor(first - 1, (count - 1,), draw.randint(1, 9)))
    return UnitGraph(tuple(float(draw.randint(1, 9)) for _ in range(count)), tuple(tensors))


def u_net(draw: random.Random) -> UnitGraph:
    """A chain whose unit i is also used by the unit that mirrors it."""
    half = draw.randint(2, 5)
    count = 2 * half
    sizes = [float(draw.randint(1, 9)) for _ in range(count)]
    tensors = tuple(
        Tensor(i, (i + 1, count - 1 - i) if i + 1 < count - 1 - i else (i + 1,), sizes[i])
        for i in range(count - 1)
    )
    return UnitGraph(tuple(float(draw.randint(1, 9)) for _ in range(count)), tensors)


def branches(draw: random.Random) -> UnitGraph:
    """A trunk into branches that are listed in turns, so that a cut of the order cuts all."""
    arms, length = 3, 3
    count = 1 + arms * length + 1
    tensors = [Tensor(0, tuple(range(1, arms + 1)), 1.0)]
    for step in range(length - 1):
        for arm in range(arms):
            unit = 1 + step * arms + arm
            tensors.append(Tensor(unit, (unit + arms,), 10.0))
    tensors += [Tensor(count - 2 - arm, (count - 1,), 1.0) for arm in range(arms)]
    return UnitGraph((1.0,) * count, tuple(tensors))


def stages_of(units: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(stage for stage, number in enumerate(units) for _ in range(number))


def slowest(graph: UnitGraph, stages: tuple[int, ...]) -> float:
    return max(
        sum(t for t, s in zip(graph.times, stages, strict=True) if s == wanted)
        for wanted in set(stages)
    )


@pytest.mark.parametrize("make", [chain, two_towers, u_net])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_order_is_cut_as_well_as_the_integer_program_cuts(make, seed, num_stages):
    pytest.importorskip("scipy")
    from strategies.planner.ilp import cut_by_ilp

    graph = make(random.Random(seed))
    units = cut_in_order(graph, num_stages, balance_ratio=1.3)
    assert units is not None
    found = cut_by_ilp(graph, num_stages, balance_ratio=1.3)
    limit = max(1.3 * sum(graph.times) / num_stages, slowest(graph, stages_of(units)))
    assert slowest(graph, found) <= limit * (1 + 1e-6)
    assert set(found) == set(range(num_stages))
    for tensor in graph.tensors:
        assert all(found[tensor.producer] <= found[unit] for unit in tensor.consumers)
    best = crossing_bytes(graph, found)
    mine = crossing_bytes(graph, stages_of(units))
    if make is two_towers:
        # The towers have no order between them; one order is as good or a little worse.
        assert best <= mine + 1e-6
    else:
        assert best == pytest.approx(mine)


def test_branches_listed_in_turns_are_cut_better_without_an_order():
    pytest.importorskip("scipy")
    from strategies.planner.ilp import cut_by_ilp

    graph = branches(random.Random(0))
    units = cut_in_order(graph, 3, balance_ratio=1.4)
    assert units is not None
    found = cut_by_ilp(graph, 3, balance_ratio=1.4)
    assert crossing_bytes(graph, found) < 0.72 * crossing_bytes(graph, stages_of(units))


def test_a_tensor_with_several_users_behind_a_cut_is_sent_once():
    graph = UnitGraph((1.0, 1.0, 1.0), (Tensor(0, (1, 2), 8.0), Tensor(1, (2,), 1.0)))
    assert graph.live_bytes == (8.0, 9.0, 0.0)
    assert crossing_bytes(graph, (0, 1, 1)) == 8.0
    assert crossing_bytes(graph, (0, 1, 2)) == 17.0


@pytest.mark.parametrize("seed", range(20))
def test_bytes_along_the_order_are_those_that_cross(seed):
    graph = u_net(random.Random(seed))
    units = cut_in_order(graph, 3, balance_ratio=2.0)
    assert units is not None
    ends = list(accumulate(units))[:-1]
    crossing = crossing_bytes(graph, stages_of(units))
    assert crossing == sum(graph.live_bytes[end - 1] for end in ends)
    assert all(low < high for low, high in pairwise([0, *ends]))


def test_a_tensor_used_before_it_is_made_is_refused():
    with pytest.raises(ModelError, match="unit 0 uses what unit 1 makes"):
        UnitGraph((1.0, 1.0), (Tensor(1, (0,), 1.0),))


def test_without_scipy_the_message_says_what_to_install(monkeypatch):
    import sys

    from strategies.errors import PlanError
    from strategies.planner.ilp import cut_by_ilp

    for name in ("scipy", "scipy.optimize", "scipy.sparse"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PlanError, match=r"pip install 'scipy>=1\.14'"):
        cut_by_ilp(chain_graph([1, 1], [1, 1]), 2, balance_ratio=1.1)
