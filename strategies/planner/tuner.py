"""Every recompute policy and microbatch size of one layout, simulated with all its bytes.

The search over layouts looks at a few policies and leaves out what others dominate. Over one layout
there is time for all: of each candidate the lists that would run are timed, with the bytes that its
buffers take, and whatever is not listed has a refusal with a number.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

from strategies.compiler import no_collection
from strategies.errors import PlanError
from strategies.plan import NO_RECOMPUTE, Recompute
from strategies.planner.cut import SAME
from strategies.planner.group import Group, cut_again, groups
from strategies.planner.layout_search import Answer, Rejected, rank_key
from strategies.planner.outcome import Outcome, Refusal, evaluate
from strategies.planner.problem import Layout, Order, Problem
from strategies.planner.space import Space, degrees, layouts

POLICIES = (
    NO_RECOMPUTE,
    Recompute("selective"),
    Recompute("optimal"),
    Recompute("mario"),
    Recompute("full"),
)
"""What is tried where no policy is pinned; of equally good ones the first."""

# What is listed or refused as one: the layouts of a tuner differ in their microbatches only.
_Key = tuple[Layout, Recompute]


def tune(problem: Problem, space: Space, *, top_k: int = 5) -> Answer:
    """Compares every policy and microbatch size of one layout; the best candidate of each counts.

    The space's degrees and schedule are pinned; at most ``top_k`` are listed.
    """
    began = time.perf_counter()
    best: dict[_Key, Outcome] = {}
    refused: dict[_Key, Refusal] = {}
    worst, num_simulated, is_free = float("inf"), 0, space.recompute is None

    def refuse(refusal: Refusal) -> None:
        """Keeps the reason that says most."""
        key = (refusal.layout, refusal.recompute)
        refused[key] = min(refusal, refused.get(key, refusal), key=_says_most)

    with no_collection():
        # The earliest bound first; of equal ones the policy that is simplest.
        found = sorted(candidates(problem, space), key=lambda each: each[0].bound)
        for group, order in found:
            key, limit = (group.layout, group.recompute), problem.room(group.layout)
            if group.bound > worst * (1 + SAME):
                refuse(Refusal(*key, "slower", step_time_s=group.bound, exact=False))
                # Whether a policy fits, only all its programs show.
                if key in best or refused[key].reason != "memory":
                    continue
            elif group.least_bytes > limit:
                refuse(Refusal(*key, "memory", group.least_bytes, exact=False))
                continue
            num_simulated += 1
            outcome = fitted(problem, space, group, order)
            if outcome is None:
                refuse(Refusal(*key, "memory"))
            elif outcome.peak_bytes > limit:
                refuse(Refusal(*key, "memory", outcome.peak_bytes, outcome.step_time_s))
            elif is_free and key[1].policy == "optimal" and not outcome.recomputes:
                refuse(Refusal(*key, "same", step_time_s=outcome.step_time_s))
            else:
                best[key] = min(best.get(key, outcome), outcome, key=rank_key)
                if len(best) >= top_k:
                    worst = sorted(each.step_time_s for each in best.values())[top_k - 1]
    ranked = sorted(best.values(), key=rank_key)
    for outcome in ranked[top_k:]:
        refuse(Refusal(*_key(outcome), "slower", step_time_s=outcome.step_time_s))
    listed = {_key(outcome) for outcome in ranked[:top_k]}
    refusals = sorted((r for key, r in refused.items() if key not in listed), key=_fits_first)
    number = Counter(refusal.reason for refusal in refusals)
    return Answer(
        tuple(ranked[:top_k]),
        Rejected(memory=number["memory"], slower=number["slower"], dominated=number["same"]),
        len(found),
        num_simulated,
        search_s=time.perf_counter() - began,
        refusals=tuple(refusals),
    )


def nearest(problem: Problem, space: Space) -> list[Outcome]:
    """Where nothing fits: all candidates but those that keep to the memory, smallest first."""
    found = [
        fitted(problem, space, group, order)
        for group, order in candidates(problem, space)
        if group.recompute.policy != "optimal" or space.recompute is not None
    ]
    known = (outcome for outcome in found if outcome is not None)
    return sorted(known, key=lambda outcome: (outcome.peak_bytes, rank_key(outcome)))


def candidates(problem: Problem, space: Space) -> Iterator[tuple[Group, Order]]:
    """All candidates of a space whose degrees are pinned, each as an order of its group."""
    for tp, pp, dp in degrees(space, problem):
        if problem.refuse_tp(tp) is not None:
            continue
        for layout in layouts(space, problem, tp, pp, dp):
            for recompute in space.recomputes:
                for group in groups(problem, space, layout, recompute):
                    for order in group.orders:
                        yield group, order


def simulated(problem: Problem, group: Group, order: Order) -> Outcome | None:
    """With all its bytes; None where optimal finds no order."""
    try:
        return evaluate(problem, group, order, buffers=True)
    except PlanError:
        if group.recompute.policy != "optimal":
            raise
        return None


_MOST_CUTS = 8


def fitted(problem: Problem, space: Space, group: Group, order: Order) -> Outcome | None:
    """As ``simulated``; where that needs too much, units are cut again for what ranks really hold.

    Of cuts that all need too much, that which needs least.
    """
    best = found = simulated(problem, group, order)
    for _ in range(_MOST_CUTS):
        if found is None or found.peak_bytes <= problem.room(group.layout):
            break
        again = cut_again(problem, space, found.group, order, found.rank_bytes)
        if again is None:
            break
        found = simulated(problem, again, order)
        assert found is not None and best is not None  # no order is searched for
        best = min(best, found, key=lambda outcome: outcome.peak_bytes)
    return best


def _key(outcome: Outcome) -> _Key:
    return outcome.group.layout, outcome.group.recompute


def _fits_first(refusal: Refusal) -> tuple[object, ...]:
    """What fits before what does not; the fastest, or what needs least, first."""
    never = float("inf")
    return (
        refusal.reason == "memory",
        refusal.needed_bytes or (never if refusal.reason == "memory" else 0),
        refusal.step_time_s or never,
        refusal.layout.microbatch_size,
        refusal.recompute.policy,
    )


def _says_most(refusal: Refusal) -> tuple[object, ...]:
    return (not refusal.exact, *_fits_first(refusal))


# ----------------------------------------------------------------------------------------- longest


def longest(
    fits: Callable[[int], bool], *, start: int, step: int, least: int, most: int
) -> int | None:
    """The largest of ``start + k * step`` that fits; None if none does.

    Strides double from the start, a guess between ``least`` and ``most``, until they leave what
    fits, then halve: as many trials as the logarithm of the distance, so a good guess costs two.
    ``fits`` is True up to some number.

    >>> longest(lambda n: n <= 1000, start=64, step=8, least=1, most=4096)
    1000
    >>> longest(lambda n: n <= 10, start=64, step=8, least=1, most=4096)
    8
    """
    low, high = -((start - least) // step), (most - start) // step

    def at(place: int) -> bool:
        return fits(start + place * step)

    good, bad = (0, None) if at(0) else (None, 0)
    stride = 1
    while good is None or bad is None:
        if good is not None:
            place = min(good + stride, high)
            if place == good:
                return start + good * step
            good, bad = (place, None) if at(place) else (good, place)
        else:
            assert bad is not None
            place = max(bad - stride, low)
            if place == bad:
                return None
            good, bad = (place, bad) if at(place) else (None, place)
        stride *= 2
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if at(middle) else (good, middle)
    return start + good * step
