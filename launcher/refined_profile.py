"""A profile corrected by a training run: ``costs.refine``.

The layers were measured by themselves; in training they run beside messages, a data loader and the
other ranks. Of a run's median step the recorder knows how long each kind of instruction really
took, all stages together: every figure of that kind is scaled by it. What units of one stage take
cannot be told apart there, so their proportions stay as they were measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from launcher.report.atomic import write_atomically
from strategies.costs.profile import Profile, Seconds, SizeProfile, dump_profile
from strategies.costs.profiled import ProfiledCosts
from strategies.costs.table import Costs, CostTable
from strategies.ir.instruction import Kind
from strategies.simulator.engine import simulate
from strategies.timeline import Timeline

_NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward_input",
    Kind.W: "backward_weight",
    Kind.R: "recompute",
}


def write_refined(target: Path, costs: Costs, measured: Timeline) -> None:
    """Writes a run's profile, corrected by its median step."""
    assert isinstance(costs, ProfiledCosts)
    ratios = kind_ratios(measured, costs.table(measured.program))
    better = replace(costs, profile=refined(costs.profile, ratios))
    predicted = simulate(measured.program, better).makespan
    error = abs(predicted / measured.makespan - 1.0) if measured.makespan > 0 else None
    write_atomically(target, dump_profile(with_error(better.profile, error)))


def kind_ratios(measured: Timeline, table: CostTable) -> dict[Kind, float]:
    """Measured over predicted time of every kind of instruction that the step has; pairs left out.

    Args:
        measured: A step of a run.
        table: What was predicted for its program.
    """
    took: dict[Kind, float] = {}
    predicted: dict[Kind, float] = {}
    for rank in range(len(measured.program.ranks)):
        for event in measured.compute(rank):
            kind = event.instruction.kind
            if kind in _NAMES:
                took[kind] = took.get(kind, 0.0) + event.end - event.start
                predicted[kind] = predicted.get(kind, 0.0) + table.of(event.instruction)
    return {kind: took[kind] / predicted[kind] for kind in took if predicted[kind] > 0}


def refined(profile: Profile, ratios: Mapping[Kind, float]) -> Profile:
    """The profile with the figures of these kinds scaled, at every microbatch size."""

    def scaled(seconds: Seconds) -> Seconds:
        changes = {
            _NAMES[kind]: getattr(seconds, _NAMES[kind]) * ratio for kind, ratio in ratios.items()
        }
        return replace(seconds, **changes)

    def sized(figures: SizeProfile) -> SizeProfile:
        units = tuple(replace(unit, seconds=scaled(unit.seconds)) for unit in figures.units)
        return SizeProfile(scaled(figures.fixed), units, figures.error)

    return replace(
        profile, sizes=tuple((number, sized(figures)) for number, figures in profile.sizes)
    )


def with_error(profile: Profile, error: float | None) -> Profile:
    """The profile with what a run's step has shown of it."""
    return replace(
        profile,
        sizes=tuple((number, replace(figures, error=error)) for number, figures in profile.sizes),
    )
