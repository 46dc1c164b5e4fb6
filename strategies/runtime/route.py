"""One rank's list of a program, with what the executor derives from it once."""

from __future__ import annotations

from dataclasses import dataclass

from strategies.ir.instruction import Instruction, Kind
from strategies.ir.program import Program
from strategies.lowering.release import release_points


@dataclass(frozen=True)
class Route:
    """A rank's list, and the places in it that mean something to the executor.

    Attributes:
        row: The instructions.
        receives: Places of the RECVs, in order.
        release: Place of a RECV -> the SENDs that have arrived when it has.
        arming: (place, stage) of last gradients, where REDUCE overlaps.
        last_forward: Place of the last F; -1 without one.
        recomputed: (stage, microbatch) whose forward keeps its input only.
    """

    row: tuple[Instruction, ...]
    receives: tuple[int, ...]
    release: dict[int, tuple[Instruction, ...]]
    arming: frozenset[tuple[int, int]]
    last_forward: int
    recomputed: frozenset[tuple[int, int | None]]

    @classmethod
    def of(cls, program: Program, rank: int) -> Route:
        """The route of a pipeline rank through a lowered program."""
        row = program.ranks[rank]
        last: dict[int, int] = {}
        overlapped: set[int] = set()
        last_forward = -1
        for place, item in enumerate(row):
            for part in item.parts:
                if part.kind is Kind.B or part.kind is Kind.W:
                    last[part.stage] = place
                elif part.kind is Kind.F:
                    last_forward = place
            if item.kind is Kind.REDUCE and not item.after:
                overlapped.add(item.stage)
        return cls(
            row=row,
            receives=tuple(p for p, item in enumerate(row) if item.kind is Kind.RECV),
            release=release_points(program, rank),
            arming=frozenset((p, stage) for stage, p in last.items() if stage in overlapped),
            last_forward=last_forward,
            recomputed=frozenset((i.stage, i.microbatch) for i in row if i.kind is Kind.R),
        )
