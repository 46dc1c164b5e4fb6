"""What units take, measured in the runtime itself: stages of a sample, all on one pipeline rank.

Every stage runs as in training: forwards, backwards whole and split, recomputation, the optimizer;
by the recorder's clock, messages left out. What a unit adds is fitted over stages of different
length. Runs in every rank at once, so that cores and memory are as busy as they are in training.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.costs.profile_file import Seconds, SizeProfile, UnitProfile
from strategies.ir.kinds import KINDS, MICROBATCH_KINDS, Kind
from strategies.models.held_units import Elsewhere
from strategies.models.unit_model import UnitModel
from strategies.plan import NO_RECOMPUTE, Options, Plan, Recompute
from strategies.profiling.sample import Sample
from strategies.runtime.engine.rank_engine import Engine
from strategies.runtime.messages.mesh import Coordinates

_DEVIATION = 0.02
_MICROBATCHES = 2
_WARM_UPS = 2
_LEAST = 3  # iterations, however long they take
_FULL = Recompute("full")


def choose_units(module: Any, units: Sequence[int]) -> nn.Module:
    """Leaves the chosen units in a module that is on the meta device.

    Its ``pipeline_units`` and ``unit_costs`` know these places only.
    """
    declared = module.pipeline_units()
    kept = [declared[place] for place in units]
    names = {name for name, _ in kept}
    for name, _ in declared:
        if name not in names:
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, Elsewhere())
    module.pipeline_units = lambda: kept
    module.unit_costs = lambda: [1.0] * len(kept)
    assert isinstance(module, nn.Module)
    return module


def draw_quickly(module: Any, device: torch.device, tie: Callable[[], None]) -> None:
    """Lets a module's weights be made from any numbers: only their sizes matter.

    ``tie`` is called after each unit, to share what is shared.
    """

    def initialise_unit(name: str) -> None:
        unit = module.get_submodule(name)
        for path, parameter in list(unit.named_parameters()):
            if parameter.is_meta:
                owner, _, leaf = path.rpartition(".")
                real = torch.empty_like(parameter, device=device).uniform_(-_DEVIATION, _DEVIATION)
                setattr(unit.get_submodule(owner), leaf, nn.Parameter(real))
        tie()

    module.initialise_unit = initialise_unit


@dataclass(frozen=True, slots=True)
class Task:
    """What is measured, and how.

    Attributes:
        make: Builds a module that declares the sample's units, without weights elsewhere.
        classes: Per unit of the sample, its class.
        batch: Rows -> a batch, on the device.
        iterations: Training steps per figure.
        limit_s: Fewer of them, where all steps at one size would take longer; at least three.
        options: How an engine runs it; its cut is the sample's.
        coordinates: pp is 1; replicas measure the same side by side.
        recompute: ``selective``, where units recompute a part of themselves.
        autocast: Around every pass.
        times_only: No split backwards, no recomputation and no bytes: a tenth of the time.
    """

    make: Callable[[], nn.Module]
    sample: Sample
    classes: tuple[int, ...]
    batch: Callable[[int], Any]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    sizes: tuple[int, ...]
    iterations: int
    limit_s: float
    device: torch.device
    options: Options
    coordinates: Coordinates
    recompute: Recompute = NO_RECOMPUTE
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    times_only: bool = False

    @property
    def counts(self) -> list[list[int]]:
        kinds = range(max(self.classes) + 1)
        return [
            [sum(self.classes[unit] == kind for unit in stage) for kind in kinds]
            for stage in self.sample.stages
        ]


@dataclass
class _Stages:
    """What was measured at one microbatch size, a number per stage."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    saved: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    forward_temporaries: list[int] = field(default_factory=list)
    backward_temporaries: list[int] = field(default_factory=list)
    rest_s: float = 0.0


def measure_layers(task: Task) -> tuple[dict[int, SizeProfile], float]:
    """Measures a sample; collective over tensor-parallel ranks, replicas each for themselves.

    Returns:
        (figures by microbatch size, what a step takes beside its instructions).
    """
    found = {size: _Stages() for size in task.sizes}
    variants = ((False, task.recompute), (True, task.recompute), (False, _FULL))
    for split, recompute in variants[: 1 if task.times_only else None]:
        if recompute is _FULL and task.recompute.policy != "none":
            continue  # Units recompute inside: an R would be their forward.
        if split and task.options.compile:
            continue  # A compiled unit has one backward.
        engine = _engine(task, split=split, recompute=recompute)
        for size in task.sizes:
            with task.autocast():
                _measure(task, engine, size, found[size])
        engine.close()
        del engine
    return {size: _fitted(task, stages) for size, stages in found.items()}, statistics.median(
        stages.rest_s for stages in found.values()
    )


def _engine(task: Task, *, split: bool, recompute: Recompute) -> Engine:
    engine = Engine(
        model=UnitModel(task.make()),
        plan=Plan(
            "interleaved_1f1b",
            pp=1,
            num_microbatches=_MICROBATCHES,
            stages_per_rank=len(task.sample.stages),
            buckets=0,
            split_backward=split,
            recompute=recompute,
        ),
        options=replace(
            task.options,
            units_per_stage=tuple(map(len, task.sample.stages)),
            check_batches=False,
            on_nan="ignore",
        ),
        coordinates=task.coordinates,
        device=task.device,
    )
    engine.model.module.to(task.device)
    engine.build_gradients()
    return engine


def _measure(task: Task, engine: Engine, size: int, found: _Stages) -> None:
    batch = task.batch(size * _MICROBATCHES)
    optimizer = task.optimizer(engine.updated_parameters())
    plain = not engine.plan.split_backward and not engine.plan.recompute.rewrites
    spans: list[tuple[float, float]] = []
    kept: list[Any] = []
    until = time.perf_counter() + task.limit_s
    for step in range(_WARM_UPS + task.iterations):
        begun = time.perf_counter()
        _pass(engine, batch, step)
        _synchronise(task.device)
        passed = time.perf_counter()
        optimizer.step()
        engine.stepped()
        _synchronise(task.device)
        spans.append((passed - begun, time.perf_counter() - passed))
        kept.append(engine.recorder.kept[-1])
        # Sharers of a stage run the same number of passes.
        if task.coordinates.tp == 1 and step >= _WARM_UPS + _LEAST and passed > until:
            break
    del kept[:_WARM_UPS], spans[:_WARM_UPS]
    durations = _durations(engine, kept)
    stages = range(len(task.sample.stages))
    for kind, facts in KINDS.items():
        name = facts.duration
        if (kind, 0) in durations and name and name not in found.seconds:
            found.seconds[name] = [statistics.median(durations[kind, s]) for s in stages]
    if plain:
        cleared = _step_stages(task, engine, found)
        work = [engine.recorder.spans(record).busy for record in kept]
        rest = statistics.median(span - busy for (span, _), busy in zip(spans, work, strict=True))
        found.rest_s = max(0.0, rest - cleared)
    if task.times_only:
        none = [0] * len(stages)
        found.saved = found.outputs = none
        found.forward_temporaries = found.backward_temporaries = none
        return
    activations = engine.measure_activations()
    _pass(engine, batch, 0)
    engine.flush()
    bytes_of = activations.stages
    engine.measure_no_activations()
    if plain:
        found.saved = [bytes_of[stage].full for stage in stages]
        _watch(task, engine, batch, found)
    elif engine.plan.split_backward:
        found.waiting = [bytes_of[stage].waiting for stage in stages]


def _pass(engine: Engine, batch: Any, step: int) -> None:
    engine.train_pass(batch, batch_idx=step, step=step, accumulation=1, update=True)
    engine.restore_gradients()
    engine.flush()


def _durations(engine: Engine, records: Sequence[Any]) -> dict[tuple[Kind, int], list[float]]:
    durations: dict[tuple[Kind, int], list[float]] = {}
    for record in records:
        start, end = engine.recorder.seconds(record)
        row = record.program.ranks[0]
        for item, begun, ended in zip(row, start, end, strict=False):
            if item.kind in MICROBATCH_KINDS:
                durations.setdefault((item.kind, item.stage), []).append(ended - begun)
    return durations


def _step_stages(task: Task, engine: Engine, found: _Stages) -> float:
    """The optimizer's update of every stage by itself; returns what clearing all gradients took."""
    steps, clears = [], []
    for stage in range(len(task.sample.stages)):
        own = [parameter for _, parameter in engine.model.stage_parameters(stage)]
        updated = list(engine.mains.updated_parameters(own))
        optimizer = task.optimizer(updated)
        times = []
        for _ in range(_WARM_UPS + _LEAST):
            engine.restore_gradients()
            _synchronise(task.device)
            begun = time.perf_counter()
            optimizer.step()
            _synchronise(task.device)
            times.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        engine.gradients[stage].attach(zero=True)
        _synchronise(task.device)
        clears.append(time.perf_counter() - begun)
        steps.append(statistics.median(times[_WARM_UPS:]) + clears[-1])
    engine.restore_gradients()
    found.seconds["step"] = steps
    return sum(clears)


def _watch(task: Task, engine: Engine, batch: Any, found: _Stages) -> None:
    """Runs every stage once by itself and watches the memory."""
    leaves: tuple[Tensor, ...] = ()
    rows = {name: part[: len(part) // _MICROBATCHES] for name, part in batch.items()}
    for stage in range(len(task.sample.stages)):

        def forward(stage: int = stage, leaves: tuple[Tensor, ...] = leaves) -> Any:
            with torch.enable_grad():
                return engine.model.forward(
                    stage, leaves, batch=rows, batch_idx=0, microbatch=0, mode="train", seed=0
                )

        output, stayed, most = transient(task.device, forward)
        results = [t for t in (*output.tensors, output.loss) if t is not None and t.requires_grad]
        gradients = [torch.ones_like(result) for result in results]

        def backward(results: list[Tensor] = results, gradients: list[Tensor] = gradients) -> None:
            if results:
                torch.autograd.backward(results, gradients)

        leaves = tuple(
            tensor.detach().requires_grad_(tensor.requires_grad) for tensor in output.tensors
        )
        found.outputs.append(sum(t.numel() * t.element_size() for t in output.tensors))
        found.forward_temporaries.append(max(0, most - stayed))
        found.backward_temporaries.append(max(0, transient(task.device, backward)[2]))


def _fitted(task: Task, stages: _Stages) -> SizeProfile:
    counts = task.counts
    fits = {name: fit_line(counts, values) for name, values in stages.seconds.items()}
    # What one training step is made of; the other kinds are parts of it or its like.
    error = fit_error(counts, [(stages.seconds[n], fits[n]) for n in ("forward", "backward")])
    fits.setdefault("recompute", fits["forward"])
    for half in ("backward_input", "backward_weight"):  # of compiled units, which run it whole
        fixed, each = fits["backward"]
        fits.setdefault(half, (fixed / 2, tuple(value / 2 for value in each)))
    saved = fit_line(counts, stages.saved, fixed=False)[1]
    waiting = fit_line(counts, stages.waiting or stages.saved, fixed=False)[1]
    units = [
        UnitProfile(
            Seconds(**{name: each[kind] for name, (_, each) in fits.items()}),
            saved_bytes=round(saved[kind]),
            waiting_bytes=round(waiting[kind]),
            output_bytes=stages.outputs[stage],
            forward_temporaries=stages.forward_temporaries[stage],
            backward_temporaries=stages.backward_temporaries[stage],
        )
        for kind, stage in enumerate(task.sample.singles)
    ]
    fixed_part = Seconds(**{name: fixed for name, (fixed, _) in fits.items()})
    return SizeProfile(fixed_part, tuple(units), error)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def transient(device: torch.device, call: Callable[[], Any]) -> tuple[Any, int, int]:
    """Runs a function: (its result, bytes that stayed, most bytes at once).

    Both beyond what was there before, on that device.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = call()
        torch.cuda.synchronize(device)
        stayed = torch.cuda.memory_allocated(device) - before
        return result, stayed, torch.cuda.max_memory_allocated(device) - before
    # torch knows the sizes of what an earlier watched call has left, and counts that backwards
    # where it is freed inside this one.
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as watched:
        result = call()
    inner: Any = watched.profiler
    events = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += int(event.nbytes())
        most = max(most, held)
    return result, held, most


def fit_line(
    counts: Sequence[Sequence[int]], measured: Sequence[float], *, fixed: bool = True
) -> tuple[float, tuple[float, ...]]:
    """A stage takes something fixed, and what each of its units adds: (fixed, one per class).

    Least squares of relative errors; nothing is negative.

    Args:
        counts: Per stage, how many units of each class it has.
        measured: Per stage, >= 0.
        fixed: Whether a stage takes something by itself; left out where there are too few stages
            to tell.
    """
    rows = torch.tensor(counts, dtype=torch.float64)
    values = torch.tensor(measured, dtype=torch.float64)
    weights = 1.0 / values.clamp(min=max(float(values.max()) * 1e-3, 1e-12))
    columns = rows
    fixed = fixed and len(rows) > rows.shape[1]
    if fixed:
        columns = torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], dim=1)
    solved = torch.linalg.lstsq(columns * weights[:, None], (values * weights)[:, None])
    found = [float(value) for value in solved.solution[:, 0]]
    if fixed and found[-1] < 0:
        return fit_line(counts, measured, fixed=False)
    each = tuple(max(0.0, value) for value in found[: rows.shape[1]])
    return (found[-1] if fixed else 0.0), each


def fit_error(
    counts: Sequence[Sequence[int]],
    measured: Iterable[tuple[Sequence[float], tuple[float, Sequence[float]]]],
) -> float | None:
    """How far sums are from what was measured, all stages together, as a share of that.

    Args:
        counts: As for ``fit_line``.
        measured: Per kind of instruction what stages took, and the line through it; None is
            returned where nothing took any time.

    >>> fit_error([[1, 0], [1, 1]], [([2.0, 3.0], (1.0, [1.0, 1.5]))])
    0.1
    """
    missed = whole = 0.0
    for values, (fixed, each) in measured:
        for row, value in zip(counts, values, strict=True):
            found = fixed + sum(n * share for n, share in zip(row, each, strict=True))
            missed += abs(found - value)
            whole += value
    return missed / whole if whole > 0 else None
