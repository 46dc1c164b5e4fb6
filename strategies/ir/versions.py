"""Weight versions: who reads which, how many are alive, and how late a gradient comes.

A program with several updates names them. ``0F3#1`` reads version 1 of stage 0's weights, which the
first update has made (version 0 is what training begins with), ``0STEP#2`` makes version 2. A
microbatch's gradient is applied to newer weights than it was taken at, by as many updates as lie
between the version that its forward read and the one that its update makes, less one: its
staleness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strategies.ir.instruction import Instruction
from strategies.ir.kinds import GRADIENT_KINDS, Kind
from strategies.ir.program import Program


def weight_versions(program: Program) -> tuple[int, ...]:
    """Per rank, how many versions of its weights are alive at its worst moment; 1 without updates.

    A version lives from the update that makes it until the last backward that reads it has run, and
    no newer one is there.
    """
    if program.updates is None:
        return (1,) * len(program.ranks)
    return tuple(max(_alive(row), default=1) for row in program.ranks)


def gradient_sums(program: Program) -> tuple[int, ...]:
    """Per rank, how many updates' gradients it holds at its worst moment, reduced or not."""
    if program.updates is None:
        return (1,) * len(program.ranks)
    return tuple(max(_summed(program, row), default=1) for row in program.ranks)


def staleness(program: Program) -> tuple[int, ...]:
    """Per stage, by how many updates a gradient is late at most."""
    if program.updates is None:
        return (0,) * program.placement.num_stages
    most = program.updates.of(program.num_microbatches - 1)
    return tuple(min(delay, most) for delay in program.updates.delay)


def _alive(row: Sequence[Instruction]) -> Iterator[int]:
    """Versions alive on a rank, whenever that changes; of its stage with most of them."""
    newest: dict[int, int] = {}
    flying: dict[int, dict[int, int]] = {}  # stage -> microbatch -> version
    for item in row:
        for part in item.parts:
            if part.microbatch is None or part.version is None:
                continue
            here = flying.setdefault(part.stage, {})
            if part.kind is Kind.F:
                here[part.microbatch] = part.version
            elif part.kind in GRADIENT_KINDS:
                here.pop(part.microbatch, None)
        if item.kind is Kind.STEP and item.version is not None:
            newest[item.stage] = item.version
        here = flying.get(item.stage, {})
        yield len({newest.get(item.stage, 0), *here.values()})


def _summed(program: Program, row: Sequence[Instruction]) -> Iterator[int]:
    sums: dict[int, set[int | None]] = {}
    for item in row:
        for part in item.parts:
            if part.kind in GRADIENT_KINDS and part.microbatch is not None:
                sums.setdefault(part.stage, set()).add(program.version_made(part.microbatch))
        here = sums.get(item.stage, set())
        yield max(len(here), 1)
        if item.kind is Kind.STEP:
            here.discard(item.version)
