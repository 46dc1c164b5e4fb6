"""When a program is correct. Runs after every pass; what it lets through can be executed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

from strategies.errors import ProgramError
from strategies.ir.instruction import Instruction, exchanges
from strategies.ir.kinds import (
    BACKWARD_KINDS,
    BUCKET_KINDS,
    CHANNEL_KINDS,
    EXCHANGE_KINDS,
    GRADIENT_KINDS,
    KINDS,
    MESSAGE_KINDS,
    MICROBATCH_KINDS,
    STAGE_KINDS,
    UPDATE_KINDS,
    Kind,
    spellings,
)
from strategies.ir.program import Program, last_gradients, recomputed_pairs
from strategies.ir.versions import check_versions


def verify(program: Program) -> Program:
    """Returns the program if it keeps every rule.

    The rules: every (stage, microbatch) has one F and, in a training program, one B or one I with
    one W, on the rank that the placement names, unless the entry or exit state says that it is in
    flight; values are made before they are used; every message between ranks has one SEND and one
    RECV; a pair that is recomputed has one R, after its F and before its B or I; no deadlock under
    rendezvous semantics; every activation and received buffer is consumed;
    the loss of the whole batch stands once, on the last stage's only rank, before its backwards;
    a backward reads the weights that its forward has read, and of several updates each has its
    gradients, in turn; reductions follow the stage's last gradient, all owners of a stage reduce
    the same buckets in the same order, weights are gathered before they are used, and each owner
    steps each stage once.

    Raises:
        ProgramError: The first rule that is broken, with the instruction and its rank.
    """
    if len(program.ranks) != program.placement.num_ranks:
        raise ProgramError(
            f"{program.schedule}: {len(program.ranks)} rows for {program.placement.num_ranks} "
            "ranks.",
            fix="Write one row per rank.",
        )
    _check_fields(program)
    _check_once(program)
    _check_ranks(program)
    _check_complete(program)
    _check_recompute(program)
    _check_loss(program)
    _check_messages(program)
    check_versions(program)
    # Before the graph, which would call a REDUCE or STEP that stands too early a deadlock.
    _check_updates(program)
    _check_reductions(program)
    _check_exchanges(program)
    graph = program.graph  # Producers first, no deadlock.
    assert len(graph.order) == len(graph.nodes)
    return program


def _check_fields(program: Program) -> None:
    """Each kind has its own fields; text cannot say it otherwise, a schedule in Python can."""
    for rank, row in enumerate(program.ranks):
        for item in row:
            if not isinstance(item, Instruction):
                raise ProgramError(
                    f"{program.schedule}: rank {rank} has {item!r}, which is no Instruction.",
                    fix=(
                        "Make them with forward(stage, microbatch) and the like of "
                        "strategies.ir.instruction."
                    ),
                )
            message = item.kind in MESSAGE_KINDS
            number = KINDS[item.kind].number
            right = (
                (item.microbatch is not None) is (number in ("microbatch", "layer"))
                and (item.bucket is not None) is (number in ("bucket", "layer"))
                and (item.peer is not None) is message
                and item.payload in _PAYLOADS.get(item.kind, (None,))
                and (_fuses(item) if item.kind is Kind.OVERLAP else not item.halves)
            )
            if not right:
                raise ProgramError(
                    f"{program.schedule}: {item!r} on rank {rank} is malformed. "
                    f"{' '.join(spellings(MICROBATCH_KINDS - {Kind.OVERLAP}))} have a microbatch, "
                    "SEND and RECV also a payload (F or B) and a peer, "
                    f"{' and '.join(spellings(EXCHANGE_KINDS))} a pass (F, R or B) and a layer, "
                    f"{' and '.join(spellings(BUCKET_KINDS))} a bucket, "
                    f"{' and '.join(spellings(STAGE_KINDS))} none of these, "
                    "OVERLAP an F and a B or I as halves."
                )


_PAYLOADS: dict[Kind, tuple[Kind | None, ...]] = {
    **dict.fromkeys(MESSAGE_KINDS, (Kind.F, Kind.B)),
    **dict.fromkeys(EXCHANGE_KINDS, (Kind.F, Kind.R, Kind.B)),
}


def _fuses(item: Instruction) -> bool:
    """Whether an OVERLAP is a forward and a backward, bare, named by its forward."""
    if [half.kind for half in item.halves] not in ([Kind.F, Kind.B], [Kind.F, Kind.I]):
        return False
    first = item.halves[0]
    bare = all(replace(half, after=(), version=None) == half for half in item.halves)
    return bare and (item.stage, item.microbatch) == (first.stage, first.microbatch)


def _check_once(program: Program) -> None:
    for rank, row in enumerate(program.ranks):
        for item, count in Counter(
            (i.kind, i.stage, i.microbatch, i.bucket, i.payload, i.peer, _update(i))
            for whole in row
            for i in whole.parts
        ).items():
            if count > 1:
                name = Instruction(*item[:3], bucket=item[3], payload=item[4], peer=item[5])
                raise ProgramError(
                    f"{program.schedule}: rank {rank} runs {name} {count} times. "
                    "Every instruction stands once."
                )


def _update(item: Instruction) -> int | None:
    """What tells the updates of a program apart; compute stands once, whatever it reads."""
    return item.version if item.microbatch is None else None


def _check_ranks(program: Program) -> None:
    placement = program.placement
    for rank, row in enumerate(program.ranks):
        for item in (part for whole in row for part in whole.parts):
            if not 0 <= item.stage < placement.num_stages:
                raise ProgramError(
                    f"{program.schedule}: {item} on rank {rank} names stage {item.stage}, but "
                    f"there are {placement.num_stages} stages, 0 to {placement.num_stages - 1}."
                )
            if item.microbatch is None:
                right = rank in placement.owners(item.stage)
                place = f"ranks {placement.owners(item.stage)}"
            else:
                if not 0 <= item.microbatch < program.num_microbatches:
                    raise ProgramError(
                        f"{program.schedule}: {item} on rank {rank}, but there are "
                        f"{program.num_microbatches} microbatches, counted from 0."
                    )
                right = rank == placement.rank_of(item.stage, item.microbatch)
                place = f"rank {placement.rank_of(item.stage, item.microbatch)}"
            if not right:
                raise ProgramError(
                    f"{program.schedule}: {item} stands on rank {rank}, but the "
                    f"{placement.name} placement has its stage on {place}."
                )


def _check_complete(program: Program) -> None:
    seen = {
        (item.kind, item.stage, item.microbatch)
        for row in program.ranks
        for whole in row
        for item in whole.parts
        if item.kind in MICROBATCH_KINDS
    }
    for stage in range(program.placement.num_stages):
        for microbatch in range(program.num_microbatches):
            here = (stage, microbatch)
            kinds = {kind for kind in MICROBATCH_KINDS if (kind, *here) in seen}
            wanted = "F" if program.role == "forward" else "F and B, or F, I and W"
            gradient = kinds & (BACKWARD_KINDS | GRADIENT_KINDS)
            if program.role == "forward":
                right = kinds == {Kind.F}
            else:
                right = Kind.F in kinds and gradient in ({Kind.B}, {Kind.I, Kind.W})
            if not right:
                have = " ".join(sorted(kind.value for kind in kinds)) or "nothing"
                raise ProgramError(
                    f"{program.schedule}: stage {stage}, microbatch {microbatch} has {have}, "
                    f"a {program.role} program needs {wanted}."
                )


def _check_messages(program: Program) -> None:
    wanted: Counter[tuple[Kind, int, int, int]] = Counter()
    placement = program.placement
    for boundary in program.boundaries if program.lowered else ():
        for microbatch in range(program.num_microbatches):
            ends = (boundary.source, boundary.target)
            if placement.rank_of(ends[0], microbatch) == placement.rank_of(ends[1], microbatch):
                continue
            wanted[Kind.F, *ends, microbatch] += 1
            if program.role != "forward":
                wanted[Kind.B, *ends[::-1], microbatch] += 1
    for kind in (Kind.SEND, Kind.RECV):
        found: Counter[tuple[Kind, int, int, int]] = Counter()
        for row in program.ranks:
            for item in row:
                if item.kind is kind:
                    assert item.payload is not None
                    assert item.peer is not None
                    assert item.microbatch is not None
                    ends = (item.stage, item.peer) if kind is Kind.SEND else (item.peer, item.stage)
                    found[item.payload, *ends, item.microbatch] += 1
        if found != wanted:
            payload, source, target, microbatch = next(iter((found - wanted) + (wanted - found)))
            state = "one too many" if found[payload, source, target, microbatch] else "missing"
            state += "" if program.lowered else ": the program is not lowered"
            raise ProgramError(
                f"{program.schedule}: the {kind.value} of {payload.value}{microbatch} from stage "
                f"{source} to stage {target} is {state}."
            )


def _check_updates(program: Program) -> None:
    """REDUCE after the last gradient of its stage in list order; one STEP per owned stage."""
    if program.per_update is not None:
        return  # Several updates have rules of their own: ``versions``.
    # A compute program has no updates yet; a lowered one is final.
    any_step = any(item.kind is Kind.STEP for row in program.ranks for item in row)
    any_step = any_step or (program.lowered and program.role == "train")
    for rank, row in enumerate(program.ranks):
        last = last_gradients(row)
        updated: dict[int, int] = {}
        used: set[int] = set()
        for place, item in enumerate(row):
            used.update(part.stage for part in item.parts if part.kind is Kind.F)
            if item.kind is Kind.GATHER and item.stage in used:
                raise ProgramError(
                    f"{program.schedule}: {item} on rank {rank} stands after a forward of its "
                    "stage, which then uses the old weights."
                )
            if item.kind in UPDATE_KINDS:
                if program.role != "train":
                    raise ProgramError(
                        f"{program.schedule}: {item} on rank {rank} in a program that is to "
                        f"{program.role} only."
                    )
                if place < last.get(item.stage, -1):
                    raise ProgramError(
                        f"{program.schedule}: {item} on rank {rank} stands before "
                        f"{row[last[item.stage]]}, which still adds to the gradient."
                    )
                if item.kind is Kind.STEP:
                    updated[item.stage] = place
                elif item.stage in updated:
                    raise ProgramError(f"{program.schedule}: {item} on rank {rank} after its STEP.")
            if updated and item.kind is not Kind.STEP:
                raise ProgramError(
                    f"{program.schedule}: {item} on rank {rank} stands behind a STEP, with which a "
                    "rank's list ends."
                )
        if any_step and set(updated) != set(program.placement.stages_of(rank)):
            raise ProgramError(
                f"{program.schedule}: rank {rank} steps stages {sorted(updated)}, but owns "
                f"{list(program.placement.stages_of(rank))}."
            )


def _check_reductions(program: Program) -> None:
    """Buckets without gaps; ranks that share stages meet on their channels in one order."""
    placement = program.placement
    # Tokens are exchanged between the replicas of one pipeline rank.
    kinds = CHANNEL_KINDS - EXCHANGE_KINDS
    collectives = [[item for item in row if item.kind in kinds] for row in program.ranks]
    reduced = [[item for item in row if item.kind is Kind.REDUCE] for row in collectives]
    for rank, row in enumerate(reduced):
        for stage in placement.stages_of(rank) if row else ():
            found = Counter(item.bucket or 0 for item in row if item.stage == stage)
            buckets = sorted(found)
            if buckets != list(range(len(buckets))) or len(set(found.values())) > 1:
                raise ProgramError(
                    f"{program.schedule}: rank {rank} reduces buckets {buckets} of stage {stage}. "
                    "Buckets count from 0 without a gap."
                )
    for first, second in (
        combinations(range(len(collectives)), 2) if placement.weight_copies > 1 else ()
    ):
        shared = set(placement.stages_of(first)) & set(placement.stages_of(second))
        here, there = (
            [str(replace(item, after=())) for item in collectives[rank] if item.stage in shared]
            for rank in (first, second)
        )
        if here != there:
            raise ProgramError(
                f"{program.schedule}: ranks {first} and {second} hold copies of stages "
                f"{sorted(shared)} and must meet on them in the same order, but rank {first} runs "
                f"{' '.join(here) or 'none'}, rank {second} runs {' '.join(there) or 'none'}."
            )


# -------------------------------------------------------------------------------- verify recompute
# The rules for R: after its pair's F, before its first reader; that it stands once, and on the
# pair's rank, holds for every instruction.

_READERS = BACKWARD_KINDS | GRADIENT_KINDS


def _check_recompute(program: Program) -> None:
    pairs = recomputed_pairs(program)
    if not pairs:
        return
    for rank, row in enumerate(program.ranks):
        made: set[tuple[int, int | None]] = set()
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


# -------------------------------------------------------------------------------------- batch loss
# That it waits for all forwards of its stage, and all of its backwards for it, is in the graph.


def _check_loss(program: Program) -> None:
    found = [item for row in program.ranks for item in row if item.kind is Kind.LOSS]
    last = program.placement.num_stages - 1
    if len(found) > 1:
        raise ProgramError(
            f"{program.schedule}: {len(found)} losses of the whole batch ({found[0]}, {found[1]}); "
            "there is one."
        )
    if found and (found[0].stage != last or program.placement.weight_copies > 1):
        raise ProgramError(
            f"{program.schedule}: {found[0]} needs the outputs of all microbatches, which only one "
            f"owner of stage {last} has."
        )
    for row in program.ranks if found else ():
        passed = False
        for item in row:
            passed = passed or item.kind is Kind.LOSS
            for part in item.parts:
                if part.stage == last and part.kind in BACKWARD_KINDS and not passed:
                    raise ProgramError(
                        f"{program.schedule}: {part} stands before {found[0]}, which makes its "
                        "gradient: the list deadlocks."
                    )


# --------------------------------------------------------------------------------------- exchanges
# All replicas run one list, so their exchanges come in one order when each rank's are in the order
# in which its layers run: that of ``instruction.exchanges``, behind what they are inside of.


def _check_exchanges(program: Program) -> None:
    found = [item for row in program.ranks for item in row if item.kind in EXCHANGE_KINDS]
    if not found:
        return
    layers = [0] * program.placement.num_stages
    for item in found:
        assert item.bucket is not None
        layers[item.stage] = max(layers[item.stage], item.bucket + 1)
    for rank, row in enumerate(program.ranks):
        place = 0
        while place < len(row):
            host, place = row[place], place + 1
            wanted = tuple(exchanges(host, layers)) if host.kind in MICROBATCH_KINDS else ()
            behind = []
            while place < len(row) and row[place].kind in EXCHANGE_KINDS:
                behind.append(row[place])
                place += 1
            if tuple(replace(item, after=()) for item in behind) != wanted:
                raise ProgramError(
                    f"{program.schedule}: behind {host} on rank {rank} stand "
                    f"{' '.join(map(str, behind)) or 'no exchanges'}, and its layers exchange "
                    f"tokens as {' '.join(map(str, wanted)) or 'none'}: ranks that share experts "
                    "would wait for each other."
                )
