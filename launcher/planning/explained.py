"""``planner.explain=[tp=4,pp=8]``: one layout in detail, beside the best of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from launcher.config.key import shorten
from launcher.planning.no_plan import describe
from launcher.planning.report import Listed
from launcher.report.units import format_duration, format_percent
from strategies.errors import PlanError
from strategies.plan import OVERLAPS, Overlap
from strategies.planner.evaluate import Outcome
from strategies.planner.space import Space
from strategies.recompute import POLICIES, Policy, Recompute
from strategies.schedules import find_schedule

_NUMBERS = {
    "tp", "pp", "dp", "num_microbatches", "microbatch_size", "stages_per_rank", "group",
}  # fmt: skip


def pinned_space(space: Space, entries: Sequence[str]) -> Space:
    """The space with what is to be explained fixed.

    Args:
        space: What may be chosen otherwise.
        entries: ``tp=4`` and the like, of known names.

    Raises:
        PlanError: A value that its key cannot have.
    """
    for entry in entries:
        name, _, value = entry.replace(":", "=", 1).partition("=")
        if name in _NUMBERS:
            if not value.isdigit() or int(value) < 1:
                raise PlanError(
                    f"planner.explain: {shorten(entry)} is no whole number >= 1. "
                    f"Try planner.explain=[{name}=4]."
                )
            space = replace(space, **{name: int(value)})  # type: ignore[arg-type]
        elif name == "schedule":
            find_schedule(value)
            space = replace(space, schedule=value)
        elif name == "overlap":
            space = replace(space, overlap=_overlap(value))
        else:
            space = replace(space, recompute=Recompute(_policy(value)))
    return space


def explained(shown: Listed, best: Outcome) -> str:
    """The first plan of the layout in words, and what the best of all does better."""
    metrics = shown.metrics
    lines = [
        f"explained: {' '.join(shown.words)}",
        f"  lower bound {format_duration(metrics.lower_bound, 's')} ({metrics.binding_bound}), "
        f"makespan {format_duration(metrics.makespan, 's')} "
        f"({format_percent(metrics.bound_gap)} above), "
        f"period {format_duration(metrics.period, 's')}",
        f"  idle {format_percent(metrics.bubble_ratio)}, reductions outlast compute by "
        f"{format_duration(metrics.exposed_grad_reduce, 's')}",
    ]
    for rank, peak in enumerate(metrics.peak_activations):
        stages = shown.run.programs.train.placement.stages_of(rank)
        cut = ", ".join(f"stage {s}: {shown.run.layers_per_stage[s]:g}" for s in stages)
        lines.append(
            f"  rank {rank}: layers {cut}; {peak:.4g} microbatches held at most; busy "
            f"{format_duration(shown.timeline.busy(rank), 's')}"
        )
    slower = shown.step_time_s / best.step_time_s - 1.0
    if slower > 1e-9:
        lines.append(
            f"  {format_percent(slower)} slower than the best plan, {describe(best.candidate)}, "
            f"which takes {format_duration(best.step_time_s, 's')}"
        )
    else:
        lines.append("  this is the best plan")
    return "\n".join(lines)


def _overlap(value: str) -> Overlap:
    for known in OVERLAPS:
        if known == value:
            return known
    raise PlanError(
        f"planner.explain: overlap={shorten(value)} is unknown. Try overlap={OVERLAPS[0]}."
    )


def _policy(value: str) -> Policy:
    for known in POLICIES:
        if known == value:
            return known
    raise PlanError(f"planner.explain: recompute={shorten(value)} is unknown. Try recompute=full.")
