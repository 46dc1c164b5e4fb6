"""How many microbatches a step has: one rule for the three keys that speak of it. Torch-free."""

from __future__ import annotations

from launcher.config.launch import LaunchConfig
from launcher.config.workload import ModelConfig
from launcher.workloads.transformer_shape import TransformerShape
from strategies.errors import PlanError
from strategies.plan import ScheduleFile, read_schedule_file
from strategies.schedules import find_schedule
from strategies.schedules.schedule import Schedule, given_group


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


# ---------------------------------------------------------------------------------- given schedule
#
# ``schedule=``: the registry's entry, or the file that ``custom`` takes its order from.


def given_schedule(
    config: LaunchConfig, file: ScheduleFile | None = None
) -> tuple[Schedule, ScheduleFile | None]:
    """The schedule that was asked for.

    Args:
        config: ``schedule.file`` is relative to the working directory.
        file: Its content, where somebody has read it already: on a rank, that is the parent.

    Returns:
        The schedule, and the content of its file if it has one.

    Raises:
        PlanError: There is no such schedule or file, or the file is for another pp.
        ProgramError: The file is wrong; the message has line and column.
    """
    asked = config.schedule
    if file is None and asked.file is not None:
        file = read_schedule_file(asked.file, placement=asked.placement)
    return find_schedule(asked.name, file=file, pp=config.pp), file


# ---------------------------------------------------------------------------------- schedule group
#
# ``schedule.group``: a number, the schedule's default, or left to the compiler.


def schedule_group(config: LaunchConfig, schedule: Schedule) -> int | None:
    """``schedule.group``; None where the compiler takes the default, or chooses.

    Raises:
        PlanError: ``auto`` for a schedule that does not choose.
    """
    return given_group(config.schedule.group, schedule)


# ------------------------------------------------------------------------------------------- shape
#
# ``model.*`` as the transformer's shape.


def transformer_shape(model: ModelConfig, vocab: int) -> TransformerShape:
    """The built-in transformer of these sizes; what is null takes its default.

    Args:
        model: Sizes.
        vocab: Used where ``model.vocab`` is left to the data.

    Raises:
        PlanError: The sizes do not fit together.
    """
    return TransformerShape(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads or model.heads,
        ffn=model.ffn or 4 * model.hidden,
        vocab=model.vocab or vocab,
        sequence=model.sequence,
        norm=model.norm,
        activation=model.activation,
        position=model.position,
        tie_embeddings=model.tie_embeddings,
        dropout=model.dropout,
    )
