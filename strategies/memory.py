"""Activations that each rank holds at its worst moment, read off the program's order.

A forward counts from its start, a backward (or W) until its end. A checkpointed forward, one whose
pair has an R, holds its stage's input only, from its start until its R begins; from there on the
pair counts in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strategies.costs.table import CostTable
from strategies.ir.instruction import Instruction, Kind
from strategies.ir.program import Program
from strategies.ir.recomputed import recomputed_pairs


class Holding:
    """What each instruction of a program takes and gives back, in any unit.

    Args:
        program: Any; in a forward program nothing outlasts its forward.
        full: Per stage, one microbatch's activations.
        inputs: Per stage, what a checkpointed forward keeps of them.
        waiting: Per stage, what its I leaves for its W; None for all.
    """

    def __init__(
        self,
        program: Program,
        full: Sequence[float],
        inputs: Sequence[float],
        waiting: Sequence[float] | None = None,
    ) -> None:
        self._program = program
        self._full = full
        self._inputs = inputs
        self._waiting = full if waiting is None else waiting
        self._again = recomputed_pairs(program)
        self._keeps = program.role != "forward"

    def carried(self, rank: int) -> float:
        """What a rank holds before its first instruction."""
        rank_of = self._program.placement.rank_of
        pairs = self._program.entry.in_flight
        return sum(self._kept(*pair) for pair in pairs if rank_of(*pair) == rank)

    def taken(self, item: Instruction) -> float:
        """What an instruction takes when it starts."""
        return sum(map(self._taken, item.parts))

    def freed(self, item: Instruction) -> float:
        """What it gives back when it ends."""
        return sum(map(self._freed, item.parts))

    def peak(self, rank: int) -> float:
        """What a rank holds at its worst moment."""
        return max(self._over_time(rank))

    def _over_time(self, rank: int) -> Iterator[float]:
        held = self.carried(rank)
        yield held
        for item in self._program.ranks[rank]:
            held += self.taken(item)
            yield held
            held -= self.freed(item)

    def _taken(self, part: Instruction) -> float:
        if part.kind is Kind.F and part.microbatch is not None:
            return self._kept(part.stage, part.microbatch)
        if part.kind is Kind.R:
            return self._full[part.stage] - self._inputs[part.stage]
        return 0.0

    def _freed(self, part: Instruction) -> float:
        full, waiting = self._full[part.stage], self._waiting[part.stage]
        if not self._keeps:
            return full if part.kind is Kind.F else 0.0
        if part.kind is Kind.I:
            return full - waiting
        return {Kind.B: full, Kind.W: waiting}.get(part.kind, 0.0)

    def _kept(self, stage: int, microbatch: int) -> float:
        checkpointed = (stage, microbatch) in self._again
        return self._inputs[stage] if checkpointed else self._full[stage]


def peak_activations(program: Program, table: CostTable | None = None) -> tuple[float, ...]:
    """Peak per rank in full-rank microbatches: (stage, microbatch) pairs over V.

    Peaks are not divided where a microbatch crosses one stage of a rank (two weight copies).

    Args:
        program: Any.
        table: Says what share of a full activation a stage's input is; None for nothing, which
            counts full activations alone.
    """
    count = program.placement.num_stages
    share = 1.0 / program.placement.stages_per_microbatch
    inputs = (0.0,) * count if table is None or not table.stage_input else table.stage_input
    holding = Holding(program, (1.0,) * count, inputs)
    return tuple(share * holding.peak(rank) for rank in range(len(program.ranks)))


def peak_bytes(program: Program, table: CostTable) -> tuple[int | None, ...]:
    """Peak per rank: state of its stages and activations; None where the table has no bytes."""
    if table.activation_bytes is None or table.state_bytes is None:
        return (None,) * len(program.ranks)
    full = [float(value) for value in table.activation_bytes]
    shares = table.stage_input or (0.0,) * len(full)
    holding = Holding(program, full, [s * f for s, f in zip(shares, full, strict=True)])
    return tuple(
        int(
            sum(table.state_bytes[stage] for stage in program.placement.stages_of(rank))
            + holding.peak(rank)
        )
        for rank in range(len(program.ranks))
    )
