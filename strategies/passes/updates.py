"""Adds the all-gather of each stage's weights, which the step before has updated in shares.

ZeRO stage 1 (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054): a reduction leaves each
replica the sum of its share only, the optimizer updates that share, and the weights are put
together again. The GATHERs stand at the very beginning of a rank's list, in the order in which its
stages are first used, so that all but the first run under the forwards of earlier stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strategies.errors import PlanError
from strategies.ir.instruction import Instruction, exchanges, overlap
from strategies.ir.kinds import UPDATE_KINDS, Kind
from strategies.ir.program import Program, last_gradients


def add_gathers(program: Program, buckets: Sequence[int]) -> Program:
    """Inserts GATHER(stage) on every owner of every stage whose gradient is reduced.

    ``buckets`` are per stage, 0 where there is nothing to reduce.
    """
    turn = _first_uses(program)
    rows = []
    for rank, row in enumerate(program.ranks):
        stages = sorted(program.placement.stages_of(rank), key=turn.__getitem__)
        gathers = tuple(Instruction(Kind.GATHER, stage) for stage in stages if buckets[stage])
        rows.append(gathers + row)
    return program.with_ranks(tuple(rows))


def _first_uses(program: Program) -> dict[int, tuple[int, int]]:
    """Stage -> when any of its owners first uses it: one order for all, they gather together."""
    position = _positions(program)
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


# ------------------------------------------------------------------------------------- reduce grad
# With overlap, a stage's REDUCE instructions stand right after its last gradient on that rank:
# bucket after bucket is released inside that backward, and the channel works under the compute that
# follows. Without, they carry an edge from the rank's last compute and start at the flush.
#
# Where a stage has two owners (two weight copies), both reduce the stages that they share in one
# order: that in which the later of the two gets its gradients. A rank that has a stage's gradients
# earlier holds its REDUCEs back, with an edge from the gradient behind which they then stand.


def add_grad_reduce(program: Program, buckets: Sequence[int], *, overlap: bool) -> Program:
    """Inserts REDUCE(stage, bucket) on every owner of every stage.

    ``buckets`` are per stage, 0 where there is nothing to reduce. They are released inside the
    stage's last backward, or without ``overlap`` all at the end.
    """
    turn = _gradient_turns(program)
    rows = []
    for rank, row in enumerate(program.ranks):
        last = last_gradients(row)
        behind: dict[int, list[Instruction]] = {}
        place = -1
        for stage in sorted(program.placement.stages_of(rank), key=turn.__getitem__):
            own = last.get(stage, -1)
            place = max(place, own) if overlap else len(row) - 1
            held_back = not overlap or place != own
            # An edge names its instruction, no more. An OVERLAP is named by its backward.
            edge = (replace(row[place].parts[-1], after=()),) if held_back and place >= 0 else ()
            behind.setdefault(place, []).extend(
                Instruction(Kind.REDUCE, stage, bucket=bucket, after=edge)
                for bucket in range(buckets[stage])
            )
        result = list(behind.get(-1, ()))
        for position, item in enumerate(row):
            result.append(item)
            result.extend(behind.get(position, ()))
        rows.append(tuple(result))
    return program.with_ranks(tuple(rows))


def add_steps(program: Program) -> Program:
    """Appends STEP(stage) for every stage of a rank, in the order in which gradients get ready."""
    rows = []
    for rank, row in enumerate(program.ranks):
        last = last_gradients(row)
        stages = sorted(program.placement.stages_of(rank), key=lambda stage: last.get(stage, -1))
        rows.append(row + tuple(Instruction(Kind.STEP, stage) for stage in stages))
    return program.with_ranks(tuple(rows))


def _gradient_turns(program: Program) -> dict[int, int]:
    """Stage -> when its gradient is complete on all owners: a place in one order of all stages."""
    position, offset = _positions(program), 0
    turn = dict.fromkeys(range(program.placement.num_stages), -1)
    for row in program.ranks:
        for stage, place in last_gradients(row).items():
            turn[stage] = max(turn[stage], position[offset + place])
        offset += len(row)
    return turn


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


# --------------------------------------------------------------------------------------- exchanges
# Where ranks share experts, the tokens of every layer travel inside the computation of a
# microbatch: attention | DISPATCH | experts | COMBINE, and in a backward the same for gradients.


def add_exchanges(program: Program, layers: Sequence[int]) -> Program:
    """Inserts DISPATCH and COMBINE of every layer with experts behind what they run inside of.

    ``layers`` are per stage: how many of them have experts on other ranks.
    """
    if not any(layers):
        return program
    return program.with_ranks(
        tuple(
            tuple(part for item in row for part in (item, *exchanges(item, layers)))
            for row in program.ranks
        )
    )
