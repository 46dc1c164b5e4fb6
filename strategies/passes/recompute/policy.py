"""One recompute policy applied to one compute program."""

from __future__ import annotations

from strategies.costs.table import Costs
from strategies.costs.uniform import UniformCosts
from strategies.errors import PlanError
from strategies.ir.program import Program
from strategies.ir.verify import verify
from strategies.memory import peak_bytes
from strategies.passes.recompute.apply_checkpoint import apply_checkpoint
from strategies.passes.recompute.optimal import recompute_within
from strategies.passes.recompute.overlap_recompute import overlap_recompute
from strategies.passes.recompute.prepose_forward import prepose_forward
from strategies.passes.recompute.remove_redundancy import remove_redundancy
from strategies.passes.recompute.room import Held, within_cap, within_memory
from strategies.recompute import Recompute


def add_recompute(
    program: Program,
    recompute: Recompute,
    costs: Costs | None,
    *,
    memory_bytes: int | None = None,
    held: Held | None = None,
    reorder: bool = True,
    synchronous: bool = True,
) -> Program:
    """Rewrites a program of F, B, I, W and fused pairs.

    Args:
        program: Compute only: no messages, no updates, no R.
        recompute: A policy whose programs have R.
        costs: What instructions take; None for F = I = W = R and free messages.
        memory_bytes: Limit per rank for ``optimal`` without a cap.
        held: What the ranks of a rewritten program hold; None for their state and activations.
        reorder: Whether ``optimal`` may change the order: not in one that a user has written.
        synchronous: Whether the pipeline drains at the optimizer step.

    Raises:
        PlanError: The policy does not suit the schedule, or its limit cannot be kept.
    """
    assert recompute.rewrites
    if recompute.policy == "full":
        return verify(apply_checkpoint(program))
    if not synchronous:
        raise PlanError(
            f"recompute={recompute.policy}: {program.schedule} never drains, so it has no bubbles "
            "at its ends to hide recomputation in, and a forward that is moved would read another "
            "weight version. Try recompute=full, or schedule=1f1b."
        )
    costs = costs or UniformCosts()
    if recompute.policy == "mario":
        return _mario(program, recompute.passes, costs)
    table = costs.table(program)

    def within(room: tuple[int, ...]) -> Program:
        return recompute_within(program, table, room, reorder=reorder)

    if recompute.max_full_activations is not None:
        return within_cap(program, table, recompute.max_full_activations, within)
    if memory_bytes is None or table.activation_bytes is None:
        raise PlanError(
            "recompute=optimal needs a limit: these costs know no bytes. "
            "Try recompute.max_full_activations=1, or costs=analytic, which takes "
            "hardware.memory_gb."
        )

    def simply(program: Program) -> tuple[int | None, ...]:
        return peak_bytes(program, table)

    return within_memory(program, table, memory_bytes, within, held or simply)


def _mario(program: Program, passes: int, costs: Costs) -> Program:
    program = verify(apply_checkpoint(program))
    if passes >= 2:
        program = verify(overlap_recompute(program))
    if passes >= 3:
        program = verify(remove_redundancy(program))
    if passes >= 4:
        # A forward that has moved may stand right before its R now, or make room for another.
        while True:
            moved = verify(prepose_forward(program, costs.table(program)))
            reduced = verify(remove_redundancy(moved))
            if reduced.ranks == moved.ranks:
                return moved
            program = reduced
    return program
