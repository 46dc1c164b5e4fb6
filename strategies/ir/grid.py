"""Programs as grids for error messages: where every rank stands, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from strategies.ir.instruction import Instruction, Kind

if TYPE_CHECKING:
    from strategies.ir.program import Program

_AROUND = 4


def stuck_report(
    program: Program,
    head: Sequence[int],
    offsets: Sequence[int],
    nodes: Sequence[Instruction],
    needs: Sequence[Sequence[int]],
    partner: Sequence[int],
    done: bytearray,
) -> str:
    """The message for a deadlock: per rank the step it cannot take, and what it waits for."""
    lines = [f"{program.schedule}: the program deadlocks. Every rank waits for another one:"]
    for rank, node in enumerate(head):
        row = program.ranks[rank]
        place = node - offsets[rank]
        if place == len(row):
            lines.append(f"rank {rank} | ended")
            continue
        before = [str(item) for item in row[max(0, place - _AROUND) : place]]
        after = [str(item) for item in row[place + 1 : place + 1 + _AROUND]]
        dots = ["..."] if place > _AROUND else []
        more = ["..."] if place + 1 + _AROUND < len(row) else []
        text = " ".join([*dots, *before, f"[{row[place]}]", *after, *more])
        lines.append(
            f"rank {rank} | {text}  <-- waits for {_cause(node, nodes, needs, partner, done)}"
        )
    return "\n".join(lines)


def _cause(
    node: int,
    nodes: Sequence[Instruction],
    needs: Sequence[Sequence[int]],
    partner: Sequence[int],
    done: bytearray,
) -> str:
    missing = next((need for need in needs[node] if not done[need]), None)
    if missing is None and partner[node] >= 0:
        missing = partner[node]
    if missing is None:
        return "nothing"
    step = "step " + str(nodes[missing])
    return step if nodes[missing].kind is not Kind.RECV else step + " to be posted"
