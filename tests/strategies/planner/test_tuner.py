"""The tuner against simulating every program of a layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.plan import Recompute
from strategies.planner.layout_search import rank_key
from strategies.planner.problem import Problem
from strategies.planner.space import Space
from strategies.planner.tuner import POLICIES, candidates, longest, nearest, simulated, tune
from tests.strategies.planner.models import problem


def space(**changes) -> Space:
    return Space(
        4, 16, tp=1, pp=2, dp=2, schedule="1f1b", policies=POLICIES, sizes=(1, 2, 4, 8), **changes
    )


def limited(memory: float) -> Problem:
    """Ranks of that memory, which recompute=optimal fills."""
    asked = problem(4, memory=memory)
    hardware = replace(asked.machine.hardware, memory_gb=memory / 1e9)
    return replace(asked, machine=replace(asked.machine, hardware=hardware))


# A limit that some policies do not meet, every day: tests/launcher/test_tuning.
@pytest.mark.parametrize(
    "memory",
    [1e9, *(pytest.param(memory, marks=pytest.mark.full) for memory in (0.16e9, 0.12e9))],
)
def test_it_lists_what_simulating_everything_finds_best(memory):
    asked = limited(memory)
    best = {}
    for group, order in candidates(asked, space()):
        outcome = simulated(asked, group, order)
        if outcome is None or outcome.peak_bytes > memory:
            continue
        if group.recompute.policy == "optimal" and not outcome.recomputes:
            continue
        key = (outcome.candidate.layout, outcome.candidate.recompute)
        if key not in best or rank_key(outcome) < rank_key(best[key]):
            best[key] = outcome
    wanted = sorted(best.values(), key=rank_key)
    found = tune(asked, space(), top_k=3)
    assert [plan.candidate for plan in found.plans] == [o.candidate for o in wanted[:3]]
    assert found.plans
    assert found.num_simulated <= found.num_candidates
    assert any(refusal.reason == "memory" for refusal in found.refusals) == (memory < 1e9)
    # What was left out by its bound is slower than what is listed.
    times = {key: outcome.step_time_s for key, outcome in best.items()}
    for refusal in found.refusals:
        key = (refusal.layout, refusal.recompute)
        if refusal.reason == "slower" and key in times:
            assert refusal.step_time_s <= times[key] * (1 + 1e-9)
            assert refusal.step_time_s >= found.plans[-1].step_time_s * (1 - 1e-9)
        if refusal.reason == "memory" and refusal.exact:
            assert key not in times


def test_what_needs_least_is_named_where_nothing_fits():
    asked = limited(1e6)
    found = tune(asked, space(), top_k=3)
    assert found.plans == ()
    everything = [simulated(asked, group, order) for group, order in candidates(asked, space())
                  if group.recompute.policy != "optimal"]  # fmt: skip
    smallest = nearest(asked, space())
    assert smallest[0].peak_bytes == min(outcome.peak_bytes for outcome in everything)
    assert len(smallest) == len(everything)
    assert {refusal.reason for refusal in found.refusals} == {"memory"}


def test_a_pinned_policy_is_the_only_one():
    found = tune(problem(4), space(recompute=POLICIES[-1]), top_k=9)
    assert {plan.candidate.recompute.policy for plan in found.plans} == {"full"}
    assert {plan.candidate.layout.microbatch_size for plan in found.plans} == {1, 2, 4, 8}


def test_a_pinned_policy_that_has_nothing_to_recompute_is_listed():
    """Free, it is refused as the same as no recomputation; pinned, it is what was asked for."""
    optimal = space(recompute=Recompute("optimal"))
    (best,) = tune(problem(4), optimal, top_k=1).plans
    assert best.candidate.recompute.policy == "optimal"
    assert not best.recomputes


@given(st.integers(-5, 300), st.integers(1, 250), st.integers(1, 9))
def test_it_is_the_largest_number_of_the_grid_that_fits(limit, start, step):
    found = longest(lambda n: n <= limit, start=start, step=step, least=1, most=250)
    grid = [n for n in range(1, 251) if (n - start) % step == 0 and n <= limit]
    assert found == max(grid, default=None)


@pytest.mark.parametrize(("start", "most_trials"), [(1000, 2), (900, 14), (4, 22)])
def test_a_good_guess_takes_few_trials(start, most_trials):
    tried = []

    def fits(number):
        tried.append(number)
        return number <= 1000

    assert longest(fits, start=start, step=1, least=1, most=10**6) == 1000
    assert len(tried) <= most_trials
