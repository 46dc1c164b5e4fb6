"""How many microbatches a step has: one rule for the three keys that speak of it. Torch-free."""

from __future__ import annotations

from launcher.config.launch import LaunchConfig
from strategies.errors import PlanError


def plan_batches(config: LaunchConfig, dp: int, fixed: int | None = None) -> tuple[int, int]:
    """Microbatches per step and replica, and sequences per step and replica.

    ``data.global_batch_size`` over dp is cut into microbatches of ``data.microbatch_size``, of
    which the last may be smaller; ``num_microbatches``, if given, must be their number.

    Args:
        config: The three keys may be left open in part.
        dp: Replicas, known by now.
        fixed: The number of microbatches that the schedule's file has; None where any number goes.

    Raises:
        PlanError: The keys contradict each other.
    """
    total, size = config.data.global_batch_size, config.data.microbatch_size
    asked = config.num_microbatches
    if fixed is not None and asked not in ("auto", fixed):
        raise PlanError(
            f"num_microbatches={asked}, but {config.schedule.file} has {fixed}. "
            f"Try num_microbatches={fixed}, or num_microbatches=auto."
        )
    if total is None:
        count = (fixed or 2 * config.pp) if asked == "auto" else int(asked)
        return count, count * size
    if total % dp:
        fit = max(dp, round(total / dp) * dp)
        raise PlanError(
            f"data.global_batch_size={total} is not divisible by dp={dp}. "
            f"Try data.global_batch_size={fit}."
        )
    rows = total // dp
    count = -(-rows // size)
    if asked != "auto" and int(asked) != count:
        share = int(asked) * dp * size
        raise PlanError(
            f"data.global_batch_size={total}, but num_microbatches * dp * data.microbatch_size = "
            f"{asked} * {dp} * {size} = {share}. "
            f"Try data.global_batch_size={share}, or num_microbatches=auto."
        )
    if fixed is not None and count != fixed:
        raise PlanError(
            f"data.global_batch_size={total} / (dp={dp} * data.microbatch_size={size}) makes "
            f"{count} microbatches, but {config.schedule.file} has {fixed}. "
            f"Try data.global_batch_size={fixed * dp * size}."
        )
    return count, rows
