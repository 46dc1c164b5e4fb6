"""Activations that each rank holds at its worst moment, read off the program's order."""

from __future__ import annotations

from collections.abc import Iterator

from strategies.costs.table import CostTable
from strategies.ir.instruction import Kind
from strategies.ir.program import Program


def peak_activations(program: Program) -> tuple[float, ...]:
    """Peak per rank in full-rank microbatches: (stage, microbatch) pairs over V.

    A forward counts from its start, a backward (or W) until its end. Peaks are not divided where
    a microbatch crosses one stage of a rank (two weight copies).
    """
    share = 1.0 / program.placement.stages_per_microbatch
    return tuple(
        max(held for _, held in _held(program, rank, [share] * program.placement.num_stages))
        for rank in range(len(program.ranks))
    )


def peak_bytes(program: Program, table: CostTable) -> tuple[int | None, ...]:
    """Peak per rank: state of its stages and activations; None where the table has no bytes."""
    if table.activation_bytes is None or table.state_bytes is None:
        return (None,) * len(program.ranks)
    per_stage = [float(value) for value in table.activation_bytes]
    return tuple(
        int(
            sum(table.state_bytes[stage] for stage in program.placement.stages_of(rank))
            + max(held for _, held in _held(program, rank, per_stage))
        )
        for rank in range(len(program.ranks))
    )


def _held(program: Program, rank: int, per_stage: list[float]) -> Iterator[tuple[int, float]]:
    """(place in the list, what is held while it runs), in list order."""
    rank_of = program.placement.rank_of
    held = sum(per_stage[pair[0]] for pair in program.entry.in_flight if rank_of(*pair) == rank)
    yield -1, held
    keeps = program.role != "forward"
    for place, item in enumerate(program.ranks[rank]):
        parts = item.parts
        held += sum(per_stage[part.stage] for part in parts if part.kind is Kind.F)
        yield place, held
        ends = (Kind.B, Kind.W) if keeps else (Kind.F,)
        held -= sum(per_stage[part.stage] for part in parts if part.kind in ends)
