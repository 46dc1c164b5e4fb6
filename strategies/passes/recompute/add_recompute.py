"""One recompute policy applied to one compute program."""

from __future__ import annotations

from collections.abc import Callable
from math import floor

from strategies.analysis.memory import Sizes, peak_bytes, peak_held
from strategies.costs.table import Costs, CostTable
from strategies.costs.uniform import UniformCosts
from strategies.errors import PlanError
from strategies.ir.program import Program
from strategies.ir.verify import verify
from strategies.passes.recompute.local_search import makespan, prepose_forward
from strategies.passes.recompute.mario import (
    apply_checkpoint,
    overlap_recompute,
    remove_redundancy,
)
from strategies.passes.recompute.optimal import (
    recompute_periodically,
    recompute_to_fit,
    recompute_within,
)
from strategies.passes.recompute.starts import weights_at_once
from strategies.plan import Recompute


def add_recompute(
    program: Program,
    recompute: Recompute,
    costs: Costs | None,
    *,
    memory_bytes: int | None = None,
    held: Held | None = None,
    reorder: bool = True,
    period: int | None = None,
) -> Program:
    """Rewrites a program of F, B, I, W and fused pairs.

    Args:
        program: Compute only: no messages, no updates, no R.
        recompute: A policy whose programs have R.
        costs: What instructions take; None for F = I = W = R and free messages.
        memory_bytes: Limit per rank for ``optimal`` without a cap.
        held: What the ranks of a rewritten program hold; None for their state and activations.
        reorder: Whether ``optimal`` may change the order: not in one that a user has written.
        period: Without a flush: after how many microbatches lists repeat. What ``optimal``
            recomputes is then the same in every period, and the order stays.

    Raises:
        PlanError: The policy does not suit the schedule, or its limit cannot be kept.
    """
    assert recompute.rewrites
    if recompute.policy == "full":
        return verify(apply_checkpoint(program))
    if period is not None and recompute.policy == "mario":
        raise PlanError(
            f"recompute=mario: {program.schedule} never drains, so it has no bubbles at its ends "
            "to hide recomputation in, and a forward that is moved would read another weight "
            "version. Try recompute=optimal, recompute=full, or schedule=1f1b."
        )
    costs = costs or UniformCosts()
    if recompute.policy == "mario":
        return mario_order(program, recompute.passes, costs)
    table = costs.table(program)

    def within(room: tuple[int, ...]) -> Program:
        if period is not None:
            return verify(recompute_periodically(program, room, period))
        return recompute_within(program, table, room, reorder=reorder)

    if recompute.max_full_activations is not None:
        return _within_cap(program, table, recompute.max_full_activations, within, period)
    if memory_bytes is None or table.activation_bytes is None:
        raise PlanError(
            "recompute=optimal needs a limit: these costs know no bytes. "
            "Try recompute.max_full_activations=1, or costs=analytic, which takes "
            "hardware.memory_gb."
        )
    held = held or (lambda program: peak_bytes(program, table))
    return _within_memory(program, table, memory_bytes, within, held, period)


def mario_order(
    program: Program,
    passes: int,
    costs: Costs,
    *,
    check: Callable[[Program], Program] = verify,
) -> Program:
    """The first of Mario's four passes, as many as requested.

    ``check``: what each result goes through. Searches look at hundreds of orders and check none:
    the one that is chosen is compiled like any.
    """
    program = check(apply_checkpoint(program))
    if passes >= 2:
        program = check(overlap_recompute(program))
    if passes >= 3:
        program = check(remove_redundancy(program))
    if passes >= 4:
        # A forward that has moved may stand right before its R now, or make room for another.
        while True:
            moved = check(prepose_forward(program, costs.table(program)))
            reduced = check(remove_redundancy(moved))
            if reduced.ranks == moved.ranks:
                return moved
            program = reduced
    return program


# -------------------------------------------------------------------------------------------- room

# Caps are typed as decimals: 0.3 * 10 is 3.
_ROUNDING = 1e-6

Held = Callable[[Program], tuple[int | None, ...]]  # Bytes per rank at its worst moment.
Within = Callable[[tuple[int, ...]], Program]  # Room per rank, in pairs -> a program that keeps it.


def _within_cap(
    program: Program, table: CostTable, cap: float, within: Within, period: int | None
) -> Program:
    """A program that holds at most ``cap`` full activations, in full-rank microbatches, per rank.

    Raises:
        PlanError: The cap is smaller than what one backward reads.
    """
    crossed = program.placement.stages_per_microbatch
    room = floor(cap * crossed + _ROUNDING)
    ranks = program.placement.num_ranks
    if room < 1:
        took = _took(program, within((1,) * ranks), table, period)
        raise PlanError(
            f"recompute.max_full_activations={cap:g}: a backward reads one whole activation of its "
            f"stage, {1 / crossed:g} of a rank's microbatch in {program.schedule}. The smallest "
            f"cap is {1 / crossed:g}; {took}. Try recompute.max_full_activations={1 / crossed:g}."
        )
    return within((min(room, _pairs(program)),) * ranks)


def _within_memory(
    program: Program,
    table: CostTable,
    limit: int,
    within: Within,
    held: Held,
    period: int | None,
) -> Program:
    """A program of which every rank fits into ``limit`` bytes, state and communication included.

    Raises:
        PlanError: No choice fits.
    """
    assert table.activation_bytes is not None
    plain = held(program)
    if max(_known(plain)) <= limit:
        return program
    room = []
    for rank, activations in enumerate(_peaks(program, table)):
        # Everything but activations, as far as it is known before there is an order.
        beside = (plain[rank] or 0) - activations
        stages = program.placement.stages_of(rank)
        largest = max(1, *(table.activation_bytes[stage] for stage in stages))
        room.append(min(max(1, int((limit - beside) // largest)), _pairs(program)))
    # The inputs of checkpointed forwards take memory, too: how much, only an order can say.
    while True:
        found = within(tuple(room))
        needed = held(found)
        over = [rank for rank, much in enumerate(_known(needed)) if much > limit]
        if not over:
            return found
        if all(room[rank] == 1 for rank in over):
            break
        room = [max(1, places - (rank in over)) for rank, places in enumerate(room)]
    # Orders made for one activation store many inputs; the schedule's own stores fewer.
    own = recompute_to_fit(weights_at_once(program), (1,) * program.placement.num_ranks)
    if own is not None and max(_known(held(own))) < max(_known(needed)):
        found, needed = verify(own), held(own)
        if max(_known(needed)) <= limit:
            return found
    raise _nothing_fits(needed, _took(program, found, table, period), limit)


def _nothing_fits(held: tuple[int | None, ...], took: str, limit: int) -> PlanError:
    needed = _known(held)
    rank = needed.index(max(needed))
    smallest = _rounded_up(needed[rank])
    return PlanError(
        f"recompute=optimal: rank {rank} has hardware.memory_gb={limit / 1e9:g} and needs "
        f"{smallest:g} even where it keeps one activation at a time: no recomputation makes this "
        f"fit. With {smallest:g} {took}. Try hardware.memory_gb={smallest:g}, a larger pp, or a "
        "smaller data.microbatch_size."
    )


def _took(program: Program, least: Program, table: CostTable, period: int | None) -> str:
    """What a program takes that recomputes, beside what it takes without."""
    took, plain = (f"{makespan(p, table):.5g} {table.time_unit}" for p in (least, program))
    # Without a flush a program is a stream of several steps.
    what = (
        "a step then takes" if period is None else f"{program.num_microbatches} microbatches take"
    )
    return f"{what} {took}, and {plain} without recomputation"


def _known(held: tuple[int | None, ...]) -> list[int]:
    return [much or 0 for much in held]


def _rounded_up(num_bytes: int) -> float:
    """In GB, to three digits."""
    digit: int = 10 ** max(0, len(str(num_bytes)) - 3)
    return -(-num_bytes // digit) * digit / 1e9


def _peaks(program: Program, table: CostTable) -> list[float]:
    """Bytes of activations that each rank holds at its worst moment."""
    assert table.activation_bytes is not None
    sizes = Sizes.whole(table.activation_bytes)
    return [peak_held(program, rank, sizes) for rank in range(len(program.ranks))]


def _pairs(program: Program) -> int:
    """More pairs than any rank ever holds."""
    return program.placement.num_stages * program.num_microbatches
