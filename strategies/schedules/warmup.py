"""The one frame that all 1F1B-like schedules share: warm up, alternate, drain."""

from __future__ import annotations

from strategies.ir.instruction import Instruction


def alternate(
    forwards: list[Instruction], backwards: list[Instruction], warmup: int
) -> tuple[Instruction, ...]:
    """``warmup`` forwards, then one forward and one backward in turn, then what is left.

    >>> from strategies.ir.instruction import forward, backward
    >>> row = alternate([forward(0, m) for m in range(3)], [backward(0, m) for m in range(3)], 1)
    >>> " ".join(map(str, row))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    warmup = min(warmup, len(forwards))
    row = forwards[:warmup]
    steady = len(forwards) - warmup
    for index in range(steady):
        row.append(forwards[warmup + index])
        row.append(backwards[index])
    return tuple(row + backwards[steady:])
