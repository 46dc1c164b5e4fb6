"""The verifier's rules for R: once per checkpointed pair, after its F, before its first reader."""

from __future__ import annotations

from strategies.errors import ProgramError
from strategies.ir.instruction import Kind
from strategies.ir.program import Program
from strategies.ir.recomputed import recomputed_pairs

_READERS = (Kind.B, Kind.I, Kind.W)


def check_recompute(program: Program) -> None:
    """That it stands once, and on the pair's rank, holds for every instruction.

    Raises:
        ProgramError: The first rule that is broken, with the instruction and its rank.
    """
    pairs = recomputed_pairs(program)
    if not pairs:
        return
    carried = frozenset(program.entry.in_flight)
    for rank, row in enumerate(program.ranks):
        made: set[tuple[int, int | None]] = set(carried)
        rebuilt: set[tuple[int, int | None]] = set()
        for item in row:
            for part in item.parts:
                pair = (part.stage, part.microbatch)
                if part.kind is Kind.F:
                    made.add(pair)
                elif part.kind is Kind.R:
                    if pair not in made:
                        raise ProgramError(
                            f"{program.schedule}: {part} on rank {rank} stands before "
                            f"{part.stage}F{part.microbatch}, which keeps the input that it reads: "
                            "the list deadlocks."
                        )
                    rebuilt.add(pair)
                elif part.kind in _READERS and pair in pairs and pair not in rebuilt:
                    raise ProgramError(
                        f"{program.schedule}: {part} on rank {rank} stands before "
                        f"{part.stage}R{part.microbatch}, which rebuilds the graph that it reads: "
                        "the list deadlocks."
                    )
