"""What decides how fast a rank computes here, found out without torch."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from launcher.config import LaunchConfig
from launcher.report.result import write_atomically
from launcher.resolve import num_cores
from launcher.workloads.hf.hf_shape import HfShape
from launcher.workloads.model_share import ModelShape, described, model_units
from strategies.analysis.timeline import Timeline
from strategies.costs.analytic import AnalyticCosts
from strategies.costs.profile_costs import ProfiledCosts, stage_classes
from strategies.costs.profile_file import (
    Machine,
    Profile,
    Seconds,
    SizeProfile,
    dump_profile,
    parse_profile,
    unit_classes,
)
from strategies.costs.table import Costs, CostTable
from strategies.errors import CostError
from strategies.ir.kinds import KINDS, MICROBATCH_KINDS, Kind
from strategies.simulator.engine import simulate
from strategies.small_file import FileRefusedError, read_text


def this_machine(*, ranks: int, gpu: bool) -> Machine:
    """The machine as the ranks of a run find it, which share its cores."""
    return Machine(
        processor=_processor(),
        accelerator=_accelerator() if gpu else None,
        cores=os.cpu_count() or 1,
        threads=rank_threads(ranks),
        torch=version("torch"),
    )


def rank_threads(ranks: int) -> int:
    """Threads of one of some ranks: what the user has set, or its share of the cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return max(1, num_cores() // ranks)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _accelerator() -> str:
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name == "Model":
                return value.strip()
    return "GPU"


# ``costs=profiled``: the profile in ``costs.file``, if it is of this machine and of this model.

_MOST_BYTES = 1 << 24
# A profile is one of layers, so it serves any number of them.
_LAYER_COUNTS = ("layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers")


def profiled_costs(
    config: LaunchConfig,
    shape: ModelShape,
    stages: tuple[range, ...],
    assumed: AnalyticCosts,
    *,
    ranks: int,
    gpu: bool,
) -> ProfiledCosts:
    """The costs of a run from its profile; ``assumed`` is for what that does not know."""
    profile = _read_profile(config)
    _check_profile(config, profile, shape, ranks=ranks, gpu=gpu)
    costs = ProfiledCosts(
        profile,
        stage_classes(profile, classes_of(shape), stages),
        config.data.microbatch_size,
        assumed,
    )
    profile.at(config.data.microbatch_size)  # Raises now, not when a table is asked for.
    return costs


def checked_profile(
    config: LaunchConfig,
    shape: ModelShape,
    *,
    ranks: int,
    gpu: bool,
    pinned: Collection[str],
) -> tuple[Profile, LaunchConfig]:
    """The profile for a plan, and the configuration with what it leaves to be chosen.

    ``ranks``: processes that are planned for.
    ``pinned``: keys that the user has set: of the others, those that decide a unit's costs (tp,
    selective recomputation) become what they were when it was made.

    Raises:
        CostError: There is no such file, or it is a profile of something else.
    """
    profile = _read_profile(config)
    facts = dict(profile.model)
    if "tp" not in pinned and facts.get("tp", "").isdigit():
        config = replace(config, tp=int(facts["tp"]))
    free = not {"recompute", "recompute.name"} & set(pinned)
    if free and facts.get("selective", "null") != "null":
        config = replace(config, recompute=replace(config.recompute, name="selective"))
    _check_profile(config, profile, shape, ranks=ranks, gpu=gpu)
    return profile, config


def _read_profile(config: LaunchConfig) -> Profile:
    given = config.costs.file
    if given is None:
        raise CostError(
            "costs=profiled needs costs.file, a profile of this machine and model. Try "
            f"{_words(config)}, then costs.file=profile.json."
        )
    path = Path(given).expanduser().absolute()
    try:
        text = read_text(path, most_bytes=_MOST_BYTES)
    except (OSError, FileRefusedError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CostError(
            f"costs.file={given} cannot be read ({reason}). Try {_words(config)}, which writes one."
        ) from error
    return parse_profile(text, label=given)


def writable(given: str, *, key: str) -> Path:
    """Where a profile is to be written."""
    target = Path(given).expanduser().absolute()
    if target.is_dir() or not os.access(target.parent, os.W_OK):
        raise CostError(
            f"{key}={given} cannot be written: it is a folder, or there is none to write it to. "
            f"Try {key}=profile.json."
        )
    return target


def classes_of(shape: ModelShape) -> tuple[str, ...]:
    return unit_classes(
        (unit.name, (unit.parameters, unit.forward_flops)) for unit in model_units(shape)
    )


def class_numbers(shape: ModelShape) -> list[int]:
    """The same as numbers, by first appearance."""
    classes = classes_of(shape)
    numbers = {name: index for index, name in enumerate(dict.fromkeys(classes))}
    return [numbers[name] for name in classes]


def measured_sizes(config: LaunchConfig) -> tuple[int, ...]:
    """Microbatch sizes that ``mode=profile`` measures, ascending."""
    return tuple(sorted(set(config.profile.microbatch_sizes))) or (config.data.microbatch_size,)


def model_facts(config: LaunchConfig, shape: ModelShape) -> tuple[tuple[str, str], ...]:
    """Names and values of all that decides what a unit takes; not how many layers there are."""
    facts: dict[str, object] = dict(described(shape))
    if isinstance(shape, HfShape):
        facts = dict(facts["hf"]) | {"sequence": shape.sequence}  # type: ignore[call-overload]
    facts = {name: value for name, value in facts.items() if name not in _LAYER_COUNTS}
    facts |= {
        "precision": config.trainer.precision,
        "optimizer": config.optimizer.name,
        "compile": config.compile,
        "tp": config.tp,
        "sequence_parallel": config.sequence_parallel,
        "selective": list(config.recompute.layers)
        if config.recompute.name == "selective"
        else None,
    }
    if config.trainer.float32_matmul_precision != "highest":
        facts["float32_matmul_precision"] = config.trainer.float32_matmul_precision
    return tuple(sorted((name, _spelt(value)) for name, value in facts.items()))


def fingerprint(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


def _words(config: LaunchConfig) -> str:
    """The command that makes the profile a configuration needs."""
    degrees = f"pp={config.pp} dp={config.dp}" + (f" tp={config.tp}" if config.tp > 1 else "")
    return (
        f"mode=profile {degrees} profile.file=profile.json with the same model=, optimizer= and "
        "trainer.precision="
    )


def _check_profile(
    config: LaunchConfig, profile: Profile, shape: ModelShape, *, ranks: int, gpu: bool
) -> None:
    if not config.costs.any_machine:
        _check_machine(config, profile, this_machine(ranks=ranks, gpu=gpu))
    _check_model(config, profile, model_facts(config, shape))


def _check_machine(config: LaunchConfig, profile: Profile, here: Machine) -> None:
    found, own = asdict(profile.machine), asdict(here)
    if here.accelerator is not None:
        del found["threads"], own["threads"]  # Threads of the host decide little there.
    if found == own:
        return
    wanted = _words(config)
    fix = f"Try {wanted}, or costs.any_machine=true to predict for the profile's machine."
    if {**found, "threads": None} == {**own, "threads": None}:
        fix = f"Try OMP_NUM_THREADS={profile.machine.threads} in front of the command, or {wanted}."
    raise CostError(
        f"costs.file={config.costs.file} is a profile of another machine: {fingerprint(found)} "
        f"({_listed(found)}), but this one is {fingerprint(own)} ({_listed(own)}). {fix}"
    )


def _check_model(config: LaunchConfig, profile: Profile, own: tuple[tuple[str, str], ...]) -> None:
    if profile.model == own:
        return
    theirs, ours = dict(profile.model), dict(own)
    differ = [n for n in sorted({*theirs, *ours}) if theirs.get(n) != ours.get(n)]
    raise CostError(
        f"costs.file={config.costs.file} is a profile of another model: {fingerprint(theirs)} "
        f"({_listed({n: theirs.get(n, 'nothing') for n in differ})}), but this one is "
        f"{fingerprint(ours)} ({_listed({n: ours.get(n, 'nothing') for n in differ})}). "
        f"Try {_words(config)}."
    )


def _listed(facts: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in facts.items())


def _spelt(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


# A profile corrected by a training run: ``costs.refine``.
#
# The layers were measured by themselves; in training they run beside messages, a data loader and
# the other ranks. Of a run's median step the recorder knows how long each kind of instruction
# really took, all stages together: every figure of that kind is scaled by it. What units of one
# stage take cannot be told apart there, so their proportions stay as they were measured.

_MEASURED = {entry.name for entry in fields(Seconds)}
_SCALED = frozenset(kind for kind in MICROBATCH_KINDS if KINDS[kind].duration in _MEASURED)


def write_refined(target: Path, costs: Costs, measured: Timeline) -> None:
    """Writes a run's profile, corrected by its median step."""
    assert isinstance(costs, ProfiledCosts)
    ratios = kind_ratios(measured, costs.table(measured.program))
    better = replace(costs, profile=refined(costs.profile, ratios))
    predicted = simulate(measured.program, better)
    flushes = measured.program.updates is None
    said, took = ((t.makespan if flushes else t.period) for t in (predicted, measured))
    error = abs(said / took - 1.0) if took > 0 else None
    write_atomically(target, dump_profile(with_error(better.profile, error)))


def kind_ratios(measured: Timeline, table: CostTable) -> dict[Kind, float]:
    """Measured over predicted time of every kind of instruction in a step; pairs left out."""
    took: dict[Kind, float] = {}
    predicted: dict[Kind, float] = {}
    for rank in range(len(measured.program.ranks)):
        for event in measured.compute(rank):
            kind = event.instruction.kind
            if kind in _SCALED:
                took[kind] = took.get(kind, 0.0) + event.end - event.start
                predicted[kind] = predicted.get(kind, 0.0) + table.of(event.instruction)
    return {kind: took[kind] / predicted[kind] for kind in took if predicted[kind] > 0}


def refined(profile: Profile, ratios: Mapping[Kind, float]) -> Profile:
    """The profile with the figures of these kinds scaled, at every microbatch size."""

    def scaled(seconds: Seconds) -> Seconds:
        changes = {
            KINDS[kind].duration: getattr(seconds, KINDS[kind].duration) * ratio
            for kind, ratio in ratios.items()
        }
        return replace(seconds, **changes)

    def sized(figures: SizeProfile) -> SizeProfile:
        units = tuple(replace(unit, seconds=scaled(unit.seconds)) for unit in figures.units)
        return SizeProfile(scaled(figures.fixed), units, figures.error)

    return replace(
        profile, sizes=tuple((number, sized(figures)) for number, figures in profile.sizes)
    )


def with_error(profile: Profile, error: float | None) -> Profile:
    return replace(
        profile,
        sizes=tuple((number, replace(figures, error=error)) for number, figures in profile.sizes),
    )
