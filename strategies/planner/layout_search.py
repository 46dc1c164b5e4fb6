"""The fastest plans of a space whose programs fit into memory, messages and temporaries included.

Four kinds of things wait in one queue, ordered by a proven lower bound of their step time: layouts
(all ranks busy all the time), their cuts (heads and tails of what stages compute), groups of
schedules that share a cut (messages and reductions, too), and what they are made of. The search
ends when the least bound exceeds the k-th best time that was simulated: nothing left can be among
the first k. A test compares it with simulating everything.

Of all candidates state and activations are counted; what other buffers take is known once lists
have their messages. Only those fast enough to be listed get them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from strategies.analysis.memory import peak_memory_bytes
from strategies.compiler import no_collection
from strategies.errors import PlanError
from strategies.plan import Recompute
from strategies.planner.group import Group, Sketch, expected_bytes, groups_of, sketches, under
from strategies.planner.outcome import Evaluator, Outcome, Refusal, program_of
from strategies.planner.problem import Candidate, Layout, Order, Problem
from strategies.planner.space import LEANER, Space, degrees, expert_degrees, layouts, orders
from strategies.planner.step_bound import ideal_time

_SHORT = 4096  # Instructions of what is compiled in a fraction of a second.

# Bounds and times are sums of the same figures in another order: closer is equal.
_SAME = 1e-9


@dataclass(slots=True)
class Rejected:
    """Why candidates are not in the answer.

    Attributes:
        tp: Degrees that the model cannot be cut into: degree to reason.
        batch: Numbers of replicas that do not divide the batch.
        memory: Candidates that do not fit.
        slower: Candidates whose bound was enough to leave them out, or that were simulated and are
            slower than the last plan listed.
        dominated: Candidates that hold less than one that fits and are no faster.
        nearest: Of those that do not fit, the one that needs least, and how much; of a layout what
            all its candidates need at least.
    """

    tp: dict[int, str] = field(default_factory=dict)
    batch: set[int] = field(default_factory=set)
    memory: int = 0
    slower: int = 0
    dominated: int = 0
    nearest: tuple[int, Candidate | Layout] | None = None

    def too_large(self, needed: int, what: Candidate | Layout, number: int = 1) -> None:
        self.memory += number
        if self.nearest is None or _distance(needed, what) < _distance(*self.nearest):
            self.nearest = (needed, what)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a search found.

    Attributes:
        plans: The best, fastest first; empty if none fits.
        num_candidates: Of the whole space, one cut each.
        refusals: Of one layout, each microbatch size and policy that is not listed, those that fit
            first.
        smallest: Of one layout where nothing fits: what needs least.
        plain: Of one layout where nothing fits: the fastest without recomputation.
    """

    plans: tuple[Outcome, ...]
    rejected: Rejected
    num_candidates: int
    num_simulated: int
    search_s: float
    refusals: tuple[Refusal, ...] = ()
    smallest: Outcome | None = None
    plain: Outcome | None = None


class _Open(NamedTuple):
    """A layout that has not been cut, and how many candidates it has."""

    layout: Layout
    recompute: Recompute
    number: int


class _Made(NamedTuple):
    """One order of a group, by itself."""

    group: Group
    order: Order


def _distance(needed: int, what: Candidate | Layout) -> tuple[bool, int]:
    """Layouts, of which only a lower bound is known, come last."""
    return isinstance(what, Layout), needed


def search(problem: Problem, space: Space, *, top_k: int = 5) -> Answer:
    """The ``top_k`` fastest candidates that fit; ``rank_bytes`` of each is its run's own figure."""
    began = time.perf_counter()
    with no_collection():
        answer = _fitting(problem, space, top_k)
        if not answer.plans and space.level == "O2" and not space.lean:
            answer = _fitting(problem, replace(space, lean=True), top_k)
    return replace(answer, search_s=time.perf_counter() - began)


def _fitting(problem: Problem, space: Space, top_k: int) -> Answer:
    """A search whose plans fit by their programs.

    Of messages that are made at one time either may be there first, which a program decides: a plan
    that does not fit after all makes room for the next.
    """
    refused: dict[Candidate, int] = {}
    while True:
        answer = _search(problem, space, top_k, refused)
        plans = tuple(replace(p, rank_bytes=full_bytes(problem, p)) for p in answer.plans)
        too_large = [p for p in plans if p.peak_bytes > problem.machine.memory_bytes]
        if not too_large:
            return replace(answer, plans=plans)
        refused |= {plan.candidate: plan.peak_bytes for plan in too_large}


def _search(problem: Problem, space: Space, top_k: int, refused: Mapping[Candidate, int]) -> Answer:
    rejected = Rejected()
    evaluator = Evaluator(problem.machine.waits_at_flush, found=problem.found)
    number = count()
    queue: list[tuple[float, int, _Open | Sketch | Group | _Made]] = []
    num_candidates = 0
    for layout in _layouts(problem, space, rejected):
        for recompute in space.recomputes:
            size = len(orders(space, problem, layout, recompute)) * len(space.overlaps(layout))
            if not size:
                continue
            num_candidates += size
            ideal = ideal_time(problem, layout, recompute)
            heappush(queue, (ideal, next(number), _Open(layout, recompute, size)))
    found: list[Outcome] = []
    worst = float("inf")
    while queue and queue[0][0] <= worst * (1 + _SAME):
        least, _, item = heappop(queue)
        if isinstance(item, _Open):
            needed = _least_bytes(problem, space, item.layout, item.recompute)
            if needed > problem.machine.memory_bytes:
                rejected.too_large(needed, item.layout, item.number)
                continue
            for sketch in _sketches(problem, space, item.layout, item.recompute):
                heappush(queue, (max(least, sketch.bound), next(number), sketch))
            continue
        if isinstance(item, Sketch):
            for group in _groups(problem, space, item):
                if group.least_bytes > problem.machine.memory_bytes:
                    rejected.too_large(group.least_bytes, group.layout, len(group.orders))
                else:
                    heappush(queue, (group.bound, next(number), group))
            continue
        if isinstance(item, Group):
            for order in item.orders:
                bound = max(item.bound, evaluator.least_time(item, order))
                heappush(queue, (bound, next(number), _Made(item, order)))
            continue
        outcome = _try(*item, evaluator, problem, space, rejected, worst)
        if outcome is None:
            continue
        if outcome.candidate in refused:
            rejected.too_large(refused[outcome.candidate], outcome.candidate)
            continue
        found.append(outcome)
        found.sort(key=rank_key)
        if len(found) >= top_k:
            worst = found[top_k - 1].step_time_s
    rejected.slower = max(
        0, num_candidates - rejected.memory - rejected.dominated - min(top_k, len(found))
    )
    best = tuple(found[:top_k])
    return Answer(best, rejected, num_candidates, evaluator.num_simulated, search_s=0.0)


def full_bytes(problem: Problem, outcome: Outcome) -> tuple[int, ...]:
    """All that each rank holds at its worst moment; of a program that is not long its own."""
    layout, order = outcome.candidate.layout, outcome.candidate.order
    if 2 * layout.pp * layout.num_microbatches * order.stages_per_rank > _SHORT:
        evaluator = Evaluator(problem.machine.waits_at_flush, found=problem.found)
        return tuple(held.total for held in evaluator.full_memory(outcome.group, order))
    program = program_of(outcome.group, order)
    held = peak_memory_bytes(program, outcome.group.costs.table(program))
    return tuple(value for value in held if value is not None)


def _sketches(problem: Problem, space: Space, layout: Layout, recompute: Recompute) -> list[Sketch]:
    """Made once, as groups are: a search for more plans begins with those of the one before."""
    known, key = problem.found.sketches, (space, layout, recompute)
    if key not in known:
        known[key] = sketches(problem, space, layout, recompute)
    return known[key]


def _groups(problem: Problem, space: Space, sketch: Sketch) -> list[Group]:
    known, key = problem.found.groups, (space, sketch)
    if key not in known:
        known[key] = groups_of(problem, space, sketch)
    return known[key]


def rank_key(outcome: Outcome) -> tuple[object, ...]:
    """Faster first; of equally fast ones what holds less, then the simpler one."""
    candidate = outcome.candidate
    layout, order = candidate.layout, candidate.order
    return (
        float(f"{outcome.step_time_s:.9g}"),
        outcome.peak_bytes,
        candidate.recompute.policy != "none",
        layout.pp,
        layout.tp,
        layout.ep,
        layout.microbatch_size,
        order.stages_per_rank,
        order.schedule,
        order.group or 0,
        candidate.overlap,
        candidate.recompute.policy,
        candidate.units,
    )


def leaner_than(
    group: Group, order: Order, space: Space, problem: Problem
) -> Iterator[tuple[Group, Order]]:
    """Candidates that are as fast or faster; where one fits, O2 does not look at this one."""
    if space.level != "O2":
        return
    if space.recompute is None:
        # Policies are listed by how much they hold, and by how fast they are.
        for policy in space.recomputes[: space.recomputes.index(group.recompute)]:
            if policy.policy != "mario" or order in orders(space, problem, group.layout, policy):
                yield under(group, problem, policy), order
    faster = LEANER.get(order.schedule)
    if faster is None or space.schedule is not None:
        return
    # Up to P microbatches foldx_fifo runs all forwards first, and is another order.
    if order.schedule != "foldx_fifo" or group.layout.num_microbatches > group.layout.pp:
        yield group, replace(order, schedule=faster)


def _try(
    group: Group,
    order: Order,
    evaluator: Evaluator,
    problem: Problem,
    space: Space,
    rejected: Rejected,
    worst: float,
) -> Outcome | None:
    """A candidate that fits and has no leaner one, cheap questions first.

    None, too, where it is slower than the ``worst`` that is listed, and that was sooner to be had.
    """
    limit = problem.machine.memory_bytes
    early: list[tuple[Group, Order]] = []
    late: list[tuple[Group, Order]] = []
    for other, same in leaner_than(group, order, space, problem):
        # Their lists are searched for, which takes longer than to time these.
        searched = other.recompute.policy == "mario" != group.recompute.policy
        (late if searched else early).append((other, same))
    if any(_fits(*each, evaluator, space, limit) for each in early):
        rejected.dominated += 1
        return None
    expected = expected_bytes(group, order, space) or 0
    if space.recompute is None:
        expected = max(expected, evaluator.least_bytes(group, order))
    if expected > limit:
        rejected.too_large(expected, group.layout)
        return None
    outcome = None
    try:
        if evaluator.is_near(group, order, limit) and evaluator.is_short(group, order):
            outcome = evaluator.outcome(group, order)
            if outcome.step_time_s > worst * (1 + _SAME):
                return None
        needed = evaluator.needed_bytes(group, order, limit)
    except PlanError:  # recompute=optimal: no order keeps to the memory.
        rejected.too_large(limit + 1, group.layout)
        return None
    if needed > limit:
        rejected.too_large(needed, group.candidate(order))
        return None
    outcome = outcome or evaluator.outcome(group, order)
    if outcome.step_time_s > worst * (1 + _SAME):
        return None
    if any(_fits(*each, evaluator, space, limit) for each in late):
        rejected.dominated += 1
        return None
    return outcome


def _fits(group: Group, order: Order, evaluator: Evaluator, space: Space, limit: int) -> bool:
    if max(expected_bytes(group, order, space) or 0, evaluator.least_bytes(group, order)) > limit:
        return False
    return evaluator.needed_bytes(group, order, limit) <= limit


def _layouts(problem: Problem, space: Space, rejected: Rejected) -> Iterator[Layout]:
    for tp, pp, dp in degrees(space, problem):
        refused = problem.refuse_tp(tp)
        if refused is not None:
            rejected.tp[tp] = refused
            continue
        if not expert_degrees(space, problem, tp, dp):
            continue  # as the pinned ep says
        found = layouts(space, problem, tp, pp, dp)
        if not found:
            rejected.batch.add(dp)
        yield from found


def _least_bytes(problem: Problem, space: Space, layout: Layout, recompute: Recompute) -> int:
    """State, and what one microbatch keeps, on the worst rank, spread as evenly as can be."""
    zero1 = "zero1" in space.overlaps(layout)
    table = problem.whole_table(layout, zero1=zero1, selective=recompute.inside)
    assert table.state_bytes is not None
    assert table.activation_bytes is not None
    kept = 0 if recompute.rewrites else table.activation_bytes[0]
    return (table.state_bytes[0] + kept) // layout.pp
