"""Every recompute policy and microbatch size of one layout, simulated with all its bytes.

The search over layouts looks at a few policies and leaves out what others dominate. Over one layout
there is time for all: of each candidate the lists that would run are timed, with the bytes that its
buffers take, and whatever is not listed has a refusal with a number.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from heapq import heapify, heappop

from strategies.analysis.memory import peak_memory_bytes
from strategies.compiler import compile_plan, no_collection
from strategies.errors import PlanError
from strategies.ir.program import recomputed_pairs
from strategies.plan import NO_RECOMPUTE, Recompute
from strategies.planner.group import Group, cut_again, groups
from strategies.planner.layout_search import SAME, Answer, Rejected, rank_key
from strategies.planner.outcome import (
    Outcome,
    Refusal,
    full_memory,
    needs_program,
    plan_of,
    program_step,
    times,
)
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


def tune(problem: Problem, space: Space, *, top_k: int = 5) -> Answer:
    """Compares every policy and microbatch size of one layout; the best candidate of each counts.

    The space's degrees and schedule are pinned; at most ``top_k`` are listed.
    """
    began = time.perf_counter()
    with no_collection():
        answer = _Tuner(problem, space, top_k).run(candidates(problem, space))
    return replace(answer, search_s=time.perf_counter() - began)


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
    """A program's time, and its bytes with all buffers; None where optimal finds no order."""
    plan = plan_of(group, order)
    if not needs_program(group, order):
        found = times(problem, group, order)
        return Outcome(
            group.candidate(order),
            plan,
            found.makespan if problem.machine.waits_at_flush else found.period,
            tuple(held.total for held in full_memory(problem, group, order)),
            group.bound,
            group,
            recomputes=group.recompute.rewrites,
        )
    try:
        program = compile_plan(plan).train
    except PlanError:
        if group.recompute.policy != "optimal":
            raise
        return None
    held = peak_memory_bytes(program, group.costs.table(program))
    return Outcome(
        group.candidate(order),
        plan,
        program_step(program, group.costs, waits=problem.machine.waits_at_flush),
        tuple(value for value in held if value is not None),
        group.bound,
        group,
        recomputes=bool(recomputed_pairs(program)),
    )


_MOST_CUTS = 8


def fitted(problem: Problem, space: Space, group: Group, order: Order) -> Outcome | None:
    """As ``simulated``; where that needs too much, units are cut again for what ranks really hold.

    Of cuts that all need too much, that which needs least.
    """
    best = found = simulated(problem, group, order)
    for _ in range(_MOST_CUTS):
        if found is None or found.peak_bytes <= problem.machine.memory_bytes:
            break
        again = cut_again(problem, space, found.group, order, found.rank_bytes)
        if again is None:
            break
        found = simulated(problem, again, order)
        assert found is not None and best is not None  # no order is searched for
        best = min(best, found, key=lambda outcome: outcome.peak_bytes)
    return best


# What is listed or refused as one: the layouts of a tuner differ in their microbatches only.
_Key = tuple[Layout, Recompute]


class _Tuner:
    def __init__(self, problem: Problem, space: Space, top_k: int) -> None:
        self.problem = problem
        self.space = space
        self.limit = problem.machine.memory_bytes
        self.top_k = top_k
        self.best: dict[_Key, Outcome] = {}
        self.refused: dict[_Key, Refusal] = {}
        self.known: list[Outcome] = []
        self.num_simulated = 0

    def run(self, found: Iterable[tuple[Group, Order]]) -> Answer:
        # The earliest bound first; of equal ones the policy that is simplest.
        queue = [
            (group.bound, POLICIES.index(group.recompute) if group.recompute in POLICIES else 0,
             number, group, order)
            for number, (group, order) in enumerate(found)
        ]  # fmt: skip
        num_candidates = len(queue)
        heapify(queue)
        too_large: list[tuple[Group, Order]] = []
        too_slow: list[tuple[Group, Order]] = []
        while queue:
            bound, _, _, group, order = heappop(queue)
            key = (group.layout, group.recompute)
            if bound > self.worst * (1 + SAME):
                self.refuse(Refusal(*key, "slower", step_time_s=bound, exact=False))
                too_slow.append((group, order))
            elif group.least_bytes > self.limit:
                self.refuse(Refusal(*key, "memory", group.least_bytes, exact=False))
                too_large.append((group, order))
            else:
                self.consider(group, order)
        for group, order in too_slow:
            # Whether a policy fits is told by all its programs.
            key = (group.layout, group.recompute)
            if self.refused[key].reason == "memory" and key not in self.best:
                self.consider(group, order)
        ranked = sorted(self.best.values(), key=rank_key)
        if not ranked:
            for group, order in too_large:
                if group.recompute.policy != "optimal":
                    self.simulate(group, order)
        for outcome in ranked[self.top_k :]:
            self.refuse(Refusal(*_key(outcome), "slower", step_time_s=outcome.step_time_s))
        listed = {_key(outcome) for outcome in ranked[: self.top_k]}
        refusals = sorted(
            (refusal for key, refusal in self.refused.items() if key not in listed),
            key=_refusal_key,
        )
        smallest = plain = None
        if not ranked:
            unadorned = [o for o in self.known if o.candidate.recompute.policy == "none"]
            smallest = min(self.known, key=lambda o: (o.peak_bytes, *rank_key(o)), default=None)
            plain = min(unadorned, key=rank_key, default=None)
        return Answer(
            tuple(ranked[: self.top_k]),
            _rejected(refusals, smallest),
            num_candidates,
            self.num_simulated,
            search_s=0.0,
            refusals=tuple(refusals),
            smallest=smallest,
            plain=plain,
        )

    @property
    def worst(self) -> float:
        """Nothing slower will be listed."""
        best = sorted(outcome.step_time_s for outcome in self.best.values())
        return best[self.top_k - 1] if len(best) >= self.top_k else float("inf")

    def consider(self, group: Group, order: Order) -> None:
        key = (group.layout, group.recompute)
        outcome = self.simulate(group, order)
        if outcome is None:
            self.refuse(Refusal(*key, "memory"))
        elif outcome.peak_bytes > self.limit:
            self.refuse(
                Refusal(*key, "memory", outcome.peak_bytes, step_time_s=outcome.step_time_s)
            )
        elif group.recompute.policy == "optimal" and not outcome.recomputes:
            self.refuse(Refusal(*key, "same", step_time_s=outcome.step_time_s))
        else:
            before = self.best.get(key)
            if before is None or rank_key(outcome) < rank_key(before):
                self.best[key] = outcome

    def simulate(self, group: Group, order: Order) -> Outcome | None:
        self.num_simulated += 1
        outcome = fitted(self.problem, self.space, group, order)
        if outcome is not None:
            self.known.append(outcome)
        return outcome

    def refuse(self, refusal: Refusal) -> None:
        """Keeps the reason that says most."""
        where = (refusal.layout, refusal.recompute)
        before = self.refused.get(where)
        key = (not refusal.exact, *_refusal_key(refusal))
        if before is None or key < (not before.exact, *_refusal_key(before)):
            self.refused[where] = refusal


def _key(outcome: Outcome) -> _Key:
    return outcome.candidate.layout, outcome.candidate.recompute


def _rejected(refusals: Iterable[Refusal], smallest: Outcome | None) -> Rejected:
    count = Counter(refusal.reason for refusal in refusals)
    rejected = Rejected(memory=count["memory"], slower=count["slower"], dominated=count["same"])
    if smallest is not None:
        rejected.nearest = (smallest.peak_bytes, smallest.candidate)
    return rejected


def _refusal_key(refusal: Refusal) -> tuple[object, ...]:
    """What fits before what does not; the fastest, or what needs least, first."""
    never = float("inf")
    return (
        refusal.reason == "memory",
        refusal.needed_bytes or (never if refusal.reason == "memory" else 0),
        refusal.step_time_s or never,
        refusal.layout.microbatch_size,
        refusal.recompute.policy,
    )


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
