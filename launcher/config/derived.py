"""What the keys of a request come to together: batch, schedule, stages, model. Torch-free.

The check of a configuration and its resolution both read it here, so they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from launcher.config.decode import brings_own
from launcher.config.launch import LaunchConfig
from launcher.config.pipeline import recompute_policy
from launcher.config.workload import ModelConfig
from launcher.workloads.transformer_shape import MoeShape, TransformerShape
from strategies.costs.uniform import UniformCosts
from strategies.errors import PlanError
from strategies.ir.program import Placement
from strategies.plan import LossOver, Options, Plan, ScheduleFile, read_schedule_file
from strategies.rules import Training, check
from strategies.schedules import find_schedule
from strategies.schedules.schedule import Schedule, Shape, parse_group

MOST_FORWARDS = 200_000
"""Of a step, on all stages of one replica: minutes, and gigabytes."""
COMPILING_S = 1800.0
"""The first forwards and backwards of a pipeline's ranks compile one after the other."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What keys of the pipeline come to, defaults filled in.

    Attributes:
        plan: What keys alone say of it; costs, buckets and what a model sends come later.
        batch_size: Sequences per step and replica; 0 where that waits for the number of replicas.
        shape: What the schedule orders.
        placement: Its stages on ranks.
    """

    plan: Plan
    batch_size: int
    shape: Shape
    placement: Placement


def asked_schedule(
    config: LaunchConfig,
    dp: int | None,
    file: ScheduleFile | None = None,
    *,
    tied: bool | None = None,
) -> Asked:
    """What ``schedule.*``, ``pp`` and the three keys of the batch come to.

    Args:
        config: ``schedule.file`` is relative to the working directory.
        dp: Replicas; None before the machine is looked at.
        file: The content of ``schedule.file``, where it has been read already: on a rank, that is
            the parent.
        tied: Whether the model shares weights between its first and last stage; None for what
            ``model.*`` says.

    Raises:
        PlanError: There is no such schedule or file, or keys do not fit together.
        ProgramError: The file is wrong; the message has line and column.
    """
    asked, trainer = config.schedule, config.trainer
    if file is None and asked.file is not None:
        file = read_schedule_file(asked.file, placement=asked.placement)
    own_order(config)
    schedule = find_schedule(asked.name, file=file, pp=config.pp)
    fixed = schedule.num_microbatches
    default = schedule.default_num_microbatches(config.pp)
    if dp is None and config.data.global_batch_size is not None:
        count, rows = default, 0  # Their number waits for that of the replicas.
    else:
        count, rows = _plan_batches(config, dp or 1, fixed, default)
    _refuse_endless(config, count, asked.stages_per_rank or schedule.stages_per_rank)
    plan = Plan(
        schedule=asked.name,
        pp=config.pp,
        num_microbatches=count,
        stages_per_rank=asked.stages_per_rank,
        group=parse_group(asked.group, schedule),
        overlap=config.overlap.name,
        split_backward=asked.split_backward,
        file=file,
        recompute=recompute_policy(config.recompute),
        loss_over=_loss_over(config, schedule),
        vertical_sync=asked.vertical_sync,
        error_feedback=asked.error_feedback,
        accumulation=1 if schedule.synchronous else trainer.accumulate_grad_batches,
        pairs=config.overlap.exchange,
    )
    training = Training(
        precision=trainer.precision,
        clip=trainer.gradient_clip_val if trainer.gradient_clip_algorithm == "norm" else None,
        tied=config.model.tie_embeddings if tied is None else tied,
        experts=bool(config.model.experts),
    )
    trains = config.mode in ("train", "validate")
    check(plan, asked_options(config, dp), training if trains else None)
    shape = schedule.resolve(plan)
    plan = replace(plan, stages_per_rank=shape.stages_per_rank)
    return Asked(plan, rows, shape, schedule.place(shape))


def _loss_over(config: LaunchConfig, schedule: Schedule) -> LossOver:
    if config.loss_over != "auto":
        return config.loss_over
    weighs = schedule.synchronous and not brings_own("model", config.model.name)
    return "tokens" if weighs else "microbatch"


def asked_options(config: LaunchConfig, dp: int | None) -> Options:
    """How ranks run the plan; the units of stages come later."""
    return Options(
        dp=dp or "auto",
        tp=config.tp,
        ep=config.ep,
        expert_tp=config.expert_tp,
        sequence_parallel=config.sequence_parallel,
        bucket_mb=config.overlap.bucket_mb,
        grad_dtype=config.overlap.grad_dtype,
        sum_dtype=config.overlap.sum_dtype,
        backend=config.cluster.backend,
        timeout_s=max(config.cluster.timeout_s, COMPILING_S if config.compile else 0.0),
        seed=config.seed,
        async_save=config.trainer.async_save,
        compile=config.compile,
        on_nan=config.trainer.on_nan,
        checkpoints="folder",
        whole_after=False,
        post_validation=config.trainer.post_validation,
        synchronous_steps=config.schedule.synchronous_steps,
    )


def _refuse_endless(config: LaunchConfig, count: int, stages_per_rank: int) -> None:
    """A step is compiled, proven and drawn instruction by instruction, on every rank."""
    stages = config.pp * stages_per_rank
    if stages * count <= MOST_FORWARDS:
        return
    asked = f"num_microbatches={count}"
    if config.num_microbatches == "auto" and config.data.global_batch_size is not None:
        asked = f"data.global_batch_size={config.data.global_batch_size}, {count} microbatches"
    raise PlanError(
        f"{asked} on {stages} stages: {stages * count:,} forwards in a step, and up to "
        f"{MOST_FORWARDS:,} are compiled. Try num_microbatches="
        f"{max(1, min(count, MOST_FORWARDS // stages))}, larger ones (data.microbatch_size), or "
        "batches per step (trainer.accumulate_grad_batches)."
    )


def own_order(config: LaunchConfig) -> None:
    """Registers the order of ``schedule.path``, which has that as its name.

    Raises:
        PlanError: There is none.
    """
    if config.schedule.path is not None:
        from launcher.workloads.own_code import load_schedule  # It reads this package.

        load_schedule(config.schedule.path)


def _plan_batches(
    config: LaunchConfig, dp: int, fixed: int | None, default: int
) -> tuple[int, int]:
    """Microbatches per step and replica, and sequences per step and replica.

    ``data.global_batch_size`` over dp is cut into microbatches of ``data.microbatch_size``, of
    which the last may be smaller; ``num_microbatches``, if given, must be their number.

    ``fixed``: the number of microbatches that the schedule's file has; None where any number goes,
    and ``default`` is taken for ``auto``.

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
        count = default if asked == "auto" else int(asked)
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


def uniform_costs(config: LaunchConfig) -> UniformCosts:
    """``costs.*`` of ``costs=uniform``.

    Raises:
        CostError: A number out of range.
    """
    given = {entry.name: getattr(config.costs, entry.name) for entry in fields(UniformCosts)}
    return UniformCosts(**given)


# ``model.*`` as the transformer's shape.


def transformer_shape(model: ModelConfig, vocab: int) -> TransformerShape:
    """The built-in transformer of these sizes; ``vocab`` is for one that is left to the data."""
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
        moe=_moe_shape(model),
    )


def _moe_shape(model: ModelConfig) -> MoeShape | None:
    if model.experts is None:
        return None
    return MoeShape(
        experts=model.experts,
        per_token=2 if model.experts_per_token is None else model.experts_per_token,
        ffn=model.expert_ffn or model.ffn or 4 * model.hidden,
        shared=model.shared_experts,
        first_dense=model.first_dense_layers,
        every=model.expert_every,
        scores=model.router,
        normalised=model.router_normalized,
        scale=model.router_scale,
        steering=model.bias_update_rate,
        balance_loss=0.01 if model.aux_loss is None else model.aux_loss,
        balance_over=model.aux_loss_over,
        z_loss=model.z_loss,
    )
