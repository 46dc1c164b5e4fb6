"""Programs for tests: written by hand as text, or drawn at random from all schedules."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import dedent

import pytest
from hypothesis import strategies as st

from strategies.costs.table import CostTable
from strategies.errors import ProgramError
from strategies.ir import LoopState, Placement, Program, verify
from strategies.ir.placement import loop
from strategies.ir.program import Boundary, Role, chain
from strategies.ir.text import parse_rows
from strategies.plan import Plan

# Fixed, so that a test which registers a schedule cannot change what others draw.
FIRST_SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved_1f1b", "foldx_fifo", "foldx_aiao")
WITH_VIRTUAL_STAGES = ("naive", "interleaved_1f1b", "foldx_fifo", "foldx_aiao")


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
    entry: Sequence[tuple[int, int]] = (),
    leaving: Sequence[tuple[int, int]] = (),
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
        entry=LoopState(in_flight=tuple(entry)),
        exit=LoopState(in_flight=tuple(leaving)),
    )


def texts(program: Program) -> list[str]:
    """One line per rank."""
    return [" ".join(map(str, row)) for row in program.ranks]


def compute_texts(program: Program) -> list[str]:
    """One line per rank, F B I W R only."""
    return [" ".join(str(i) for i in row if i.kind.value in "FBIWR") for row in program.ranks]


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
    """Any legal plan of any of the first schedules, P <= 8, M <= 16, V <= 4."""
    schedule = draw(st.sampled_from(FIRST_SCHEDULES))
    pp = draw(st.integers(1, max_pp))
    microbatches = draw(st.integers(1, max_microbatches))
    stages = draw(st.integers(1, 4)) if schedule in WITH_VIRTUAL_STAGES else 1
    group = None
    if schedule == "interleaved_1f1b":
        low, high = sorted((pp, microbatches))
        group = draw(st.none() | st.integers(low, high))
    buckets: int | tuple[int, ...] = draw(st.integers(0, 3))
    if draw(st.booleans()):
        buckets = tuple(draw(st.integers(0, 3)) for _ in range(pp * stages))
    overlap = draw(st.sampled_from(("grad_reduce", "none")))
    return Plan(schedule, pp, microbatches, stages, group, overlap, buckets)
