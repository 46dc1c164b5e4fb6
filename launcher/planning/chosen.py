"""A plan as a configuration and as words for the command line: what is printed is what runs."""

from __future__ import annotations

from dataclasses import replace

from launcher.config import LaunchConfig, PlannerConfig
from launcher.config.key import spell
from launcher.workloads.specs import PlannedShape, model_costs
from launcher.workloads.traced_shape import TracedShape
from strategies.partition import balance
from strategies.planner.layout import Candidate
from strategies.recompute import NUM_PASSES, Recompute
from strategies.schedules import find_schedule


def chosen_words(
    candidate: Candidate,
    shape: PlannedShape,
    global_batch_size: int,
    *,
    memory_gb: float | None = None,
) -> list[str]:
    """Overrides that make a run of a candidate.

    Args:
        candidate: The plan.
        shape: The model.
        global_batch_size: Sequences per optimizer step.
        memory_gb: What the plan was made for; printed where the program depends on it.
    """
    layout, order = candidate.layout, candidate.order
    words = [
        f"pp={layout.pp}",
        f"tp={layout.tp}",
        f"dp={layout.dp}",
        f"data.global_batch_size={global_batch_size}",
        f"data.microbatch_size={layout.microbatch_size}",
        f"schedule={order.schedule}",
    ]
    if find_schedule(order.schedule).virtual_stages:
        words.append(f"schedule.stages_per_rank={order.stages_per_rank}")
    if order.group is not None:
        words.append(f"schedule.group={order.group}")
    units = _cut(candidate, shape)
    if units is not None:
        words.append(f"schedule.units_per_stage={spell(units)}")
    words.append(f"overlap={candidate.overlap}")
    words += _recompute_words(candidate.recompute)
    if memory_gb is not None and fills_memory(candidate):
        words.append(f"hardware.memory_gb={memory_gb:.12g}")
    return words


def fills_memory(candidate: Candidate) -> bool:
    """Whether the program is made for the memory of a rank."""
    recompute = candidate.recompute
    return recompute.policy == "optimal" and recompute.max_full_activations is None


def _recompute_words(recompute: Recompute) -> list[str]:
    words = [f"recompute={recompute.policy}"]
    if recompute.passes != NUM_PASSES:
        words.append(f"recompute.passes={recompute.passes}")
    if recompute.max_full_activations is not None:
        words.append(f"recompute.max_full_activations={recompute.max_full_activations:g}")
    if recompute.layers:
        entries = (f"{name}:{'+'.join(kinds) or 'none'}" for name, kinds in recompute.layers)
        words.append(f"recompute.layers=[{','.join(entries)}]")
    return words


def chosen_config(
    config: LaunchConfig, candidate: Candidate, shape: PlannedShape, global_batch_size: int
) -> LaunchConfig:
    """The configuration that ``chosen_words`` makes of this one.

    Args:
        config: What was asked; its planner is done with.
        candidate: The plan.
        shape: The model.
        global_batch_size: Sequences per optimizer step.
    """
    layout, order = candidate.layout, candidate.order
    virtual = find_schedule(order.schedule).virtual_stages
    memory_gb = config.hardware.memory_gb
    if fills_memory(candidate):
        memory_gb = config.planner.memory_gb or memory_gb
    return replace(
        config,
        plan="manual",
        hardware=replace(config.hardware, memory_gb=memory_gb),
        planner=PlannerConfig(),
        pp=layout.pp,
        tp=layout.tp,
        dp=layout.dp,
        num_microbatches="auto",
        data=replace(
            config.data,
            global_batch_size=global_batch_size,
            microbatch_size=layout.microbatch_size,
        ),
        schedule=replace(
            config.schedule,
            name=order.schedule,
            stages_per_rank=order.stages_per_rank if virtual else None,
            group=order.group,
            layers_per_stage=None,
            units_per_stage=_cut(candidate, shape),
        ),
        overlap=replace(config.overlap, name=candidate.overlap),
        recompute=replace(
            config.recompute,
            name=candidate.recompute.policy,
            passes=candidate.recompute.passes,
            max_full_activations=candidate.recompute.max_full_activations,
            layers=config.recompute.layers if candidate.recompute.layers else (),
        ),
    )


def _cut(candidate: Candidate, shape: PlannedShape) -> tuple[int, ...] | None:
    """Units per stage, where a run would not cut there by itself."""
    if isinstance(shape, TracedShape):
        return candidate.units
    default = balance(model_costs(shape), len(candidate.units))
    same = tuple(len(stage) for stage in default) == candidate.units
    return None if same else candidate.units
