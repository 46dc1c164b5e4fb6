"""Programs for tests: written by hand as text, or drawn at random from all schedules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import dedent

import pytest
from hypothesis import strategies as st

from strategies.costs.table import CostTable
from strategies.costs.uniform import count_buckets
from strategies.errors import PlanError, ProgramError
from strategies.ir import Placement, Program, verify
from strategies.ir.kinds import MICROBATCH_KINDS
from strategies.ir.program import Boundary, Role, chain, loop
from strategies.ir.text import parse_rows
from strategies.plan import Plan
from strategies.schedules import SCHEDULES

# Read once, so that a test which registers a schedule cannot change what others draw.
# Those with a flush: a step is a program by itself.
ALL_SCHEDULES = tuple(name for name, schedule in SCHEDULES.items() if schedule.synchronous)


def lines(text: str) -> list[str]:
    """A pasted picture row by row, without labels and indentation; wrapped blocks are joined."""
    blocks = [
        [" ".join(line.rpartition("|")[2].split()) for line in block.splitlines()]
        for block in dedent(text).strip().split("\n\n")
    ]
    return [" ".join(parts) for parts in zip(*blocks, strict=True)]


def written(
    text: str,
    *,
    num_microbatches: int,
    stages_per_rank: int = 1,
    placement: Placement | None = None,
    boundaries: tuple[Boundary, ...] | None = None,
    role: Role = "train",
    lowered: bool = False,
) -> Program:
    """A program from one line per rank; nothing is verified."""
    rows = parse_rows("\n".join(lines(text)))
    if placement is None:
        placement = loop(len(rows), stages_per_rank)
    return Program(
        schedule="written",
        placement=placement,
        num_microbatches=num_microbatches,
        ranks=rows,
        boundaries=chain(placement.num_stages) if boundaries is None else boundaries,
        role=role,
        lowered=lowered,
    )


def texts(program: Program) -> list[str]:
    """One line per rank."""
    return [" ".join(map(str, row)) for row in program.ranks]


def compute_texts(program: Program) -> list[str]:
    """One line per rank, F B I W R and fused pairs only."""
    return [" ".join(str(i) for i in row if i.kind in MICROBATCH_KINDS) for row in program.ranks]


def refusal(program: Program) -> str:
    """What the verifier says against the program; it must say something."""
    with pytest.raises(ProgramError) as error:
        verify(program)
    return str(error.value)


class FixedCosts:
    """A cost table given number by number."""

    def __init__(self, table: CostTable) -> None:
        self._table = table

    def table(self, program: Program) -> CostTable:
        return self._table


def uneven(
    program: Program,
    forward: Sequence[float],
    *,
    backward: Sequence[float] | None = None,
    reduce: Sequence[Sequence[float]] | None = None,
    step: Sequence[float] | None = None,
    latency: float = 0.0,
    occupancy: float = 0.0,
    transport: str = "buffered",
    activation_bytes: tuple[int, ...] | None = None,
    state_bytes: tuple[int, ...] | None = None,
) -> FixedCosts:
    """Costs per stage; B is twice F, half of it for the inputs, unless it is given."""
    backward = [2 * value for value in forward] if backward is None else backward
    links = len(program.boundaries)
    return FixedCosts(
        CostTable(
            name="fixed",
            time_unit="s",
            forward=tuple(forward),
            backward=tuple(backward),
            backward_input=tuple(value / 2 for value in backward),
            backward_weight=tuple(value / 2 for value in backward),
            recompute=tuple(forward),
            step=tuple(step or [0.0] * len(forward)),
            reduce=tuple(map(tuple, reduce or [()] * len(forward))),
            latency=(latency,) * links,
            occupancy=(occupancy,) * links,
            transport=transport,
            activation_bytes=activation_bytes,
            state_bytes=state_bytes,
        )
    )


@st.composite
def plans(draw: st.DrawFn, max_pp: int = 8, max_microbatches: int = 16) -> Plan:
    """Any legal plan of any schedule, P <= 8, V <= 4, M <= 16 (or what its rule asks)."""
    schedule = draw(st.sampled_from(ALL_SCHEDULES))
    found = SCHEDULES[schedule]
    pp = draw(st.integers(1, max_pp))
    if found.weight_copies == 2:
        pp += pp % 2
    microbatches = draw(st.integers(1, max_microbatches))
    stages = found.stages_per_rank
    if found.virtual_stages:
        stages = 2 * draw(st.integers(1, 2)) if schedule == "hanayo" else draw(st.integers(1, 4))
    microbatches = legal_microbatches(schedule, pp, microbatches, stages)
    group = None
    if found.grouped:
        low, high = sorted((pp, microbatches))
        group = draw(st.none() | st.integers(low, high))
    buckets: int | tuple[int, ...] = draw(st.integers(0, 3))
    if draw(st.booleans()):
        count = pp * stages // found.weight_copies
        buckets = tuple(draw(st.integers(0, 3)) for _ in range(count))
    overlap = draw(st.sampled_from(("grad_reduce", "none")))
    split = not found.splits_backward and draw(st.booleans())
    costs = draw(st.none() | uneven_costs())
    return Plan(
        schedule,
        pp,
        microbatches,
        stages,
        group,
        overlap,
        buckets,
        split_backward=split,
        costs=costs,
    )


def legal_microbatches(schedule: str, pp: int, least: int, stages: int | None = None) -> int:
    """The next number of microbatches that the schedule's rules allow."""
    for count in itertools.count(least):
        try:
            SCHEDULES[schedule].resolve(Plan(schedule, pp, count, stages))
        except PlanError:
            assert count < least + 64
            continue
        return count
    raise AssertionError


@dataclass(frozen=True)
class UnevenCosts:
    """F, I and W per stage, and a latency; hashable, as a plan needs it."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    latency: float

    def table(self, program: Program) -> CostTable:
        count, links = program.placement.num_stages, len(program.boundaries)
        forward, inputs, weights = (
            (values * count)[:count]
            for values in (self.forward, self.backward_input, self.backward_weight)
        )
        return CostTable(
            name="uneven",
            time_unit="s",
            forward=forward,
            backward=tuple(map(sum, zip(inputs, weights, strict=True))),
            backward_input=inputs,
            backward_weight=weights,
            recompute=forward,
            step=(0.0,) * count,
            reduce=tuple((1.0,) * buckets for buckets in count_buckets(program)),
            latency=(self.latency,) * links,
            occupancy=(0.0,) * links,
        )


@st.composite
def uneven_costs(draw: st.DrawFn) -> UnevenCosts:
    """Durations between 1 and 8 that differ between stages and kinds."""
    length = draw(st.integers(1, 4))

    def durations() -> tuple[float, ...]:
        return tuple(float(draw(st.integers(1, 8))) for _ in range(length))

    latency = draw(st.sampled_from((0.0, 0.5, 2.0)))
    return UnevenCosts(durations(), durations(), durations(), latency)
