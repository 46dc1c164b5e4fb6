"""How many full activations each rank may hold: from a cap, or from the bytes that a rank has."""

from __future__ import annotations

from collections.abc import Callable
from math import floor

from strategies.costs.table import CostTable
from strategies.errors import PlanError
from strategies.ir.program import Program
from strategies.memory import peak_bytes
from strategies.passes.recompute.list_clock import ListClock

# Caps are typed as decimals: 0.3 * 10 is 3.
_ROUNDING = 1e-6

Within = Callable[[tuple[int, ...]], Program]  # Room per rank, in pairs -> a program that keeps it.


def within_cap(program: Program, table: CostTable, cap: float, within: Within) -> Program:
    """A program that holds at most ``cap`` full activations per rank.

    Args:
        program: Without recomputation.
        table: What its instructions take.
        cap: In full-rank microbatches.
        within: Makes it.

    Raises:
        PlanError: The cap is smaller than what one backward reads.
    """
    crossed = program.placement.stages_per_microbatch
    room = floor(cap * crossed + _ROUNDING)
    ranks = program.placement.num_ranks
    if room < 1:
        least = ListClock(within((1,) * ranks), table).makespan
        plain = ListClock(program, table).makespan
        raise PlanError(
            f"recompute.max_full_activations={cap:g}: a backward reads one whole activation of its "
            f"stage, {1 / crossed:g} of a rank's microbatch in {program.schedule}. The smallest "
            f"cap is {1 / crossed:g}; a step then takes {least:.5g} {table.time_unit}, and "
            f"{plain:.5g} {table.time_unit} without recomputation. "
            f"Try recompute.max_full_activations={1 / crossed:g}."
        )
    return within((min(room, _pairs(program)),) * ranks)


def within_memory(program: Program, table: CostTable, limit: int, within: Within) -> Program:
    """A program of which every rank fits into ``limit`` bytes.

    Args:
        program: Without recomputation.
        table: With bytes.
        limit: Per rank.
        within: Makes it.

    Raises:
        PlanError: No choice fits, or the costs know no bytes.
    """
    assert table.activation_bytes is not None
    assert table.state_bytes is not None
    if _fits(program, table, limit):
        return program
    room = []
    for rank in range(program.placement.num_ranks):
        stages = program.placement.stages_of(rank)
        state = sum(table.state_bytes[stage] for stage in stages)
        largest = max(1, *(table.activation_bytes[stage] for stage in stages))
        room.append(min(max(1, (limit - state) // largest), _pairs(program)))
    # The inputs of checkpointed forwards take memory, too: how much, only an order can say.
    while True:
        found = within(tuple(room))
        over = [
            rank
            for rank, held in enumerate(peak_bytes(found, table))
            if held is not None and held > limit
        ]
        if not over:
            return found
        if all(room[rank] == 1 for rank in over):
            raise _nothing_fits(program, found, table, limit)
        room = [max(1, places - (rank in over)) for rank, places in enumerate(room)]


def _nothing_fits(program: Program, least: Program, table: CostTable, limit: int) -> PlanError:
    needed = [held or 0 for held in peak_bytes(least, table)]
    rank = needed.index(max(needed))
    smallest = -(-needed[rank] // 10**6) / 1e3
    took, plain = ListClock(least, table).makespan, ListClock(program, table).makespan
    return PlanError(
        f"recompute=optimal: rank {rank} has hardware.memory_gb={limit / 1e9:g} and needs "
        f"{smallest:g} even where it keeps one activation at a time: no recomputation makes this "
        f"fit. With {smallest:g} a step takes {took:.5g} {table.time_unit} ({plain:.5g} "
        f"{table.time_unit} without recomputation). Try hardware.memory_gb={smallest:g}, a larger "
        "pp, or a smaller data.microbatch_size."
    )


def _fits(program: Program, table: CostTable, limit: int) -> bool:
    return all(held is None or held <= limit for held in peak_bytes(program, table))


def _pairs(program: Program) -> int:
    """More pairs than any rank ever holds."""
    return program.placement.num_stages * program.num_microbatches
