"""Lists of a rank that serves two directions at once, written as the patterns that papers give.

Way 0 is the one in which the rank stands early: the pipe that starts at the nearer end (two opposed
pipes), or the way out (a V). Way 1 is the other pipe, or the way back. A step is spelled

    F0 B0 I0   forward, backward, input gradient of the next microbatch of way 0
    W          the oldest weight gradient that is owed, of either way
    F0&B1      a forward and a backward as one fused pair

and each way counts its own microbatches, so the patterns need no numbers. This module knows no
schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil

from strategies.errors import PlanError
from strategies.ir.instruction import (
    Instruction,
    backward,
    forward,
    input_gradient,
    overlap,
    weight_gradient,
)
from strategies.ir.kinds import Kind
from strategies.schedules.schedule import Rows, Shape

_MAKE = {"F": forward, "B": backward, "I": input_gradient}


def number_steps(
    steps: Iterable[str], *, stages: tuple[int, int], microbatch: Callable[[int, int], int]
) -> tuple[Instruction, ...]:
    """Puts the rank's stages on way 0 and way 1, and microbatches, into its pattern.

    ``microbatch`` takes (way, index) to the number of that way's index-th microbatch.

    >>> row = number_steps(["F0", "F1", "I1", "F0&B0", "W"], stages=(0, 3), microbatch=max)
    >>> " ".join(map(str, row))
    '0F0 3F1 3I1 (0F1;0B0)OVERLAP_F_B 3W1'
    """
    counts = {(kind, way): 0 for kind in (Kind.F, Kind.B) for way in (0, 1)}
    owed: list[Instruction] = []
    row = []
    for step in steps:
        parts = []
        for part in step.split("&"):
            if part == "W":
                gradient = owed.pop(0)
                assert gradient.microbatch is not None
                parts.append(weight_gradient(gradient.stage, gradient.microbatch))
                continue
            letter, way = part[0], int(part[1:])
            key = (Kind.F if letter == "F" else Kind.B, way)
            parts.append(_MAKE[letter](stages[way], microbatch(way, counts[key])))
            counts[key] += 1
            if letter == "I":
                owed.append(parts[-1])
        row.append(parts[0] if len(parts) == 1 else overlap(*parts))
    return tuple(row)


def mirrored(pp: int, steps_of: Callable[[int], Iterable[str]]) -> Rows:
    """Rows for two opposed pipes; rank P-1-r does in one pipe what rank r does in the other.

    ``steps_of`` takes the distance to the nearer end, 0 to P/2-1, to the pattern of such a rank.
    """
    return tuple(
        number_steps(
            steps_of(distance),
            stages=(distance, pp - 1 - distance),
            microbatch=_even_down if rank == distance else _even_up,
        )
        for rank in range(pp)
        for distance in [min(rank, pp - 1 - rank)]
    )


def _even_down(way: int, index: int) -> int:
    """On the lower half way 0 is the pipe that runs down, with the even microbatches."""
    return 2 * index + way


def _even_up(way: int, index: int) -> int:
    return 2 * index + 1 - way


def require_even(shape: Shape, name: str, *, rounds: int = 0) -> None:
    """The rule of schedules with two opposed pipes: P even, M even and >= ``rounds`` * P.

    Raises:
        PlanError: It is broken; the message has the nearest values that work.
    """
    pp, given = shape.pp, shape.num_microbatches
    if pp % 2:
        fixes = []
        for near in (pp - 1, pp + 1):
            if near >= 2:
                works = _nearest_even(given, rounds * near)
                more = "" if given in works else f" num_microbatches={works[-1]}"
                fixes.append(f"pp={near}{more}")
        raise PlanError(
            f"pp={pp} is odd: {name} runs two opposed pipelines, which meet between two ranks. "
            f"Try {' or '.join(fixes)}."
        )
    works = _nearest_even(given, rounds * pp)
    if given not in works:
        least = f" >= {rounds} * pp = {rounds * pp}" if rounds else ""
        fixes = [f"num_microbatches={value}" for value in works]
        raise PlanError(
            f"num_microbatches={given}: {name} gives half of the microbatches to each of two "
            f"opposed pipelines and needs an even number{least}. Try {' or '.join(fixes)}."
        )


def _nearest_even(given: int, least: int) -> list[int]:
    """Even numbers >= max(2, least) next to ``given``, ascending; ``given`` alone if it is one."""
    least = max(2, 2 * ceil(least / 2))
    around = [given] if given % 2 == 0 else [given - 1, given + 1]
    return [value for value in around if value >= least] or [least]


# -------------------------------------------------------------------------------------- dual steps
# The eight steps of DualPipe on one rank; two opposed pipes and a V share them.
#
# DeepSeek-AI, 2024, https://arxiv.org/abs/2412.19437; https://github.com/deepseek-ai/DualPipe.
#
# Cut between its middle ranks, DualPipe on P ranks is a V on P/2 ranks: what the opposed pipe does
# on rank r is the V's way back. The steps know neither stages nor microbatches.


def dualpipe_steps(*, rank: int, num_ranks: int, per_way: int) -> list[str]:
    """The pattern of one rank of the V.

    Args:
        rank: r; in DualPipe the distance to the nearer end.
        num_ranks: R of the V; in DualPipe half of the ranks.
        per_way: N >= 2R, microbatches on each way.

    >>> print(*dualpipe_steps(rank=0, num_ranks=2, per_way=4))
    F0 F0 F0 F1 I1 W F1 F0&B1 F1&B0 B1 F1&B0 B1 I0 W I0 W
    """
    inner = num_ranks - 1 - rank
    steps = ["F0"] * (2 * inner)
    steps += ["F0", "F1"] * (rank + 1)
    steps += ["I1", "W", "F1"] * inner
    main = ["F0&B1", "F1&B0"] * (per_way - 2 * num_ranks + rank + 1)
    if inner == 0:
        # Everybody waits for this first backward: in a pair it would end later.
        main[0:1] = ["F0", "B1"]
    steps += main
    steps += ["B1", "F1&B0"] * inner
    # The second half of the drain passes input gradients on first; weight gradients fill its gaps.
    drain = ["B1", "B0"] * (rank + 1)
    steps += drain[: rank + 1] + [step.replace("B", "I") for step in drain[rank + 1 :]]
    steps += ["W", "I0"] * inner
    steps += ["W"] * (rank + 1)
    return steps
