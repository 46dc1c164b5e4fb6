"""Cuts against every possible cut, and the figures that half-blocks are there for."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.workloads.transformer_shape import TransformerShape, unit_specs
from strategies.ir.placement import loop, v
from strategies.planner.cut import Room, cut_chain, even_ranks


def all_cuts(count: int, stages: int) -> list[tuple[int, ...]]:
    return [
        tuple(b - a for a, b in pairwise((0, *inner, count)))
        for inner in combinations(range(1, count), stages - 1)
    ]


def stage_sums(units: tuple[int, ...], values: list[float]) -> list[float]:
    return [sum(values[a:b]) for a, b in pairwise((0, *accumulate(units)))]


numbers = st.integers(1, 20).map(float)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=3, max_size=9), st.integers(1, 4))
def test_the_bottleneck_is_the_least_and_of_such_cuts_the_bytes_are(units, stages):
    stages = min(stages, len(units))
    times = [float(time) for time, _ in units]
    sent = [float(size) for _, size in units]
    found = cut_chain(times, stages, sent=sent)
    assert found is not None

    def figures(cut: tuple[int, ...]) -> tuple[float, float]:
        behind = list(accumulate(cut))[:-1]
        return max(stage_sums(cut, times)), sum(sent[end - 1] for end in behind)

    # Bytes are those that the DP has been given: a cut behind unit i sends sent[i].
    crossing = [0.0, *sent]
    best = min(
        (max(stage_sums(cut, times)), sum(crossing[e] for e in list(accumulate(cut))[:-1]))
        for cut in all_cuts(len(units), stages)
    )
    assert figures(found)[0] == best[0]
    assert sum(crossing[e] for e in list(accumulate(found))[:-1]) == best[1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(numbers, numbers, numbers), min_size=3, max_size=9),
    st.integers(2, 4),
    st.integers(20, 120),
)
def test_under_a_memory_limit_it_is_the_fastest_cut_that_fits(units, stages, limit):
    stages = min(stages, len(units))
    times, state, kept = (list(map(float, column)) for column in zip(*units, strict=True))
    held = tuple(float(stages - stage) for stage in range(stages))
    room = Room(tuple(state), tuple(kept), held, float(limit))
    fitting = [cut for cut in all_cuts(len(units), stages) if room.holds(cut)]
    found = cut_chain(times, stages, room=room)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert room.holds(found)
    assert max(stage_sums(found, times)) == min(max(stage_sums(c, times)) for c in fitting)


def test_empty_stages_are_allowed_where_they_are_asked_for():
    assert cut_chain([1, 1], 3) is None
    found = cut_chain([1, 1], 3, min_units=0)
    assert found is not None
    assert sum(found) == 2
    assert max(found) == 1


@pytest.mark.parametrize("place", [loop(2, 2), v(2, 2), loop(3, 2), v(2, 3), loop(2, 3)])
def test_ranks_with_several_stages_come_close_to_the_best_of_all_cuts(place):
    times = [0.5, *([1.0, 2.0] * 5), 4.0]
    owner = place.copies[0]

    def slowest(cut: tuple[int, ...]) -> float:
        loads = [0.0] * place.num_ranks
        for stage, value in enumerate(stage_sums(cut, times)):
            loads[owner[stage]] += value
        return max(loads)

    begin = cut_chain(times, place.num_stages)
    assert begin is not None
    found = even_ranks(begin, times, owner)
    best = min(slowest(cut) for cut in all_cuts(len(times), place.num_stages))
    assert slowest(found) <= slowest(begin)
    assert slowest(found) <= 1.1 * best


def test_half_blocks_bring_a_large_vocabulary_within_ten_percent_of_the_ideal():
    shape = TransformerShape(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128_256, sequence=8192
    )
    times = [max(1.0, float(unit.forward_flops)) for unit in unit_specs(shape)]
    blocks = [times[0], *(a + b for a, b in zip(times[1:-1:2], times[2:-1:2], strict=True))]
    blocks.append(times[-1])
    ideal = sum(times) / 8
    halves, whole = cut_chain(times, 8), cut_chain(blocks, 8)
    assert halves is not None
    assert whole is not None
    assert max(stage_sums(halves, times)) <= 1.10 * ideal
    assert max(stage_sums(whole, blocks)) > 1.12 * ideal
