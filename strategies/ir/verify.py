"""When a program is correct. Runs after every pass; what it lets through can be executed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations, product
from operator import attrgetter

from strategies.errors import ProgramError, name_ranks
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import (
    BUCKET_KINDS,
    CHANNEL_KINDS,
    EXCHANGE_KINDS,
    KINDS,
    MESSAGE_KINDS,
    MICROBATCH_KINDS,
    STAGE_KINDS,
    UPDATE_KINDS,
    Kind,
    Value,
    spellings,
)
from strategies.ir.program import Program


def verify(program: Program) -> Program:
    """Returns the program if it keeps every rule.

    1. Every instruction has the fields of its kind, and is one that the program's role runs.
    2. It stands on the rank that the placement names.
    3. A value is made once.
    4. A value that is used is made: so every message has both ends, a backward its forward, its
       recomputation and the weights that the forward has read.
    5. A value that is received is used.
    6. Every microbatch goes through every stage, in training with one whole backward; where weights
       are updated, each owner of a stage makes each update.
    7. Where there is one update, a rank's list ends with its STEPs; where there are several, they
       come in turn, and a forward reads the newest, which is as late as the program's updates
       say. Owners of a stage reduce and gather the same buckets in the same order.
    8. The lists end: no deadlock under rendezvous semantics.

    Raises:
        ProgramError: The first rule that is broken, with the instruction and its rank.
    """
    check_rules(program)
    _ = program.graph
    return program


def check_rules(program: Program) -> None:
    """All rules but the last: also for lists that are going to be put in another order.

    Raises:
        ProgramError: As ``verify``.
    """
    if len(program.ranks) != program.placement.num_ranks:
        raise ProgramError(
            f"{program.schedule}: {len(program.ranks)} rows for {program.placement.num_ranks} "
            "ranks.",
            fix="Write one row per rank.",
        )
    several = _has_versions(program)
    for rank, row in enumerate(program.ranks):
        for place, item in enumerate(row):
            try:
                _check_fields(rank, item)
                _check_place(program, rank, item, versions=several)
            except ProgramError as error:
                raise _broken(program, rank, place, error.reason, error.fix) from None
    _ = program.dependencies
    _check_updates(program)
    _check_owners(program)


def _broken(program: Program, rank: int, place: int, text: str, fix: str = "") -> ProgramError:
    return ProgramError(f"{program.schedule}: {text}", fix=fix, place=(rank, place))


# Of a kind: microbatch, bucket, peer and halves, and what its payload may be.
_FIELDS = {
    kind: (
        (
            facts.number == "microbatch", facts.number == "bucket", kind in MESSAGE_KINDS,
            kind is Kind.OVERLAP,
        ),
        (Kind.F, Kind.B) if kind in MESSAGE_KINDS else (None,),
    )
    for kind, facts in KINDS.items() if kind not in EXCHANGE_KINDS
}  # fmt: skip
_KEPT = {Value.GRAPH, Value.INPUT, Value.SAVED_FOR_W}
_NOT_RUN = {
    "train": frozenset[Kind](),
    "accumulate": UPDATE_KINDS,
    "forward": UPDATE_KINDS | {kind for kind, facts in KINDS.items() if _KEPT & {*facts.uses}},
}


def _check_fields(rank: int, item: Instruction) -> None:
    """Each kind has its own fields; text cannot say it otherwise, a schedule in Python can."""
    if not isinstance(item, Instruction):
        raise ProgramError(
            f"rank {rank} has {item!r}, which is no Instruction.",
            fix="Make them with forward(stage, microbatch) and the like of "
            "strategies.ir.instruction.",
        )
    here = (
        item.microbatch is not None, item.bucket is not None, item.peer is not None,
        bool(item.halves),
    )  # fmt: skip
    wanted, payloads = _FIELDS.get(item.kind, ((), ()))
    if here != wanted or item.payload not in payloads:
        raise ProgramError(
            f"{item!r} on rank {rank} is malformed. "
            f"{' '.join(spellings(MICROBATCH_KINDS - {Kind.OVERLAP}))} have a microbatch, "
            "SEND and RECV also a payload (F or B) and a peer, "
            f"{' and '.join(spellings(BUCKET_KINDS))} a bucket, "
            f"{' and '.join(spellings(STAGE_KINDS))} none of these, "
            "OVERLAP two halves."
        )
    if item.halves and not _fuses(item):
        raise ProgramError(
            f"{item} on rank {rank} does not fuse a forward with a whole backward or I of another "
            "microbatch.",
            fix="Write an instruction for each half.",
        )


def _has_versions(program: Program) -> bool:
    """Whether it has several updates, and they have been added."""
    items = (item for row in program.ranks for item in row)
    return program.updates is not None and any(item.version is not None for item in items)


def _check_place(program: Program, rank: int, item: Instruction, *, versions: bool) -> None:
    """Numbers that exist, on their rank, in a program that has such instructions."""
    placement, count = program.placement, program.num_microbatches
    num_stages = placement.num_stages
    for part in item.halves or (item,):
        stage, number = part.stage, part.microbatch
        if not 0 <= stage < num_stages:
            raise ProgramError(
                f"{part} on rank {rank} names stage {stage}, but there are {num_stages} stages, "
                f"0 to {num_stages - 1}."
            )
        if number is not None and not 0 <= number < count:
            raise ProgramError(
                f"{part} on rank {rank}, but there are {count} microbatches, counted from 0."
            )
        ranks = placement.owners(stage) if number is None else (placement.rank_of(stage, number),)
        if rank not in ranks:
            raise ProgramError(
                f"{part} stands on rank {rank}, but the {placement.name} placement has its stage "
                f"on {name_ranks(ranks)}.",
                fix="Move it there.",
            )
        if part.kind in _NOT_RUN[program.role]:
            raise ProgramError(
                f"{part} on rank {rank} in a program that is to {program.role} only."
            )
    if (item.version is not None) is not (versions and item.kind not in MESSAGE_KINDS):
        named = "no version" if item.version is None else f"version {item.version}"
        updates = "several updates" if versions else "one update"
        raise ProgramError(
            f"{item} on rank {rank} names {named} of the weights in a program with {updates}.",
            fix="" if versions else "Leave it out, or set schedule=pipedream_2bw or "
            "schedule=pipedream, whose microbatches read several versions of the weights.",
        )  # fmt: skip
    if item.kind in UPDATE_KINDS and not program.microbatches_of(item.version):
        raise ProgramError(f"{item} on rank {rank} belongs to an update that has no gradient.")
    if item.kind is Kind.LOSS and (item.stage < num_stages - 1 or placement.weight_copies > 1):
        raise ProgramError(
            f"{item} needs the outputs of all microbatches, which only one owner of stage "
            f"{num_stages - 1} has."
        )


def _fuses(item: Instruction) -> bool:
    """Whether an OVERLAP is a forward and a backward, bare, named by its forward."""
    if [half.kind for half in item.halves] not in ([Kind.F, Kind.B], [Kind.F, Kind.I]):
        return False
    first, second = item.halves
    bare = all(replace(half, after=(), version=None) == half for half in item.halves)
    here = (first.stage, first.microbatch)
    return bare and (item.stage, item.microbatch) == here and first.microbatch != second.microbatch


def _check_updates(program: Program) -> None:
    """Which weights a list reads and makes, and that it makes all it has to."""
    updates = program.updates if _has_versions(program) else None
    steps: set[tuple[int, int, int | None]] = set()
    for rank, row in enumerate(program.ranks):
        newest: dict[int, int] = {}
        for place, item in enumerate(row):
            kind, last = item.kind, newest.get(item.stage, 0)
            if kind is Kind.STEP:
                if updates and item.version != last + 1:
                    text = f"{item} makes version {item.version} of weights whose newest is {last}"
                    fix = "Updates are applied in turn."
                    raise _broken(program, rank, place, f"{text}.", fix)
                newest[item.stage] = last + 1
                steps.add((rank, item.stage, item.version))
            elif updates and kind in (Kind.F, Kind.GATHER) and item.version != last:
                text = f"{item} uses version {item.version} of the weights, but the newest that "
                raise _broken(program, rank, place, f"{text}the rank has made is {last}.")
            elif updates and item.microbatch is not None and kind not in MESSAGE_KINDS:
                read = updates.version_read(item.stage, item.microbatch)
                if item.version != read:
                    text = (
                        f"{item} reads version {item.version} of the weights, but its microbatch "
                    )
                    fix = f"Write {replace(item, version=read)}."
                    raise _broken(program, rank, place, f"{text}has read version {read}.", fix)
            elif newest and not updates:
                text = f"{item} on rank {rank} stands behind a STEP, with which a rank's list ends."
                raise _broken(program, rank, place, text)
    if not steps and not (program.lowered and program.role == "train"):
        return  # No updates yet.
    for rank, stages in enumerate(map(program.placement.stages_of, range(len(program.ranks)))):
        for stage, version in product(stages, program.versions):
            if (rank, stage, version) not in steps:
                name = Instruction(Kind.STEP, stage, version=version)
                raise ProgramError(
                    f"{program.schedule}: rank {rank} owns stage {stage} and never runs {name}."
                )


_COLLECTIVE = attrgetter("kind", "stage", "bucket", "version")


def _check_owners(program: Program) -> None:
    """Buckets without gaps; ranks that share stages meet on their channels in one order."""
    placement = program.placement
    collectives = [[item for item in row if item.kind in CHANNEL_KINDS] for row in program.ranks]
    for rank, row in enumerate(collectives):
        found: dict[int, Counter[int]] = {}
        for item in row:
            if item.bucket is not None:
                found.setdefault(item.stage, Counter())[item.bucket] += 1
        for stage, buckets in found.items():
            if sorted(buckets) != list(range(len(buckets))) or len({*buckets.values()}) > 1:
                raise ProgramError(
                    f"{program.schedule}: rank {rank} reduces buckets {sorted(buckets)} of stage "
                    f"{stage}. Buckets count from 0 without a gap."
                )
    if placement.weight_copies == 1:
        return
    for first, second in combinations(range(len(collectives)), 2):
        shared = {*placement.stages_of(first)} & {*placement.stages_of(second)}
        here, there = (
            [item for item in collectives[rank] if item.stage in shared] for rank in (first, second)
        )
        if [*map(_COLLECTIVE, here)] != [*map(_COLLECTIVE, there)]:
            runs, others = (
                " ".join(str(replace(item, after=())) for item in row) or "none"
                for row in (here, there)
            )
            raise ProgramError(
                f"{program.schedule}: ranks {first} and {second} hold copies of stages "
                f"{sorted(shared)} and must meet on them in the same order, but rank {first} runs "
                f"{runs}, rank {second} runs {others}."
            )
