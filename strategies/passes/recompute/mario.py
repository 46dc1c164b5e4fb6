"""Every forward keeps its input only and is run again right before its backward.

Chen et al., 2016, https://arxiv.org/abs/1604.06174, with a whole stage as the checkpointed part. A
forward whose (stage, microbatch) has an R is the checkpointed kind; there is no other mark. Each R
carries an edge from the gradient that its backward waits for, so it starts when that has arrived:
this is what a framework does that recomputes inside its backward, and what the next pass improves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strategies.analysis.memory import Holding
from strategies.costs.table import CostTable
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import BACKWARD_KINDS, Kind
from strategies.ir.program import Program
from strategies.passes.recompute.list_clock import ListClock

Pair = tuple[int, int]  # stage, microbatch


def apply_checkpoint(program: Program) -> Program:
    """Puts R(stage, microbatch) before the B, I or fused pair that reads what it rebuilds."""
    gradients = gradient_edges(program)
    rows = []
    for row in program.ranks:
        result: list[Instruction] = []
        for item in row:
            for part in item.parts:
                if part.kind in BACKWARD_KINDS:
                    assert part.microbatch is not None
                    edges = gradients[part.stage, part.microbatch]
                    result.append(Instruction(Kind.R, part.stage, part.microbatch, after=edges))
            result.append(item)
        rows.append(tuple(result))
    return program.with_ranks(tuple(rows))


def gradient_edges(program: Program) -> dict[Pair, tuple[Instruction, ...]]:
    """Per pair, the B or I of other stages that send it the gradient of its outputs."""
    made = {
        (part.stage, part.microbatch): part
        for row in program.ranks
        for item in row
        for part in item.parts
        if part.kind in BACKWARD_KINDS and part.microbatch is not None
    }
    edges: dict[Pair, tuple[Instruction, ...]] = dict.fromkeys(made, ())
    for boundary in program.boundaries:
        for microbatch in range(program.num_microbatches):
            maker = made.get((boundary.target, microbatch))
            if maker is not None and (boundary.source, microbatch) in edges:
                bare = Instruction(maker.kind, maker.stage, maker.microbatch)
                edges[boundary.source, microbatch] += (bare,)
    return edges


# ------------------------------------------------------------------------------- overlap recompute
# The second pass of Mario (Liu et al., 2025, https://doi.org/10.1145/3710848.3710878) fills the
# time in which a rank would wait. An R keeps its place in the list, right before its backward; only
# its edge from the gradient's arrival goes, so that it crosses no other compute and the rank holds
# the full activation a little longer.


def overlap_recompute(program: Program) -> Program:
    rows = tuple(
        tuple(replace(item, after=()) if item.kind is Kind.R else item for item in row)
        for row in program.ranks
    )
    return program.with_ranks(rows)


# --------------------------------------------------------------------------------- prepose forward
# The fourth pass of Mario. Where a rank waits for the gradient of a backward, the next forward of
# its list is moved in front of that backward. Forwards keep their order, and a move stays only if
# the makespan falls, or equal makespans with earlier backwards, and no rank holds more full
# activations at its worst moment than before (a checkpointed forward holds none).

# Times computed again before the search ends, about a second's worth on 32 ranks and 64
# microbatches. A count, not a clock: every rank must come to the same program.
_BUDGET = 400_000


def prepose_forward(program: Program, table: CostTable) -> Program:
    """Moves forwards into waits for gradients, as long as that helps."""
    search = _Search(program, table)
    while search.round():
        pass
    return program.with_ranks(search.clock.lists())


class _Search:
    def __init__(self, program: Program, table: CostTable) -> None:
        self.clock = ListClock(program, table)
        # Full activations that each instruction takes, and gives back.
        count = program.placement.num_stages
        full = Holding(program, (1,) * count, (0,) * count)
        self.takes = list(map(full.taken, self.clock.items))
        self.frees = list(map(full.freed, self.clock.items))
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

    def peak(self, row: Sequence[int]) -> float:
        held = most = 0.0
        for node in row:
            held += self.takes[node]
            most = max(most, held)
            held -= self.frees[node]
        return most


def _forward(item: Instruction) -> bool:
    return any(part.kind is Kind.F for part in item.parts)


# ------------------------------------------------------------------------------- remove redundancy
# The third pass of Mario. Where R directly follows the F of its pair, nothing runs in the time for
# which the activation is given up: the R goes, and the F keeps its graph. At first that is the last
# stage; a forward that has been moved may make more.


def remove_redundancy(program: Program) -> Program:
    """Drops every R whose F stands directly before it."""
    return program.with_ranks(tuple(map(_kept, program.ranks)))


def _kept(row: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    kept: list[Instruction] = []
    for item in row:
        before = kept[-1] if kept else None
        redundant = (
            item.kind is Kind.R
            and before is not None
            and before.kind is Kind.F
            and (before.stage, before.microbatch) == (item.stage, item.microbatch)
        )
        if not redundant:
            kept.append(item)
    return tuple(kept)
