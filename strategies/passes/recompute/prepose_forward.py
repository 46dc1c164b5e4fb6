"""Forwards run ahead, in the time in which a rank waits for a gradient.

The fourth pass of Mario. Where a rank waits for the gradient of a backward, the next forward of its
list is moved in front of that backward. Forwards keep their order, and a move stays only if the
makespan falls, or equal makespans with earlier backwards, and no rank holds more full activations
at its worst moment than before (a checkpointed forward holds none).
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.costs.table import CostTable
from strategies.ir.instruction import BACKWARD_KINDS, Instruction, Kind
from strategies.ir.program import Program
from strategies.ir.recomputed import recomputed_pairs
from strategies.passes.recompute.list_clock import ListClock

# Times computed again before the search ends, about a second's worth on 32 ranks and 64
# microbatches. A count, not a clock: every rank must come to the same program.
_BUDGET = 400_000


def prepose_forward(program: Program, table: CostTable) -> Program:
    """Moves forwards into waits for gradients, as long as that helps.

    Args:
        program: Compute only: no messages, no updates.
        table: What its instructions take.
    """
    search = _Search(program, table)
    while search.round():
        pass
    return program.with_ranks(search.clock.lists())


class _Search:
    def __init__(self, program: Program, table: CostTable) -> None:
        self.clock = ListClock(program, table)
        again = recomputed_pairs(program)
        # Full activations that each instruction takes, and gives back.
        self.takes = [
            sum(
                part.kind is Kind.R
                or (part.kind is Kind.F and (part.stage, part.microbatch) not in again)
                for part in item.parts
            )
            for item in self.clock.items
        ]
        self.frees = [
            sum(part.kind in (Kind.B, Kind.W) for part in item.parts) for item in self.clock.items
        ]
        self.peaks = [self.peak(row) for row in self.clock.rows]
        self.rank = [rank for rank, row in enumerate(self.clock.rows) for _ in row]

    def round(self) -> bool:
        """Tries every wait once, the earliest first; whether anything was moved."""
        clock = self.clock
        waits = [
            (clock.start[node], node)
            for node, item in enumerate(clock.items)
            if item.kind in BACKWARD_KINDS and self.waits(node)
        ]
        moved = False
        for _, node in sorted(waits):
            while clock.updates < _BUDGET and self.waits(node) and self.improve(node):
                moved = True
        return moved and clock.updates < _BUDGET

    def waits(self, node: int) -> bool:
        return self.clock.start[node] > self.clock.free(node) + self.clock.tolerance

    def improve(self, node: int) -> bool:
        """Moves the next forward in front of a waiting backward, if that helps."""
        clock = self.clock
        row = clock.rows[self.rank[node]]
        old = next(
            (p for p in range(clock.place(node) + 1, len(row)) if _forward(clock.items[row[p]])), -1
        )
        if old < 0 or clock.items[row[old]].halves:
            return False
        ahead = row[old]
        # What is there before the wait ends cannot depend on the backward that waits.
        if clock.arrival(ahead) >= clock.start[node] - clock.tolerance:
            return False
        makespan, starts = clock.cost
        changed = clock.hoist(ahead, clock.place(node))
        if changed is None:
            return False
        now, sooner = clock.cost
        same = abs(now - makespan) <= clock.tolerance
        better = now < makespan - clock.tolerance or (same and sooner < starts - clock.tolerance)
        if better and self.peak(row) <= self.peaks[self.rank[node]]:
            return True
        clock.put_back(ahead, old, changed)
        return False

    def peak(self, row: Sequence[int]) -> int:
        held = most = 0
        for node in row:
            held += self.takes[node]
            most = max(most, held)
            held -= self.frees[node]
        return most


def _forward(item: Instruction) -> bool:
    return any(part.kind is Kind.F for part in item.parts)
