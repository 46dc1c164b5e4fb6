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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count

from strategies.compiler import no_collection
from strategies.errors import PlanError
from strategies.plan import Recompute
from strategies.planner.cut import SAME
from strategies.planner.group import (
    Group,
    Sketch,
    expected_bytes,
    groups_of,
    sketches,
    with_recompute,
)
from strategies.planner.outcome import (
    Outcome,
    Refusal,
    evaluate,
    full_memory,
    is_near,
    is_short,
    least_bytes,
    least_time,
    needed_bytes,
    program_bytes,
    program_of,
)
from strategies.planner.problem import Candidate, Layout, Order, Problem
from strategies.planner.space import (
    DOMINATED_BY,
    Space,
    degrees,
    expert_degrees,
    layouts,
    orders,
    splits_node,
)
from strategies.planner.step_bound import ideal_time

_SHORT = 4096  # Instructions of what is compiled in a fraction of a second.


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
    """

    plans: tuple[Outcome, ...]
    rejected: Rejected
    num_candidates: int
    num_simulated: int
    search_s: float
    refusals: tuple[Refusal, ...] = ()


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
        answer = _Search(problem, space, top_k, refused).run()
        plans = tuple(replace(p, rank_bytes=full_bytes(problem, p)) for p in answer.plans)
        too_large = [p for p in plans if p.peak_bytes > problem.room(p.candidate.layout)]
        if not too_large:
            return replace(answer, plans=plans)
        refused |= {plan.candidate: plan.peak_bytes for plan in too_large}


class _Search:
    """One search; what waits in its queue is a bound, and what is done when it comes first."""

    def __init__(
        self, problem: Problem, space: Space, top_k: int, refused: Mapping[Candidate, int]
    ) -> None:
        self.problem = problem
        self.space = space
        self.top_k = top_k
        self.refused = refused
        self.rejected = Rejected()
        self.found: list[Outcome] = []
        self.worst = float("inf")  # time of the last that is listed
        self.num_simulated = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def run(self) -> Answer:
        problem, space, rejected = self.problem, self.space, self.rejected
        num_candidates = 0
        for layout in _layouts(problem, space, rejected):
            for recompute in space.recomputes:
                size = len(orders(space, problem, layout, recompute)) * len(space.overlaps(layout))
                if size:
                    num_candidates += size
                    bound = ideal_time(problem, layout, recompute)
                    self._push(bound, partial(self._cut, layout, recompute, size, bound))
        while self._queue and not self._is_slow(self._queue[0][0]):
            heappop(self._queue)[2]()
        self._queue.clear()  # Its steps refer to this search, and nothing collects cycles now.
        listed = min(self.top_k, len(self.found))
        others = num_candidates - rejected.memory - rejected.dominated - listed
        rejected.slower = max(0, others)
        best = tuple(self.found[: self.top_k])
        return Answer(best, rejected, num_candidates, self.num_simulated, search_s=0.0)

    def _push(self, bound: float, step: Callable[[], None]) -> None:
        heappush(self._queue, (bound, next(self._number), step))

    def _is_slow(self, step_time_s: float) -> bool:
        return step_time_s > self.worst * (1 + SAME)

    def _cut(self, layout: Layout, recompute: Recompute, number: int, bound: float) -> None:
        """``number``: of its candidates."""
        needed = _least_bytes(self.problem, self.space, layout, recompute)
        if needed > self.problem.room(layout):
            self.rejected.too_large(needed, layout, number)
            return
        for sketch in sketches(self.problem, self.space, layout, recompute):
            self._push(max(bound, sketch.bound), partial(self._cost, sketch))

    def _cost(self, sketch: Sketch) -> None:
        room = self.problem.room(sketch.layout)
        for group in groups_of(self.problem, self.space, sketch):
            if group.least_bytes > room:
                self.rejected.too_large(group.least_bytes, group.layout, len(group.orders))
            else:
                self._push(group.bound, partial(self._split, group))

    def _split(self, group: Group) -> None:
        """By orders."""
        for order in group.orders:
            bound = max(group.bound, least_time(self.problem, group, order))
            self._push(bound, partial(self._try, group, order))

    def _try(self, group: Group, order: Order) -> None:
        outcome = self._fast_and_fitting(group, order)
        if outcome is None:
            return
        if outcome.candidate in self.refused:
            self.rejected.too_large(self.refused[outcome.candidate], outcome.candidate)
            return
        self.found.append(outcome)
        self.found.sort(key=rank_key)
        if len(self.found) >= self.top_k:
            self.worst = self.found[self.top_k - 1].step_time_s

    def _fast_and_fitting(self, group: Group, order: Order) -> Outcome | None:
        """A candidate that fits, may be listed and has no leaner one, cheap questions first."""
        problem, rejected = self.problem, self.rejected
        limit = problem.room(group.layout)
        early: list[tuple[Group, Order]] = []
        late: list[tuple[Group, Order]] = []
        for other, same in dominating_candidates(group, order, self.space, problem):
            # Their lists are searched for, which takes longer than to time these.
            searched = other.recompute.policy == "mario" != group.recompute.policy
            (late if searched else early).append((other, same))
        if any(self._fits(*each) for each in early):
            rejected.dominated += 1
            return None
        expected = expected_bytes(group, order, self.space) or 0
        if self.space.recompute is None:
            expected = max(expected, least_bytes(problem, group, order))
        if expected > limit:
            rejected.too_large(expected, group.layout)
            return None
        outcome = None
        try:
            if is_near(problem, group, order, limit) and is_short(problem, group, order):
                outcome = self._evaluate(group, order)
                if self._is_slow(outcome.step_time_s):
                    return None
            needed = needed_bytes(problem, group, order, limit)
        except PlanError:  # recompute=optimal: no order keeps to the memory.
            rejected.memory += 1
            return None
        if needed > limit:
            rejected.too_large(needed, group.candidate(order))
            return None
        outcome = outcome or self._evaluate(group, order)
        if self._is_slow(outcome.step_time_s):
            return None
        if any(self._fits(*each) for each in late):
            rejected.dominated += 1
            return None
        return outcome

    def _evaluate(self, group: Group, order: Order) -> Outcome:
        self.num_simulated += 1
        return evaluate(self.problem, group, order)

    def _fits(self, group: Group, order: Order) -> bool:
        expected = expected_bytes(group, order, self.space) or 0
        limit = self.problem.room(group.layout)
        if max(expected, least_bytes(self.problem, group, order)) > limit:
            return False
        return needed_bytes(self.problem, group, order, limit) <= limit


def full_bytes(problem: Problem, outcome: Outcome) -> tuple[int, ...]:
    """All that each rank holds at its worst moment; of a program that is not long its own."""
    group, order = outcome.group, outcome.order
    if 2 * group.layout.pp * group.layout.num_microbatches * order.stages_per_rank > _SHORT:
        return tuple(held.total for held in full_memory(problem, group, order))
    return program_bytes(program_of(group, order), group)


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


def dominating_candidates(
    group: Group, order: Order, space: Space, problem: Problem
) -> Iterator[tuple[Group, Order]]:
    """Candidates that are as fast or faster; where one fits, O2 does not look at this one."""
    if space.level != "O2":
        return
    if space.recompute is None:
        # Policies are listed by how much they hold, and by how fast they are.
        for policy in space.recomputes[: space.recomputes.index(group.recompute)]:
            if policy.policy != "mario" or order in orders(space, problem, group.layout, policy):
                yield with_recompute(group, problem, policy), order
    faster = DOMINATED_BY.get(order.schedule)
    if faster is None or space.schedule is not None:
        return
    # Up to P microbatches foldx_fifo runs all forwards first, and is another order.
    if order.schedule != "foldx_fifo" or group.layout.num_microbatches > group.layout.pp:
        yield group, replace(order, schedule=faster)


def _layouts(problem: Problem, space: Space, rejected: Rejected) -> Iterator[Layout]:
    for tp, pp, dp in degrees(space, problem):
        refused = problem.refuse_tp(tp) or splits_node(space, problem, tp)
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
