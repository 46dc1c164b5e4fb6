"""What ``mode=plan`` and ``plan=auto`` ask the planner: model, machine, and what is pinned.

Whatever a user has set stays as it is: a key on the command line, and one that a file set to
something other than its default.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TypeVar

from launcher.config import LaunchConfig
from launcher.config.key import keys_of, value_at
from launcher.config.pipeline import QUICK, recompute_policy
from launcher.planning.model_trace import needs_trace
from launcher.planning.profile_check import checked_profile, classes_of
from launcher.processes.nodes import asked_world
from launcher.report.summary import format_peak, format_percent
from launcher.report.typed_command import typed_words
from launcher.resolve import (
    MOMENTS,
    element_sizes,
    gpu_element,
    layer_units,
    model_shape,
    num_places,
    uses_gpu,
)
from launcher.workloads.loads import unit_loads
from launcher.workloads.model_share import (
    ModelShape,
    PlannedShape,
    check_ep,
    check_expert_tp,
    check_tp,
)
from launcher.workloads.traced_shape import TracedShape
from launcher.workloads.transformer_shape import TransformerShape
from strategies.costs.load import Load
from strategies.costs.profile_costs import stage_classes
from strategies.errors import PlanError
from strategies.plan import NO_RECOMPUTE, Options, Plan, Recompute
from strategies.planner.problem import Machine, Measured, Problem
from strategies.planner.space import Space
from strategies.rules import check
from strategies.schedules import find_schedule

_DEFAULT_BATCH = 128
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question:
    """What the planner is asked; ``pinned`` are the keys that the user has set."""

    problem: Problem
    space: Space
    shape: PlannedShape
    pinned: frozenset[str]
    config: LaunchConfig


def ask(config: LaunchConfig, run_dir: Path) -> Question:
    _check_costs(config)
    traced = None
    if needs_trace(config, model_shape(config)):
        from launcher.planning.model_trace import planned_shape  # Only a trace has operators.

        traced = planned_shape(config, run_dir)
    return question(config, _pinned_keys(config, run_dir), traced)


def question(
    config: LaunchConfig, pinned: Collection[str], traced: TracedShape | None = None
) -> Question:
    """The question for known pins, and for the trace of a model that needs one; see ``ask``."""
    _check_costs(config)
    shape: PlannedShape = traced or _known_shape(config)
    if traced is not None:
        _check_traced(config, frozenset(pinned), traced)
    pins = frozenset(pinned)
    space = _space(config, pins, shape)
    memory_gb = config.planner.memory_gb or config.hardware.memory_gb
    hardware = replace(config.hardware.of_ranks(space.num_gpus), memory_gb=memory_gb)
    late = config.trainer.post_validation is True
    machine = Machine(
        # What recompute=optimal and the group of foldx fill is the planner's limit.
        hardware=hardware,
        sizes=element_sizes(config),
        optimizer_elements=MOMENTS[config.optimizer.name],
        bucket_mb=config.overlap.bucket_mb,
        sequence_parallel=config.sequence_parallel,
        transport=config.costs.transport,
        # As a training run's prediction: clipping's norm is the one synchronisation.
        waits_at_flush=config.trainer.waits_at_flush and not late,
        keeps_updates=config.trainer.waits_at_flush and late,
        number_format=config.trainer.number_format,
    )
    asked = recompute_policy(config.recompute)

    def loads(tp: int, size: int, selective: bool) -> tuple[Load, ...]:
        cut = config.sequence_parallel
        return unit_loads(
            shape,
            tp,
            size,
            sequence_parallel=cut,
            selective=selective,
            whole_layers=asked.policy == "layer",
            gpu_element=gpu_element(config),
            layers=asked.layers,
            attention=config.costs.attention,
            ns_steps=config.optimizer.muon_steps,
            expert_tp=config.expert_tp,
        )

    def refuse_tp(tp: int) -> str | None:
        try:
            check_tp(shape, tp, sequence_parallel=config.sequence_parallel)
            if config.expert_tp:
                check_expert_tp(shape, tp)
        except PlanError as error:
            return str(error)
        return None

    check_ep(shape, config.ep, config.tp)
    if config.expert_tp:
        check_expert_tp(shape, config.tp)
    graph = None if traced is None else traced.graph
    if config.expert_tp:
        cut = config.sequence_parallel
        check(Plan(), Options(tp=space.tp or 2, expert_tp=True, sequence_parallel=cut))
    problem = Problem(
        machine,
        loads,
        len(loads(1, 1, False)),
        refuse_tp,
        graph,
        num_experts=_num_experts(shape),
        imbalance=config.model.expert_imbalance,
        expert_tp=config.expert_tp,
        spreads_cut=traced is None,
    )
    if config.costs.name == "profiled":
        assert not isinstance(shape, TracedShape)
        problem, space = _with_profile(config, pins, shape, problem, space)
    return Question(problem, space, shape, pins, config)


def _pinned_keys(config: LaunchConfig, run_dir: Path) -> frozenset[str]:
    found = {
        entry.path
        for entry in keys_of(LaunchConfig)
        if value_at(config, entry.path) != entry.default
    }
    # Every option of schedule= states its number of stages; that alone is nobody's wish.
    if config.schedule.stages_per_rank == _own_stages(config):
        found.discard("schedule.stages_per_rank")
    return frozenset(found | {word.partition("=")[0].lstrip("+") for word in typed_words(run_dir)})


def _own_stages(config: LaunchConfig) -> int | None:
    schedule = find_schedule(config.schedule.name) if config.schedule.file is None else None
    return None if schedule is None else schedule.stages_per_rank


def _check_costs(config: LaunchConfig) -> None:
    if config.costs.name == "uniform":
        raise PlanError(
            "costs=uniform: plans are compared in seconds. Try costs=analytic, or costs=profiled "
            "with a profile of mode=profile."
        )
    if config.schedule.file is not None:
        raise PlanError(
            f"schedule.file={config.schedule.file} is an order for fixed degrees: there is nothing "
            "left to plan. Try mode=simulate, or leave schedule= to the planner."
        )


def _check_traced(config: LaunchConfig, pinned: frozenset[str], shape: TracedShape) -> None:
    if config.costs.name == "profiled":
        raise PlanError(
            f"costs=profiled with model={config.model.name}: mode=profile measures the units of "
            "built-in models and of model=hf. Try costs=analytic, with a hardware= that was "
            "measured (mode=profile profile.hardware=FILE)."
        )
    asked = {"recompute", "recompute.name"} & pinned
    unknown = config.recompute.name == "layer" or not shape.runs_again
    if asked and config.recompute.name in ("selective", "layer") and unknown:
        raise PlanError(
            f"recompute={config.recompute.name} with model={config.model.name}: a trace does not "
            "know what its layers would compute again. Try recompute=full, or leave it to the "
            "planner."
        )
    if asked and config.recompute.layers:
        raise PlanError(
            f"recompute.layers with model={config.model.name}: a trace knows what layers compute "
            "again as recompute=selective has it. Try recompute.layers=[]."
        )


def _known_shape(config: LaunchConfig) -> ModelShape:
    shape = model_shape(config)
    if needs_trace(config, shape):
        raise PlanError(
            f"model={config.model.name}: only its ranks know the sizes of its layers, and the "
            "planner needs them beforehand. Try pp= and schedule= by hand with mode=train, or a "
            "built-in model of about its size for planning."
        )
    return shape


def _space(config: LaunchConfig, pinned: frozenset[str], shape: PlannedShape) -> Space:
    def given(key: str, value: T) -> T | None:
        return value if key in pinned else None

    asked = config.schedule
    overlaps = "overlap" in pinned or "overlap.name" in pinned
    recomputes = "recompute" in pinned or "recompute.name" in pinned
    num_microbatches = config.num_microbatches
    # Of a part of a matrix Muon makes no update.
    whole = config.optimizer.name == "muon"
    return Space(
        asynchronous=config.planner.asynchronous,
        num_gpus=config.planner.num_gpus or _num_gpus(config, pinned),
        global_batch_size=_batch(config),
        level=config.planner.level,
        tp=1 if whole else given("tp", config.tp),
        ep=given("ep", config.ep),
        pp=given("pp", config.pp),
        dp=int(config.dp) if "dp" in pinned and config.dp != "auto" else None,
        microbatch_size=given("data.microbatch_size", config.data.microbatch_size),
        num_microbatches=None if num_microbatches == "auto" else int(num_microbatches),
        schedule=asked.name if {"schedule", "schedule.name"} & pinned else None,
        stages_per_rank=given("schedule.stages_per_rank", asked.stages_per_rank),
        group=asked.group if isinstance(asked.group, int) else None,
        overlap=config.overlap.name if overlaps else "grad_reduce" if whole else None,
        recompute=recompute_policy(config.recompute) if recomputes else None,
        units=_units(config, shape),
        split_backward=asked.split_backward,
        whole_backward=config.compile,
        balance_ratio=config.planner.balance_ratio,
        selective=not isinstance(shape, TracedShape) or shape.runs_again,
    )


def _num_experts(shape: PlannedShape) -> int:
    """Of each layer that has some; 0 where none has, or none that ranks can share."""
    if isinstance(shape, TransformerShape):
        return 0 if shape.moe is None else shape.moe.experts
    return shape.num_experts if isinstance(shape, TracedShape) else 0


def _units(config: LaunchConfig, shape: PlannedShape) -> tuple[int, ...] | None:
    if config.schedule.units_per_stage is not None:
        return config.schedule.units_per_stage
    layers = config.schedule.layers_per_stage
    if layers is None:
        return None
    return layers if isinstance(shape, TracedShape) else layer_units(shape, layers)


def _batch(config: LaunchConfig) -> int:
    asked, given = config.planner.global_batch_size, config.data.global_batch_size
    if asked is not None and given is not None and asked != given:
        raise PlanError(
            f"planner.global_batch_size={asked}, but data.global_batch_size={given}. "
            f"Try data.global_batch_size={given} alone."
        )
    return asked or given or _DEFAULT_BATCH


def planned_gpus(config: LaunchConfig, run_dir: Path) -> int:
    """How many ranks a plan is for."""
    return config.planner.num_gpus or _num_gpus(config, _pinned_keys(config, run_dir))


def _num_gpus(config: LaunchConfig, pinned: frozenset[str]) -> int:
    """Those of a pinned layout, else those that are here; or that pinned degrees fill alone."""
    degrees = {"pp": config.pp, "tp": config.tp}
    if config.dp != "auto":
        degrees["dp"] = int(config.dp)
    asked = [degrees[name] for name in pinned & degrees.keys()]
    if len(asked) == 3:
        return prod(asked)
    places = num_places(config)
    return prod(asked) if asked_world(config) is None and places % prod(asked) else places


def with_memory(asked: Question, memory_gb: float) -> Question:
    before = asked.problem.machine
    machine = replace(before, hardware=replace(before.hardware, memory_gb=memory_gb))
    return replace(asked, problem=replace(asked.problem, machine=machine))


def with_gpus(asked: Question, num_gpus: int) -> Question:
    before = asked.problem.machine
    node = asked.config.hardware.of_ranks(num_gpus).gpus_per_node
    machine = replace(before, hardware=replace(before.hardware, gpus_per_node=node))
    problem = replace(asked.problem, machine=machine)
    return replace(asked, problem=problem, space=replace(asked.space, num_gpus=num_gpus))


# Whether a plan's times stand on a measurement, in words.
#
# Two measurements can be behind them: a profile of the model's own layers (``costs=profiled``), or
# hardware figures that a profile gave (``mode=profile profile.hardware=``).


def is_calibrated(asked: Question) -> bool:
    """Whether layers, or the hardware's figures, were measured."""
    return asked.problem.measured is not None or asked.config.hardware.measured_on is not None


def calibration_error(asked: Question) -> float | None:
    """How far the figures are from what they were measured from; None where that is not known."""
    measured = asked.problem.measured
    return asked.config.hardware.fit_error if measured is None else measured.error


def label(asked: Question) -> str:
    """One word, and the error where that is known."""
    if not is_calibrated(asked):
        return "uncalibrated"
    error = calibration_error(asked)
    quick = asked.problem.measured is None and asked.config.hardware.name == QUICK
    word = "quick calibration" if quick else "calibrated"
    return word if error is None else f"{word}, +-{format_percent(error)}"


def calibration(asked: Question) -> str:
    """The same as a sentence."""
    config = asked.config
    if asked.problem.measured is not None:
        return f"{label(asked)}: layers and links were measured (costs.file={config.costs.file})"
    if is_calibrated(asked):
        return (
            f"{label(asked)}: times are computed from figures measured on "
            f"{config.hardware.measured_on}"
        )
    number_format = config.trainer.number_format
    kernels = config.hardware.num_sms is not None
    unlisted = asked.shape.unlisted() if isinstance(asked.shape, TracedShape) else None
    note = (
        "" if unlisted is None else f"\nby FLOPs and kept bytes alone, kernels unknown: {unlisted}"
    )
    return (
        "uncalibrated: times are computed from datasheet figures, "
        f"{'large products ' if kernels else ''}at {config.hardware.efficiency:.0%} of "
        f"{format_peak(config.hardware.peak(number_format), number_format)}{note}"
    )


# ``costs=profiled`` in a plan: measured layers and links in place of computed ones.
#
# A profile is of one machine, of one model's layers and of one way to run them: what it does not
# know is not planned. Microbatch sizes lie between two that were measured, tensor parallelism and
# selective recomputation are as they were then.


def _with_profile(
    config: LaunchConfig,
    pinned: Collection[str],
    shape: ModelShape,
    problem: Problem,
    space: Space,
) -> tuple[Problem, Space]:
    """The question for measured units."""
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

    if space.microbatch_size is not None:
        profile.at(space.microbatch_size)  # Raises now, not when a table is asked for.
    return (
        replace(problem, measured=measured, refuse_tp=refuse_tp),
        replace(space, sizes=tuple(measured.sizes), policies=_policies(space, selective=selective)),
    )


def _policies(space: Space, *, selective: bool) -> tuple[Recompute, ...]:
    """Those whose programs the profile has figures for."""
    if selective:
        return (Recompute("selective"),)
    found = (NO_RECOMPUTE, Recompute("full"))
    return (*found, Recompute("mario")) if space.level == "O3" else found
