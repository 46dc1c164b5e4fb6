"""``costs=profiled`` in a plan: measured layers and links in place of computed ones.

A profile is of one machine, of one model's layers and of one way to run them: what it does not know
is not planned. Microbatch sizes lie between two that were measured, tensor parallelism and
selective recomputation are as they were then.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from launcher.config import LaunchConfig
from launcher.profiled import checked_profile, classes_of
from launcher.resolve import uses_gpu
from launcher.workloads.specs import ModelShape
from strategies.costs.profiled import stage_classes
from strategies.planner.measured import Measured
from strategies.planner.problem import Problem
from strategies.planner.space import Space
from strategies.recompute import NO_RECOMPUTE, Recompute


def with_profile(
    config: LaunchConfig,
    pinned: Collection[str],
    shape: ModelShape,
    problem: Problem,
    space: Space,
) -> tuple[Problem, Space]:
    """The question for measured units.

    Args:
        config: Its ``costs.file`` is given.
        pinned: Keys that the user has set.
        shape: The model.
        problem: With computed costs.
        space: What may be chosen.

    Raises:
        CostError: There is no such file, or it is a profile of another machine or model.
    """
    profile, as_measured = checked_profile(
        config, shape, ranks=space.num_gpus, gpu=uses_gpu(config), pinned=pinned
    )
    units = range(problem.num_units)
    (classes,) = stage_classes(profile, classes_of(shape), [units])
    selective = as_measured.recompute.name == "selective"
    measured = Measured(profile, classes, as_measured.tp, selective)
    model_says = problem.refuse_tp

    def refuse_tp(tp: int) -> str | None:
        if tp != measured.tp:
            return f"costs.file={config.costs.file} was measured with tp={measured.tp}."
        return model_says(tp)

    sizes = measured.sizes
    if space.microbatch_size is not None:
        profile.at(space.microbatch_size)  # Raises now, not when a table is asked for.
    return (
        replace(problem, measured=measured, refuse_tp=refuse_tp),
        replace(space, sizes=tuple(sizes), policies=_policies(space, selective=selective)),
    )


def _policies(space: Space, *, selective: bool) -> tuple[Recompute, ...]:
    """Those whose programs the profile has figures for."""
    if selective:
        return (Recompute("selective"),)
    found = (NO_RECOMPUTE, Recompute("full"))
    return (*found, Recompute("mario")) if space.level == "O3" else found
