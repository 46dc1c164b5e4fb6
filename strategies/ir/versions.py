"""Weight versions: who reads which, how many are alive, and how late a gradient comes.

A program with several updates names them. ``0F3#1`` reads version 1 of stage 0's weights, which the
first update has made (version 0 is what training begins with), ``0STEP#2`` makes version 2. A
microbatch's gradient is applied to newer weights than it was taken at, by as many updates as lie
between the version that its forward read and the one that its update makes, less one: its
staleness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from strategies.errors import ProgramError
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import GRADIENT_KINDS, UPDATE_KINDS, Kind
from strategies.ir.program import Program

# Of each of hundreds of thousands of instructions.
_VERSION, _HALVES = attrgetter("version"), attrgetter("halves")


def check_versions(program: Program) -> None:
    """Each backward reads its forward's version; where there are several updates, all are right.

    Then every forward reads the newest version that its rank has made, which replicas that update
    shares of it have gathered; an update is reduced and applied behind all gradients that belong to
    it, in turn, and once; and every gradient belongs to one that is applied.

    Raises:
        ProgramError: The first instruction that breaks a rule, marked in its rank's list.
    """
    if not _versioned(program):
        return
    versioned = program.per_update is not None
    for rank, row in enumerate(program.ranks):
        _check_readers(program, rank, row)
        if versioned:
            _check_made(program, rank, row)


def weight_versions(program: Program) -> tuple[int, ...]:
    """Per rank, how many versions of its weights are alive at its worst moment; 1 without updates.

    A version lives from the update that makes it until the last backward that reads it has run, and
    no newer one is there.
    """
    if not _versioned(program):
        return (1,) * len(program.ranks)
    return tuple(max(_alive(row), default=1) for row in program.ranks)


def gradient_sums(program: Program) -> tuple[int, ...]:
    """Per rank, how many updates' gradients it holds at its worst moment, reduced or not."""
    if program.per_update is None:
        return (1,) * len(program.ranks)
    return tuple(max(_summed(program, row), default=1) for row in program.ranks)


def staleness(program: Program) -> tuple[int, ...]:
    """Per stage, by how many updates a gradient is late at most."""
    late = [0] * program.placement.num_stages
    for row in program.ranks:
        for item in row:
            for part in item.parts:
                made = None if part.microbatch is None else program.update_of(part.microbatch)
                if part.kind is Kind.F and part.version is not None and made is not None:
                    late[part.stage] = max(late[part.stage], made - 1 - part.version)
    return tuple(late)


def _versioned(program: Program) -> bool:
    """Whether its instructions name versions; a planner asks of hundreds of programs."""
    return program.per_update is not None or any(
        {*map(_VERSION, row)} - {None}
        or any(
            half.version is not None
            for halves in filter(None, map(_HALVES, row))
            for half in halves
        )
        for row in program.ranks
    )


def _check_readers(program: Program, rank: int, row: Sequence[Instruction]) -> None:
    read: dict[tuple[int, int | None], int | None] = {}
    for place, item in enumerate(row):
        for part in item.parts:
            if part.microbatch is None or part.kind in (Kind.SEND, Kind.RECV):
                continue
            here = (part.stage, part.microbatch)
            if part.kind is Kind.F:
                read[here] = part.version
            elif here in read and read[here] != part.version:
                raise _wrong(
                    program, rank, place,
                    f"{part} reads {_named(part.version)} of the weights, but its forward "
                    f"{part.stage}F{part.microbatch} has read {_named(read[here])}: the gradient "
                    "would be that of no weights at all. Give both the same version.",
                )  # fmt: skip


def _check_made(program: Program, rank: int, row: Sequence[Instruction]) -> None:
    """The rules for a rank's REDUCEs and STEPs, and what its forwards read."""
    newest = dict.fromkeys(program.placement.stages_of(rank), 0)
    missing: dict[tuple[int, int | None], int] = {}
    updates = any(item.kind is Kind.STEP for item in row)
    for item in row:
        for part in item.parts if updates else ():
            if part.kind in GRADIENT_KINDS and part.microbatch is not None:
                made = (part.stage, program.update_of(part.microbatch))
                missing[made] = missing.get(made, 0) + 1
    stepped: set[tuple[int, int | None]] = set()
    gathers = {item.stage for item in row if item.kind is Kind.GATHER}
    gathered: set[tuple[int, int | None]] = set()
    for place, item in enumerate(row):
        if item.kind is Kind.GATHER:
            gathered.add((item.stage, item.version))
            if item.version != newest[item.stage]:
                raise _wrong(
                    program, rank, place,
                    f"{item} gathers {_named(item.version)} of the weights, but the newest that "
                    f"the rank has made is {newest[item.stage]}.",
                )  # fmt: skip
        for part in item.parts:
            if part.microbatch is not None and part.kind in GRADIENT_KINDS and updates:
                missing[part.stage, program.update_of(part.microbatch)] -= 1
            if part.kind is Kind.F and updates and part.version != newest[part.stage]:
                raise _wrong(
                    program, rank, place,
                    f"{part} reads {_named(part.version)} of the weights, but the newest that the "
                    f"rank has made is {newest[part.stage]}.",
                )  # fmt: skip
            shared = part.kind is Kind.F and part.stage in gathers and part.version
            if shared and (part.stage, part.version) not in gathered:
                raise _wrong(
                    program, rank, place,
                    f"{part} reads {_named(part.version)} of the weights, of which replicas have "
                    "updated shares and gathered none.",
                )  # fmt: skip
        if item.kind not in UPDATE_KINDS:
            continue
        update = (item.stage, item.version)
        if update not in missing or missing[update] or update in stepped:
            state = "is applied already" if update in stepped else "has gradients to come"
            state = state if update in missing else "has no gradient"
            raise _wrong(program, rank, place, f"{item}: the update that it belongs to {state}.")
        if item.kind is Kind.STEP:
            if item.version != newest[item.stage] + 1:
                raise _wrong(
                    program, rank, place,
                    f"{item} makes {_named(item.version)} of weights whose newest version is "
                    f"{newest[item.stage]}. Updates are applied in turn.",
                )  # fmt: skip
            newest[item.stage] += 1
            stepped.add(update)
    left = sorted(str(update) for stage, update in missing.keys() - stepped)
    if left:
        raise ProgramError(
            f"{program.schedule}: rank {rank} has gradients of the updates {', '.join(left)}, "
            "which it never applies."
        )


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
                sums.setdefault(part.stage, set()).add(program.update_of(part.microbatch))
        here = sums.get(item.stage, set())
        yield max(len(here), 1)
        if item.kind is Kind.STEP:
            here.discard(item.version)


def _named(version: int | None) -> str:
    return "no version" if version is None else f"version {version}"


def _wrong(program: Program, rank: int, place: int, what: str) -> ProgramError:
    from strategies.ir.graph import around  # which needs programs, as this does

    rows = [
        f"rank {other} | {around(row, place)}  <-- here"
        if other == rank
        else f"rank {other} | {' '.join(map(str, row[max(0, place - 4) : place + 5]))}"
        for other, row in enumerate(program.ranks)
    ]
    return ProgramError(
        "\n".join([f"{program.schedule}: rank {rank}, step {place}: {what}", *rows])
    )
