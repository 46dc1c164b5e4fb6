"""Adds what updates the weights: REDUCE, STEP and GATHER, of one update at the end or of several.

A stage's REDUCEs stand right behind the update's last gradient on that rank: bucket after bucket is
released inside that backward, and the channel works under the compute that follows. Without
overlap they carry an edge from the rank's last gradient and stand right before the STEP. So do
those of an update that lacks some gradients: the batch that does not come is missed only then.
Where a stage has two owners (two weight copies), both reduce the stages that they share in one
order: that in which the later of the two gets its gradients. A rank that has a stage's gradients
earlier holds its REDUCEs back, with an edge from the gradient behind which they then stand.

A STEP stands as late as the weights that it makes allow: right before the first forward that reads
them, or where that would stand if the batches did not end. With a flush no forward of the program
reads them, so STEPs end a list, in the order in which gradients get ready.

ZeRO stage 1 (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054): a reduction leaves each
replica the sum of its share only, the optimizer updates that share, and a GATHER puts the weights
together again before the first forward that reads them. With a flush that is the very beginning of
a list, for what the step before has made; stages gather in the order in which they are first used,
so that all but the first gather under the forwards of earlier stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain

from strategies.errors import PlanError
from strategies.ir.instruction import Instruction, overlap
from strategies.ir.kinds import UPDATE_KINDS, Kind
from strategies.ir.program import Program, Updates, last_gradients

_Update = tuple[int, int | None]  # stage, version made


def add_updates(
    program: Program,
    buckets: Sequence[int] = (),
    *,
    overlapped: bool = True,
    gathered: bool = False,
) -> Program:
    """Adds the REDUCEs, STEPs and GATHERs of each update, on every owner of every stage.

    Where there are several updates, each instruction also gets the version that it reads.

    Args:
        program: Compute only.
        buckets: Per stage, into how many its gradient is divided; 0 where there is nothing to
            reduce, () for no stage.
        overlapped: Whether buckets are released inside the last backward.
        gathered: Whether replicas update shares of what they reduce.
    """
    position, ready = _positions(program), dict[_Update, int]()
    last = [last_gradients(program, rank) for rank in range(len(program.ranks))]
    for offset, places in zip(accumulate(map(len, program.ranks), initial=0), last, strict=False):
        for update, place in places.items():
            ready[update] = max(ready.get(update, -1), position[offset + place])
    counts = buckets or (0,) * program.placement.num_stages
    turn = _first_uses(program, position) if gathered else {}
    gathers = [stage for stage in sorted(turn, key=turn.__getitem__) if counts[stage]]
    read = None if program.updates is None else program.updates.version_read
    rows = []
    for rank, row in enumerate(program.ranks):
        gaps = _gaps(program, rank, last[rank], ready, counts, gathers, overlapped=overlapped)
        if read is not None:
            row = tuple(replace(i, version=read(i.stage, i.microbatch or 0)) for i in row)
        parts = ((*gaps.get(place, ()), *row[place : place + 1]) for place in range(len(row) + 1))
        rows.append(tuple(chain.from_iterable(parts)))
    return program.with_ranks(tuple(rows))


def _gaps(
    program: Program,
    rank: int,
    last: Mapping[_Update, int],
    ready: Mapping[_Update, int],
    buckets: Sequence[int],
    gathers: Sequence[int],
    *,
    overlapped: bool,
) -> dict[int, list[Instruction]]:
    """What comes before each place of a rank's list.

    ``last`` is where its last gradients stand, ``ready`` when they are complete on all owners, in
    one order of all lists; ``gathers`` are the stages that are gathered, in one order for all.
    """
    row, updates = program.ranks[rank], program.updates
    stages = program.placement.stages_of(rank)
    places = {(i.kind, i.stage, i.microbatch): p for p, i in enumerate(row) if updates is not None}
    behind: dict[int, list[Instruction]] = defaultdict(list)  # what stands before a place
    before: dict[int, list[Instruction]] = defaultdict(list)
    if updates is None:
        behind[0] += (Instruction(Kind.GATHER, stage) for stage in gathers if stage in stages)
    for version in program.versions:
        end = dict.fromkeys(stages, len(row))
        whole = True
        if updates is not None and version is not None:
            end = {
                stage: _step_place(updates, places, stage, version, len(row)) for stage in stages
            }
            whole = updates.first(version) <= program.num_microbatches
        place = -1 if overlapped else max(last.get((stage, version), -1) for stage in stages)
        for stage in sorted(stages, key=lambda stage: ready.get((stage, version), -1)):
            own = last.get((stage, version), -1)
            place = max(place, own)
            held_back = not overlapped or place != own
            # An edge names its instruction, no more. An OVERLAP is named by its backward.
            edge = (replace(row[place].parts[-1], after=()),) if held_back and place >= 0 else ()
            gap = behind[place + 1] if overlapped and whole else before[end[stage]]
            gap += (
                Instruction(Kind.REDUCE, stage, bucket=bucket, version=version, after=edge)
                for bucket in range(buckets[stage])
            )
        for stage in sorted(stages, key=lambda stage: last.get((stage, version), -1)):
            gap = before[end[stage]]
            gap.append(Instruction(Kind.STEP, stage, version=version))
            if stage in gathers and any(i.kind is Kind.F for i in row[end[stage] : end[stage] + 1]):
                gap.append(Instruction(Kind.GATHER, stage, version=version))
    for place, items in before.items():
        behind[place] += items
    return behind


def _step_place(
    updates: Updates,
    places: Mapping[tuple[Kind, int, int | None], int],
    stage: int,
    version: int,
    end: int,
) -> int:
    """That of the first forward that reads a version, or of what would follow it in 1F1B."""
    reader = updates.first_reader(stage, version)
    returns = reader - (len(updates.delay) - 1 - stage)
    wanted = (Kind.F, stage, reader), (Kind.R, stage, returns), (Kind.B, stage, returns)
    return next((places[key] for key in wanted if key in places), end)


def _first_uses(program: Program, position: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Stage -> when any of its owners first uses it: one order for all, they gather together."""
    turn = {stage: (len(position), stage) for stage in range(program.placement.num_stages)}
    nodes = (item for row in program.ranks for item in row)
    for place, item in zip(position, nodes, strict=True):
        for part in item.parts:
            if part.kind is Kind.F:
                turn[part.stage] = min(turn[part.stage], (place, part.stage))
    return turn


def _positions(program: Program) -> Sequence[int]:
    """Per instruction, rank by rank, its place in one order of all lists."""
    if program.placement.weight_copies == 1:  # No stage has two owners: their lists' own will do.
        return range(sum(map(len, program.ranks)))
    order = program.graph.order
    return sorted(range(len(order)), key=order.__getitem__)


# ---------------------------------------------------------------------------------------- variants
# The other programs that come with a training program: accumulation, and forward only.


def accumulate_only(program: Program) -> Program:
    """The same order without REDUCE and STEP: gradients stay where they are.

    A GATHER stays: this may be the first program behind an update.
    """
    rows = tuple(
        tuple(item for item in row if item.kind not in UPDATE_KINDS) for row in program.ranks
    )
    return replace(program, ranks=rows, role="accumulate")


def forward_only(program: Program) -> Program:
    """Only forwards, and the loss behind them, in the training program's order.

    A projection cannot deadlock.
    """
    rows = tuple(
        tuple(part for item in row for part in item.parts if part.kind in (Kind.F, Kind.LOSS))
        for row in program.ranks
    )
    return replace(program, ranks=rows, role="forward")


def first_microbatches(program: Program, count: int) -> Program:
    """The program without the microbatches from ``count`` on: what a short batch runs.

    An instruction needs others of its own microbatch only, so leaving whole microbatches out of a
    compute program that can run leaves one that can. A schedule's own rule for their number
    (even, at least 2P, ...) does not have to hold for a rest.
    """
    rows = tuple(
        tuple(kept for item in row for kept in _kept(item, count)) for row in program.ranks
    )
    return replace(program, ranks=rows, num_microbatches=count)


def _kept(item: Instruction, count: int) -> tuple[Instruction, ...]:
    parts = tuple(p for p in item.parts if p.microbatch is not None and p.microbatch < count)
    if len(parts) < len(item.parts):
        return parts
    edges = tuple(e for e in item.after if e.microbatch is None or e.microbatch < count)
    return (item if edges == item.after else replace(item, after=edges),)


# ------------------------------------------------------------------------------------- fused pairs
# Runs the halves of fused pairs one after the other, where fusing them gains nothing.
#
# A pair waits for the inputs of both its halves and hands on both results at its end. That pays
# only if the pair is faster than the halves (communication of one under compute of the other).


def fuse_pairs(program: Program) -> Program:
    """Each backward that is followed by a forward becomes a pair with it, before any Ws between.

    No other order changes, but a forward may begin before that backward has ended: its rank holds
    one more activation there. Where ranks warm up for two forwards more than their successors
    (``eager_1f1b``, interleaved ones), pairs pass from rank to rank without a wait; with one more
    (``1f1b``) each waits for its neighbours' pairs.
    """
    rows = []
    for row in program.ranks:
        parts: list[Instruction] = []
        for item in row:
            place = len(parts) - 1
            while place >= 0 and parts[place].kind is Kind.W and _bare(parts[place]):
                place -= 1
            before = parts[place] if place >= 0 else None
            if item.kind is Kind.F and before is not None and _pairs(item, before):
                parts[place] = overlap(item, before)
            else:
                parts.append(item)
        rows.append(tuple(parts))
    return program.with_ranks(tuple(rows))


def _pairs(item: Instruction, before: Instruction) -> bool:
    return before.kind in (Kind.B, Kind.I) and _bare(item) and _bare(before)


def _bare(item: Instruction) -> bool:
    return not item.after and item.version is None


def separate_pairs(program: Program) -> Program:
    """Each OVERLAP becomes its forward, followed by its backward.

    A pair's ``after`` edges hold for the forward, which comes first.
    """
    rows = []
    for row in program.ranks:
        parts = []
        for item in row:
            first, *rest = item.parts
            parts += [replace(first, after=item.after), *rest]
        rows.append(tuple(parts))
    return program.with_ranks(tuple(rows))


# ------------------------------------------------------------------------------------- batch loss
# One loss of all microbatches, for losses that compare rows of the whole batch with each other.
#
# The first gradient then waits for the last forward, whatever the schedule: on each rank all
# forwards come before all else. Either part keeps its order. Forwards need forwards only, so the
# first is the schedule's forward program; the rest needs what it needed before, and forwards.


def forwards_first(program: Program) -> Program:
    """The same compute program, on each rank with its forwards before everything else."""
    rows = []
    for row in separate_pairs(program).ranks:
        first = tuple(item for item in row if item.kind is Kind.F)
        rows.append(first + tuple(item for item in row if item.kind is not Kind.F))
    return program.with_ranks(tuple(rows))


def add_batch_loss(program: Program) -> Program:
    """Inserts the LOSS between the last stage's forwards and all backwards.

    Raises:
        PlanError: The stage has two owners, of which none sees the whole batch.
    """
    placement = program.placement
    last = placement.num_stages - 1
    owners = placement.owners(last)
    if len(owners) > 1:
        raise PlanError(
            f"loss_over=batch: schedule={program.schedule} holds every stage twice, and ranks "
            f"{owners[0]} and {owners[1]} each see half of the microbatches' outputs. One rank "
            "needs them all. Try schedule=zb_v or schedule=1f1b, or loss_over=microbatch."
        )
    rows = list(forwards_first(program).ranks)
    row = rows[owners[0]]
    count = sum(item.kind is Kind.F for item in row)
    rows[owners[0]] = (*row[:count], Instruction(Kind.LOSS, last), *row[count:])
    return program.with_ranks(tuple(rows))
