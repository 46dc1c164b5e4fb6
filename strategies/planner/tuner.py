"""Every recompute policy and microbatch size of one layout, compiled and simulated.

The search over layouts looks at a few policies and leaves out what others dominate. Over one layout
there is time for all: each setting is the program that would run, with the bytes that its buffers
take, and whatever is not listed has a reason with a number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop
from typing import Literal

from strategies.analysis.memory import peak_memory_bytes
from strategies.compiler import compile_plan, no_collection
from strategies.errors import PlanError
from strategies.ir.program import recomputed_pairs
from strategies.plan import NO_RECOMPUTE, Recompute
from strategies.planner.group import Group, groups
from strategies.planner.layout_search import rank_key
from strategies.planner.outcome import Outcome, plan_of
from strategies.planner.problem import Layout, Order, Problem
from strategies.planner.space import Space, degrees, layouts
from strategies.simulator.engine import simulate

Reason = Literal["memory", "slower", "same"]

_SAME = 1e-9

POLICIES = (
    NO_RECOMPUTE,
    Recompute("selective"),
    Recompute("optimal"),
    Recompute("mario"),
    Recompute("full"),
)
"""What is tried where no policy is pinned; of equally good ones the first."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a tuner decides.

    Attributes:
        recompute: The policy.
        microbatch_size: Sequences.
        num_microbatches: M per step and replica.
    """

    recompute: Recompute
    microbatch_size: int
    num_microbatches: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A setting that is not listed.

    Attributes:
        setting: Which one.
        reason: ``memory``: it does not fit; ``slower``: than the last one listed; ``same``: it
            recomputes nothing, so it is the program without recomputation.
        needed_bytes: On the worst rank; None where it fits, or where no order was found.
        step_time_s: A step's time; None where it was not simulated.
        exact: Whether the figure is the program's own, or a lower bound.
    """

    setting: Setting
    reason: Reason
    needed_bytes: int | None = None
    step_time_s: float | None = None
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was found for a layout.

    Attributes:
        plans: The best of each setting that fits, fastest first.
        refusals: All other settings, those that fit first.
        smallest: Where nothing fits: what needs least.
        plain: Where nothing fits: the fastest without recomputation.
        num_candidates: Programs that there are.
        num_simulated: How many were compiled and simulated.
        search_s: How long it took.
    """

    plans: tuple[Outcome, ...]
    refusals: tuple[Refusal, ...]
    smallest: Outcome | None
    plain: Outcome | None
    num_candidates: int
    num_simulated: int
    search_s: float


Choice = tuple[Group, Order]


def tune(problem: Problem, space: Space, *, top_k: int = 5) -> Tuning:
    """Compares all settings of a layout.

    Args:
        problem: Model and machine.
        space: With its degrees and schedule pinned.
        top_k: How many settings are listed at most.
    """
    began = time.perf_counter()
    with no_collection():
        found = _Tuner(problem, top_k).run(choices(problem, space))
    return replace(found, search_s=time.perf_counter() - began)


def choices(problem: Problem, space: Space) -> Iterator[Choice]:
    """All programs of a space whose degrees are pinned."""
    for tp, pp, dp in degrees(space, problem):
        if problem.refuse_tp(tp) is not None:
            continue
        for layout in layouts(space, problem, tp, pp, dp):
            for recompute in space.recomputes:
                for group in groups(problem, space, layout, recompute):
                    for order in group.orders:
                        yield group, order


def simulated(problem: Problem, choice: Choice) -> Outcome | None:
    """A program's time, and its bytes with all buffers; None where optimal finds no order."""
    group, order = choice
    plan = plan_of(group, order)
    try:
        program = compile_plan(plan).train
    except PlanError:
        if group.recompute.policy != "optimal":
            raise
        return None
    timeline = simulate(program, group.costs)
    held = peak_memory_bytes(program, group.costs.table(program))
    return Outcome(
        group.candidate(order),
        plan,
        timeline.makespan if problem.machine.waits_at_flush else timeline.period,
        tuple(value for value in held if value is not None),
        group.bound,
        recomputes=bool(recomputed_pairs(program)),
    )


def setting_of(layout: Layout, recompute: Recompute) -> Setting:
    """What of a candidate was tuned."""
    return Setting(recompute, layout.microbatch_size, layout.num_microbatches)


class _Tuner:
    def __init__(self, problem: Problem, top_k: int) -> None:
        self.problem = problem
        self.limit = problem.machine.memory_bytes
        self.top_k = top_k
        self.best: dict[Setting, Outcome] = {}
        self.refused: dict[Setting, Refusal] = {}
        self.known: list[Outcome] = []
        self.num_simulated = 0

    def run(self, found: Iterable[Choice]) -> Tuning:
        # The earliest bound first; of equal ones the policy that is simplest.
        queue = [
            (group.bound, POLICIES.index(group.recompute) if group.recompute in POLICIES else 0,
             number, (group, order))
            for number, (group, order) in enumerate(found)
        ]  # fmt: skip
        num_candidates = len(queue)
        heapify(queue)
        too_large: list[Choice] = []
        too_slow: list[tuple[Setting, Choice]] = []
        while queue:
            bound, _, _, choice = heappop(queue)
            group, _ = choice
            setting = setting_of(group.layout, group.recompute)
            if bound > self.worst * (1 + _SAME):
                self.refuse(Refusal(setting, "slower", step_time_s=bound, exact=False))
                too_slow.append((setting, choice))
            elif group.least_bytes > self.limit:
                self.refuse(Refusal(setting, "memory", group.least_bytes, exact=False))
                too_large.append(choice)
            else:
                self.consider(setting, choice)
        for setting, choice in too_slow:
            # Whether a setting fits is told by all its programs.
            if self.refused[setting].reason == "memory" and setting not in self.best:
                self.consider(setting, choice)
        ranked = sorted(self.best.values(), key=rank_key)
        if not ranked:
            for choice in too_large:
                if choice[0].recompute.policy != "optimal":
                    self.simulate(choice)
        for outcome in ranked[self.top_k :]:
            self.refuse(_slower(outcome))
        listed = {_setting(outcome) for outcome in ranked[: self.top_k]}
        refusals = [r for setting, r in self.refused.items() if setting not in listed]
        plain = [o for o in self.known if o.candidate.recompute.policy == "none"]
        return Tuning(
            tuple(ranked[: self.top_k]),
            tuple(sorted(refusals, key=_refusal_key)),
            None if ranked else min(self.known, key=lambda o: (o.peak_bytes, *rank_key(o)),
                                    default=None),
            None if ranked else min(plain, key=rank_key, default=None),
            num_candidates,
            self.num_simulated,
            search_s=0.0,
        )  # fmt: skip

    @property
    def worst(self) -> float:
        """Nothing slower will be listed."""
        times = sorted(outcome.step_time_s for outcome in self.best.values())
        return times[self.top_k - 1] if len(times) >= self.top_k else float("inf")

    def consider(self, setting: Setting, choice: Choice) -> None:
        outcome = self.simulate(choice)
        if outcome is None:
            self.refuse(Refusal(setting, "memory"))
        elif outcome.peak_bytes > self.limit:
            self.refuse(
                Refusal(setting, "memory", outcome.peak_bytes, step_time_s=outcome.step_time_s)
            )
        elif setting.recompute.policy == "optimal" and not outcome.recomputes:
            self.refuse(Refusal(setting, "same", step_time_s=outcome.step_time_s))
        else:
            before = self.best.get(setting)
            if before is None or rank_key(outcome) < rank_key(before):
                self.best[setting] = outcome

    def simulate(self, choice: Choice) -> Outcome | None:
        self.num_simulated += 1
        outcome = simulated(self.problem, choice)
        if outcome is not None:
            self.known.append(outcome)
        return outcome

    def refuse(self, refusal: Refusal) -> None:
        """Keeps the reason that says most about a setting."""
        before = self.refused.get(refusal.setting)
        key = (not refusal.exact, *_refusal_key(refusal))
        if before is None or key < (not before.exact, *_refusal_key(before)):
            self.refused[refusal.setting] = refusal


def _setting(outcome: Outcome) -> Setting:
    return setting_of(outcome.candidate.layout, outcome.candidate.recompute)


def _slower(outcome: Outcome) -> Refusal:
    return Refusal(_setting(outcome), "slower", step_time_s=outcome.step_time_s)


def _refusal_key(refusal: Refusal) -> tuple[object, ...]:
    """What fits before what does not; the fastest, or what needs least, first."""
    never = float("inf")
    return (
        refusal.reason == "memory",
        refusal.needed_bytes or (never if refusal.reason == "memory" else 0),
        refusal.step_time_s or never,
        refusal.setting.microbatch_size,
        refusal.setting.recompute.policy,
    )


# ----------------------------------------------------------------------------------------- longest
#
# The largest whole number that still fits, where each trial is expensive.


def longest(
    fits: Callable[[int], bool], *, start: int, step: int, least: int, most: int
) -> int | None:
    """The largest of ``start + k * step`` that fits; None if none does.

    Strides double from the start until they leave what fits, then halve: as many trials as the
    logarithm of the distance, so a good guess costs two.

    Args:
        fits: True up to some number, False beyond it.
        start: A guess, between ``least`` and ``most``.
        step: Of the numbers that are tried.
        least: No smaller one is tried.
        most: No larger one is tried.

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
