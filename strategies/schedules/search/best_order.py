"""Chooses an order for given costs: the regular one and many generated ones, timed; the best wins.

Regular orders are made for F = I = W without latency, where most of them are as fast as any order
can be. Elsewhere an order that is generated for the costs is often faster in the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain as chained
from itertools import pairwise, product

from strategies.ir.program import Placement, Program, chain
from strategies.schedules.schedule import Durations, Rows, Shape
from strategies.schedules.search.greedy import Policy, Priorities, Walked, walk
from strategies.schedules.search.lanes import F, I, Lanes, StepRows, W, lanes_of, next_of
from strategies.schedules.search.weight_gaps import times_of

Recipe = Callable[[Lanes, Durations], Policy]
Goal = Callable[[Walked], tuple[float, float]]
Regular = Callable[[int, int], Rows]  # of P and M

# As ``Policy.spare``, which no cap can meet: forwards never fill idle time.
NEVER = 1_000_000

# A search may walk this many instructions, well under a second's worth; a policy's rank among the
# others hardly depends on M, so all are tried on 3P microbatches and the best on M.
_BUDGET = 250_000
_TRIAL_ROUNDS = 3
_FINALISTS = 3


def by_makespan(times: Walked) -> tuple[float, float]:
    return times.makespan, times.period


def by_period(times: Walked) -> tuple[float, float]:
    """Period first, then makespan: for schedules whose gain is that no rank idles in its step."""
    return times.period, times.makespan


def equal_durations(placement: Placement) -> Durations:
    """F = I = W = 1 on every stage, messages take no time."""
    ones = (1.0,) * placement.num_stages
    return Durations(ones, ones, ones)


def best_order(
    placement: Placement,
    num_microbatches: int,
    durations: Durations,
    *,
    caps: tuple[int, ...],
    regular: Regular,
    recipes: tuple[Recipe, ...],
    goal: Goal,
) -> Rows:
    """The regular order, or a generated one that is better by the goal and keeps the caps.

    ``caps`` are per rank, (stage, microbatch) pairs it may hold; the regular order (of M) keeps
    them. ``recipes`` come with the most promising first; those that follow the regular order are
    added. ``goal`` is what is to be small.
    """
    lanes = lanes_of(placement, num_microbatches)
    program = _program(placement, num_microbatches, regular)
    start, end = times_of(program, durations)
    period = max(end[high - 1] - start[low] for low, high in pairwise(program.graph.offsets))
    known = Walked(lanes.steps(program.ranks), max(end), period)
    recipes = (*_following(placement, regular), *recipes)
    orders = [known, *_finalists(placement, lanes, durations, caps, recipes, goal)]
    return lanes.rows(_best(orders, durations, goal))


def paper_order_or_best(
    shape: Shape,
    placement: Placement,
    regular: Regular,
    *,
    least: int = 1,
    cap: int,
    recipes: tuple[Recipe, ...],
    goal: Goal,
) -> Rows:
    """The regular order for equal costs and M >= ``least``, else the best one found.

    ``cap`` is that of every rank, else as for ``best_order``.
    """
    pp, num_microbatches = shape.pp, shape.num_microbatches
    equal = shape.durations is None or shape.durations.equal
    if equal and num_microbatches >= least:
        return regular(pp, num_microbatches)
    return best_order(
        placement,
        num_microbatches,
        shape.durations or equal_durations(placement),
        caps=(cap,) * pp,
        regular=regular,
        recipes=recipes,
        goal=goal,
    )


def generated_order(
    placement: Placement,
    num_microbatches: int,
    durations: Durations,
    *,
    caps: tuple[int, ...],
    recipes: tuple[Recipe, ...],
    goal: Goal,
) -> Rows:
    """The best order of the recipes; arguments as for ``best_order``."""
    lanes = lanes_of(placement, num_microbatches)
    orders = _finalists(placement, lanes, durations, caps, recipes, goal)
    return lanes.rows(_best(orders, durations, goal))


def regular_order(
    placement: Placement, num_microbatches: int, *, cap: int, recipes: tuple[Recipe, ...]
) -> Rows:
    """That with the least makespan under equal costs; ``cap`` is that of every rank."""
    return generated_order(
        placement,
        num_microbatches,
        equal_durations(placement),
        caps=(cap,) * placement.num_ranks,
        recipes=recipes,
        goal=by_makespan,
    )


def blocks(
    hops: Iterable[tuple[float, ...]],
    *,
    turns: Iterable[float],
    spares: Iterable[int],
    patiences: Iterable[float],
) -> tuple[Recipe, ...]:
    """A recipe for every combination, those of the first hops first."""

    def recipe(hops: tuple[float, ...], turn: float, spare: int, patience: float) -> Recipe:
        def make(lanes: Lanes, durations: Durations) -> Policy:
            return Policy(repeat(Block(hops, turn), lanes, durations), spare, patience)

        return make

    return tuple(recipe(*choice) for choice in product(hops, turns, spares, patiences))


def _following(placement: Placement, regular: Regular) -> list[Recipe]:
    """Recipes for the regular order of F and I, by its times under equal costs, W where idle."""

    def recipe(spare: int, patience: float) -> Recipe:
        def make(lanes: Lanes, durations: Durations) -> Policy:
            return Policy(_guide(placement, lanes.num_microbatches, regular), spare, patience)

        return make

    return [recipe(*choice) for choice in product((0, 2, NEVER), (0.0, 0.5, 1.0))]


@lru_cache(maxsize=64)
def _guide(placement: Placement, num_microbatches: int, regular: Regular) -> Priorities:
    lanes = lanes_of(placement, num_microbatches)
    program = _program(placement, num_microbatches, regular)
    start, _ = times_of(program, equal_durations(placement))
    begun = [[[0.0] * size for size in lanes.size] for _ in (F, I, W)]
    steps = chained.from_iterable(lanes.steps(program.ranks))
    for (kind, lane, index), time in zip(steps, start, strict=True):
        begun[kind][lane][index] = time
    forward, backward, _ = (tuple(map(tuple, each)) for each in begun)
    return Priorities(forward, backward)


@lru_cache(maxsize=16)
def _program(placement: Placement, num_microbatches: int, regular: Regular) -> Program:
    """Searches for several costs time one order."""
    rows = regular(placement.num_ranks, num_microbatches)
    return Program("regular", placement, num_microbatches, rows, chain(placement.num_stages))


def _finalists(
    placement: Placement,
    lanes: Lanes,
    durations: Durations,
    caps: tuple[int, ...],
    recipes: tuple[Recipe, ...],
    goal: Goal,
) -> list[Walked]:
    trial = min(lanes.num_microbatches, _TRIAL_ROUNDS * placement.num_ranks)
    short = lanes_of(placement, trial)
    left = _BUDGET - 3 * sum(lanes.size) * _FINALISTS
    affordable = max(_FINALISTS, left // (3 * sum(short.size)))

    def walked(recipe: Recipe, lanes: Lanes) -> Walked:
        return walk(lanes, durations, caps=caps, policy=recipe(lanes, durations))

    tried = [
        (_rounded(goal(walked(recipe, short)), durations), number)
        for number, recipe in enumerate(recipes[:affordable])
    ]
    return [walked(recipes[number], lanes) for _, number in sorted(tried)[:_FINALISTS]]


def _best(orders: list[Walked], durations: Durations, goal: Goal) -> StepRows:
    return min(orders, key=lambda order: _rounded(goal(order), durations)).steps


def _rounded(figures: tuple[float, float], durations: Durations) -> tuple[float, float]:
    """So that sums which differ by rounding only are equal."""
    unit = max(durations.forward)
    first, second = (round(figure / unit, 7) for figure in figures)
    return first, second


# ---------------------------------------------------------------------------------- building block
# Guides made of one microbatch's times, repeated once per period. Qi et al., 2024, "Pipeline
# Parallelism with Controllable Memory", https://arxiv.org/abs/2405.15362: how long a microbatch
# stays on a rank, counted in periods, is what the rank must hold.


@dataclass(frozen=True, slots=True)
class Block:
    """How fast a microbatch travels; a slot is the period over 3V, which is F where F = I = W.

    Attributes:
        hops: Slots from one rank to the next, per row of stages: the F of each row, then the I from
            the last row to the first. A hop never takes less than what is run and sent.
        turn: Slots that pass between the last forward and the first backward.
    """

    hops: tuple[float, ...]
    turn: float = 0.0


def repeat(block: Block, lanes: Lanes, durations: Durations) -> Priorities:
    """The guide by which one microbatch enters per period, the work of the slowest rank.

    The block has as many rows as a rank has stages.
    """
    assert lanes.num_copies == 1
    num_ranks = len(lanes.of_rank)
    num_rows = lanes.num_stages // num_ranks
    work = zip(durations.forward, durations.backward_input, durations.backward_weight, strict=True)
    of_stage = [sum(parts) for parts in work]
    period = max(sum(of_stage[stage] for stage in own) for own in lanes.of_rank)
    slot = period / (3 * num_rows)
    took = (durations.forward, durations.backward_input)
    offsets = ([0.0] * lanes.num_stages, [0.0] * lanes.num_stages)
    kind, lane, time = F, 0, 0.0
    while lane >= 0:
        offsets[kind][lane] = time
        target, direction = next_of(lanes, kind, lane)
        crosses = target >= 0 and lanes.rank[target] != lanes.rank[lane]
        hop = took[kind][lane] + (durations.latency if crosses else 0.0)
        row = lane // num_ranks
        if direction != kind:
            hop += block.turn * slot
        elif target // num_ranks == row:
            hop = max(hop, slot * block.hops[row if kind == F else 2 * num_rows - 1 - row])
        kind, lane, time = direction, target, time + hop
    forward, backward = (
        tuple(
            tuple(offset + index * period for index in range(size))
            for offset, size in zip(offsets[kind], lanes.size, strict=True)
        )
        for kind in (F, I)
    )
    return Priorities(forward, backward)
