"""The answer of ``mode=plan``: listed plans with their figures, compiled as their runs would be.

Compiling a program of a hundred thousand instructions takes ten seconds, and a plan needs none of
it: its step time and its memory are known from its lists. So only as many plans are compiled as
take a second; the others have the same figures but for the lower bound, which is their group's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from launcher.config import LaunchConfig, PlannerConfig
from launcher.config.check import PRINTED
from launcher.config.key import shorten, spell
from launcher.planning.no_plan import describe
from launcher.planning.question import Question, calibration_error, is_calibrated
from launcher.report.predicted import asked_mapping, peak_mapping, predict, run_peak
from launcher.report.summary import format_duration, format_percent
from launcher.report.typed_command import paste, typed_words
from launcher.resolve import Run, resolve, stage_layers
from launcher.workloads.model_share import PlannedShape, model_costs, model_flops
from launcher.workloads.traced_shape import TracedShape
from strategies.analysis.metrics import Metrics
from strategies.analysis.timeline import Timeline
from strategies.errors import PlanError
from strategies.plan import NUM_PASSES, OVERLAPS, POLICIES, Recompute
from strategies.planner.cut import balance, ranges
from strategies.planner.layout_search import Answer
from strategies.planner.outcome import (
    Outcome,
    full_memory,
    lists_plan,
    needs_program,
    program_step,
    structure,
    times,
)
from strategies.planner.problem import Candidate, Layout
from strategies.planner.space import Space
from strategies.planner.step_time import idle_share
from strategies.schedules import find_schedule

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ListedPlan:
    """One plan with its figures.

    Attributes:
        words: Overrides that reproduce it.
        config: The configuration that they make.
        layers_per_stage: Units, of a traced model.
        memory: Bytes of each rank at its worst moment.
        step_time_s: Period, or makespan where clipping waits at the flush.
        samples_per_s: Of all ranks.
        tokens_per_s: The same in tokens; None where samples are no sequences of them.
        mfu: Model FLOPs over the peak of all ranks, at the precision of the run.
        compiled: Its run and verified program, simulated; None for one that is too long.
    """

    outcome: Outcome
    words: tuple[str, ...]
    config: LaunchConfig
    layers_per_stage: tuple[float, ...]
    memory: tuple[int, ...]
    makespan: float
    period: float
    bubble_ratio: float
    exposed_grad_reduce: float
    lower_bound: float
    step_time_s: float
    samples_per_s: float
    tokens_per_s: float | None
    mfu: float
    compiled: Compiled | None = None

    @property
    def bound_gap(self) -> float:
        return max(0.0, self.makespan / self.lower_bound - 1.0)

    @property
    def num_instructions(self) -> int:
        """Of its compute lists, without recomputation."""
        layout, order = self.outcome.candidate.layout, self.outcome.candidate.order
        return 2 * layout.pp * order.stages_per_rank * layout.num_microbatches


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a run of a plan would execute."""

    run: Run
    timeline: Timeline
    metrics: Metrics


_COMPILED = 4096  # Instructions of the plans that are compiled, together.


def list_plans(
    config: LaunchConfig, asked: Question, answer: Answer, *, in_detail: bool = False
) -> tuple[ListedPlan, ...]:
    """The answer's plans; ``in_detail`` compiles the first one, however long it is."""
    found: list[ListedPlan] = []
    room = _COMPILED
    for outcome in answer.plans:
        plan = _listed(config, asked, outcome)
        length = plan.num_instructions
        if (
            length <= room
            or needs_program(outcome.group, outcome.candidate.order)
            or (in_detail and not found)
        ):
            room -= length
            plan = _compiled(plan, asked)
        found.append(plan)
    return tuple(found)


def _listed(config: LaunchConfig, asked: Question, outcome: Outcome) -> ListedPlan:
    """With the figures that the search has; those of a program are filled in later."""
    candidate, group = outcome.candidate, outcome.group
    batch = asked.space.global_batch_size
    makespan = period = outcome.step_time_s
    exposed = idle = 0.0
    if not needs_program(group, candidate.order):
        makespan, period, exposed = times(asked.problem, group, candidate.order)
        walked = structure(asked.problem, lists_plan(group, candidate.order))
        idle = idle_share(walked, group.table, makespan)
    step, tokens = outcome.step_time_s, asked.shape.sequence
    peak = asked.space.num_gpus * run_peak(config)
    return ListedPlan(
        outcome,
        tuple(candidate_words(candidate, asked)),
        candidate_config(config, candidate, asked.shape, batch),
        stage_layers(asked.shape, ranges(candidate.units)),
        outcome.rank_bytes,
        makespan,
        period,
        idle,
        exposed,
        group.bound,
        step,
        samples_per_s=batch / step,
        tokens_per_s=batch * tokens / step if tokens > 1 else None,
        mfu=3 * model_flops(asked.shape) * batch / (step * peak),
    )


def _compiled(plan: ListedPlan, asked: Question) -> ListedPlan:
    """With the figures of its verified program."""
    traced = asked.shape if isinstance(asked.shape, TracedShape) else None
    run = resolve(plan.config, traced=traced)
    timeline, metrics = predict(run)
    waits = asked.problem.machine.waits_at_flush
    step = metrics.makespan if waits else metrics.period
    if not metrics.synchronous:
        step = program_step(run.programs.train, run.costs, waits=waits)
    slower = step / plan.step_time_s
    return replace(
        plan,
        memory=tuple(value for value in metrics.peak_memory_bytes if value is not None),
        makespan=metrics.makespan,
        period=metrics.period,
        bubble_ratio=metrics.bubble_ratio,
        exposed_grad_reduce=metrics.exposed_grad_reduce,
        lower_bound=metrics.lower_bound,
        step_time_s=step,
        samples_per_s=plan.samples_per_s / slower,
        tokens_per_s=None if plan.tokens_per_s is None else plan.tokens_per_s / slower,
        mfu=plan.mfu / slower,
        compiled=Compiled(run, timeline, metrics),
    )


def command_line(run_dir: Path, plan: ListedPlan) -> str:
    """What runs a plan that the run in ``run_dir`` has found."""
    chosen = {word.partition("=")[0] for word in plan.words}
    dropped = ("mode", "plan", "experiment_name")
    kept = [
        word
        for word in typed_words(run_dir)
        if not word.startswith(("planner.", "hydra.run.dir"))
        and word.partition("=")[0] not in chosen
        and word.partition("=")[0] not in dropped
        and word.partition("=")[0] not in ("num_microbatches", "schedule.layers_per_stage")
    ]
    return paste(run_dir, [*kept, *plan.words])


def answer_mapping(
    asked: Question, answer: Answer, listed: Sequence[ListedPlan]
) -> dict[str, object]:
    """The keys that planning adds to result.json."""
    rejected = answer.rejected
    nearest, layout = None, listed[0].outcome.candidate.layout
    if rejected.nearest is not None:
        needed, what = rejected.nearest
        layout = what if isinstance(what, Layout) else what.layout
        nearest = {"plan": describe(what), "bytes": needed}
    return {
        "plans": [_plan_mapping(plan) for plan in listed],
        "rejected": {
            "memory": rejected.memory,
            "slower": rejected.slower,
            "dominated": rejected.dominated,
            "tp": {str(tp): reason for tp, reason in rejected.tp.items()},
            "batch": sorted(rejected.batch),
            "memory_limit_bytes": asked.problem.room(layout),
            "nearest": nearest,
        },
        **peak_mapping(asked.config),
        "search_s": answer.search_s,
        "num_candidates": answer.num_candidates,
        "num_simulated": answer.num_simulated,
        "calibrated": is_calibrated(asked),
        "calibration_error": calibration_error(asked),
    }


def long_mapping(asked: Question, plan: ListedPlan) -> dict[str, object]:
    """What result.json has of a first plan that is not compiled; what is not known is null."""
    outcome = plan.outcome
    layout, order = outcome.candidate.layout, outcome.candidate.order
    memory = full_memory(asked.problem, outcome.group, order)
    known = asked_mapping(plan.config, outcome.plan, layout.dp, order.group, memory=memory)
    return known | {
        "makespan": plan.makespan,
        "period": plan.period,
        "bubble_ratio": plan.bubble_ratio,
        "lower_bound": plan.lower_bound,
        "binding_bound": "cut",
        "bound_gap": plan.bound_gap,
        "gap_to_ideal": None,
        "peak_activations": None,
        "peak_memory_bytes": list(plan.memory),
        "exposed_grad_reduce": plan.exposed_grad_reduce,
        "throughput": layout.num_microbatches / plan.makespan,
        "num_messages": None,
        "weight_copies": outcome.group.placement.weight_copies,
        "synchronous": find_schedule(order.schedule).synchronous,
        "costs": outcome.group.table.name,
        "time_unit": outcome.group.table.time_unit,
    }


def _plan_mapping(plan: ListedPlan) -> dict[str, object]:
    layout = plan.outcome.candidate.layout
    return {
        "overrides": list(plan.words),
        "predicted_step_time_s": plan.step_time_s,
        "samples_per_s": plan.samples_per_s,
        "tokens_per_s": plan.tokens_per_s,
        "mfu": plan.mfu,
        "bubble_ratio": plan.bubble_ratio,
        "exposed_grad_reduce": plan.exposed_grad_reduce,
        "peak_memory_bytes": list(plan.memory),
        "layers_per_stage": list(plan.layers_per_stage),
        "units_per_stage": list(plan.outcome.candidate.units),
        "lower_bound": plan.lower_bound,
        "bound_gap": plan.bound_gap,
        "sequence": plan.config.model.sequence,
        "layers": plan.config.model.layers,
        "pp": layout.pp,
        "tp": layout.tp,
        "dp": layout.dp,
        "ep": layout.ep,
        "num_microbatches": layout.num_microbatches,
        "microbatch_size": layout.microbatch_size,
        "schedule": plan.outcome.candidate.order.schedule,
        "synchronous": find_schedule(plan.outcome.candidate.order.schedule).synchronous,
        "stages_per_rank": plan.outcome.candidate.order.stages_per_rank,
        "overlap": plan.outcome.candidate.overlap,
        "recompute": plan.outcome.candidate.recompute.policy,
    }


# ``planner.explain=[tp=4,pp=8]``: one layout in detail, beside the best of all.

_NUMBERS = {
    "tp", "pp", "dp", "ep", "num_microbatches", "microbatch_size", "stages_per_rank", "group",
}  # fmt: skip


def pinned_space(space: Space, entries: Sequence[str]) -> Space:
    for entry in entries:
        name, _, value = entry.replace(":", "=", 1).partition("=")
        name = PRINTED.get(name, name)
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
            space = replace(space, overlap=_known(name, value, OVERLAPS, OVERLAPS[0]))
        else:
            policy = _known("recompute", value, POLICIES, "full")
            space = replace(space, recompute=Recompute(policy))
    return space


def explained(shown: ListedPlan, best: Outcome) -> str:
    """The first plan of the layout in words, and what the best of all does better."""
    assert shown.compiled is not None
    metrics, run, timeline = shown.compiled.metrics, shown.compiled.run, shown.compiled.timeline
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
        stages = run.programs.train.placement.stages_of(rank)
        cut = ", ".join(f"stage {s}: {shown.layers_per_stage[s]:g}" for s in stages)
        lines.append(
            f"  rank {rank}: layers {cut}; {peak:.4g} microbatches held at most; busy "
            f"{format_duration(timeline.busy(rank), 's')}"
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


def _known(name: str, value: str, words: Sequence[T], example: str) -> T:
    for word in words:
        if word == value:
            return word
    raise PlanError(f"planner.explain: {name}={shorten(value)} is unknown. Try {name}={example}.")


# A candidate as a configuration and as words for the command line: what is printed is what runs.


def candidate_words(candidate: Candidate, asked: Question) -> list[str]:
    """Overrides that make a run of a candidate."""
    layout, order = candidate.layout, candidate.order
    words = [
        f"pp={layout.pp}",
        f"tp={layout.tp}",
        f"dp={layout.dp}",
        *([f"ep={layout.ep}"] if layout.ep > 1 else []),
        f"data.global_batch_size={asked.space.global_batch_size}",
        f"data.microbatch_size={layout.microbatch_size}",
        # An order of the user's own has its path as its name.
        f"schedule{'.path' if ':' in order.schedule else ''}={order.schedule}",
    ]
    if find_schedule(order.schedule).virtual_stages:
        words.append(f"schedule.stages_per_rank={order.stages_per_rank}")
    if order.group is not None:
        words.append(f"schedule.group={order.group}")
    units = _cut(candidate, asked.shape)
    if units is not None:
        words.append(f"schedule.units_per_stage={spell(units)}")
    words.append(f"overlap={candidate.overlap}")
    if asked.config.overlap.exchange and layout.ep == 1:
        words.append("overlap.exchange=false")  # There is nothing to exchange.
    words += _recompute_words(candidate.recompute)
    if _sets_memory(candidate, asked.config):
        words.append(f"hardware.memory_gb={asked.problem.machine.hardware.memory_gb:.12g}")
    return words


def _sets_memory(candidate: Candidate, config: LaunchConfig) -> bool:
    recompute = candidate.recompute
    fills = recompute.policy == "optimal" and recompute.max_full_activations is None
    return fills or (config.planner.memory_gb or 0.0) > config.hardware.memory_gb


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


def candidate_config(
    config: LaunchConfig, candidate: Candidate, shape: PlannedShape, global_batch_size: int
) -> LaunchConfig:
    """The configuration that ``candidate_words`` makes of this one."""
    layout, order = candidate.layout, candidate.order
    virtual = find_schedule(order.schedule).virtual_stages
    memory_gb = config.planner.memory_gb if _sets_memory(candidate, config) else None
    return replace(
        config,
        plan="manual",
        hardware=replace(config.hardware, memory_gb=memory_gb or config.hardware.memory_gb),
        planner=PlannerConfig(),
        pp=layout.pp,
        tp=layout.tp,
        dp=layout.dp,
        ep=layout.ep,
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
        overlap=replace(
            config.overlap,
            name=candidate.overlap,
            exchange=config.overlap.exchange and layout.ep > 1,
        ),
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
