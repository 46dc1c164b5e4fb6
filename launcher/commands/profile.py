"""``mode=profile``: measures layers and links here, and writes what ``costs=profiled`` reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.commands.ranks import check_devices, failure_recorded, run_ranks
from launcher.config import LaunchConfig
from launcher.planning.profile_check import class_numbers, measured_sizes, writable
from launcher.report.plan_table import profile_table
from launcher.report.predicted import run_mapping
from launcher.report.result import write_atomically, write_result
from launcher.resolve import Run, element_sizes, num_gpus, resolve, uses_gpu
from launcher.terminal import say
from launcher.workloads.loads import unit_loads
from launcher.workloads.model_share import ModelShape, model_units
from strategies.costs.hardware import ElementSizes
from strategies.costs.load import Load
from strategies.costs.profile_file import Profile, parse_profile
from strategies.errors import PlanError
from strategies.plan import IDLE_RANK_BYTES
from strategies.profiling.sample import sample_units


def run(config: LaunchConfig, run_dir: Path) -> int:
    resolved = resolve(config)
    given = config.profile.file
    target = run_dir / "profile.json" if given is None else writable(given, key="profile.file")
    option = None if config.profile.hardware is None else hardware_file(config.profile.hardware)
    _check(resolved)
    common = run_mapping(resolved)
    result = run_dir / "result.json"
    with failure_recorded(result, common):
        outcome = run_ranks(resolved, run_dir, None, lambda _: None, world=_num_ranks(resolved))
        text = str(outcome.pop("profile"))
        write_atomically(target, text)
    profile = parse_profile(text, label=str(target))
    write_result(result, common | outcome | {"profile": target})
    say(profile_table(profile))
    say(f"profile: {target}")
    say(f"use it: costs=profiled costs.file={target}")
    if option is not None:
        _write_hardware(option, profile, resolved)
    return 0


def _write_hardware(option: Path, profile: Profile, run: Run) -> None:
    sizes, memory = element_sizes(run.config), _rank_memory(run)
    text = hardware_yaml(option.stem, profile, run.config, run.shape, sizes, memory)
    write_atomically(option, text)
    say(f"hardware: {option}")
    say(f"use it: --config-dir {option.parent.parent} hardware={option.stem}")


def _rank_memory(run: Run) -> int:
    """What one of as many ranks as there are cores may use; a GPU's is the option's that was."""
    if uses_gpu(run.config):
        return int(run.config.hardware.memory_gb * 1e9)
    import psutil

    return int(psutil.virtual_memory().total) // (os.cpu_count() or 1)


def _num_ranks(run: Run) -> int:
    """How many processes measure: two replicas, or one where a second has no room."""
    tp = run.config.tp
    if uses_gpu(run.config):
        return tp if num_gpus() < 2 * tp else 2 * tp
    import psutil

    free, needs = psutil.virtual_memory().available, tp * _sample_bytes(run)
    if needs > free:
        raise PlanError(
            f"mode=profile holds one or two layers of each kind, here {needs / 1e9:.1f} GB with "
            f"gradients, optimizer and activations, but {free / 1e9:.1f} GB are free. Try a "
            f"smaller model.sequence than {run.shape.sequence}, or profile.microbatch_sizes=[1]."
        )
    return tp if 2 * needs > free else 2 * tp


def _sample_bytes(run: Run) -> int:
    """About what one rank holds while it measures."""
    units = model_units(run.shape)
    sample = sample_units(class_numbers(run.shape), [unit.parameters for unit in units])
    chosen = [units[place] for place in sample.units]
    sizes = element_sizes(run.config)
    state = sizes.weight + sizes.gradient + sizes.main + 2 * sizes.moment
    rows = 2 * max(measured_sizes(run.config))
    saved = sum(unit.saved_elements for unit in chosen) * rows * sizes.activation
    weights = sum(unit.parameters + unit.tied_parameters for unit in chosen) * state
    return IDLE_RANK_BYTES + (weights + saved) // run.config.tp


def _check(run: Run) -> None:
    config = run.config
    if run.own_model:
        raise PlanError(
            f"mode=profile measures the built-in transformer and the families of model=hf that "
            f"the launcher knows the sizes of, not model={config.model.name}. "
            "Try costs=analytic, or model=small."
        )
    if config.cluster.name != "local":
        raise PlanError(
            f"mode=profile starts its own processes on the machine it runs on, not on those of "
            f"cluster={config.cluster.name}. Try cluster=local, on one of them."
        )
    check_devices(run)
    cores = os.cpu_count() or 1
    if config.tp > 1 and not uses_gpu(config) and cores < 2 * config.tp:
        raise PlanError(
            f"mode=profile tp={config.tp} measures two groups of {config.tp} ranks side by side, "
            f"and this machine has {cores} cores for {2 * config.tp} ranks. Try tp=1."
        )


# A profile as an option of ``hardware=``: what ``profile.hardware=PATH`` writes.
#
# A profile knows each kind of unit of one model; a plan also asks about layouts that nobody has
# measured (tp, other models). So its figures are fitted by those of ``Hardware``: operations per
# second, seconds beside them per unit and per stage, memory, links. How far the fit is from what
# was measured is written into the file, and told with every plan that is made with it.

_FOLDER = "hardware"


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure of a profile.

    Attributes:
        flops: Of the forward.
        units: 1 for a unit's own seconds, 0 for what a stage takes by itself.
        seconds: Of forward and backward together, over 3: what one product of each takes.
        weight: How often it occurs, over the square of what the whole model takes.
    """

    flops: float
    units: int
    seconds: float
    weight: float


@dataclass(frozen=True, slots=True)
class Rates:
    """What is fitted; ``error``: what units are off, over what they take, on average."""

    flops_per_s: float
    unit_overhead_s: float
    stage_overhead_s: float
    error: float


def hardware_file(given: str) -> Path:
    """Where an option of ``hardware=`` is to be written."""
    path = Path(given).expanduser().absolute()
    if path.suffix != ".yaml" or path.parent.name != _FOLDER or path.is_dir():
        raise PlanError(
            f"profile.hardware={given} is no option of hardware=: these are YAML files in a folder "
            f"named {_FOLDER}. Try profile.hardware=my_conf/{_FOLDER}/cpu_gloo.yaml, then "
            "--config-dir my_conf hardware=cpu_gloo."
        )
    return path


def hardware_yaml(
    name: str,
    profile: Profile,
    config: LaunchConfig,
    shape: ModelShape,
    sizes: ElementSizes,
    memory_bytes: int,
) -> str:
    rates = fit_rates(profile, config, shape)
    old, machine = config.hardware, profile.machine
    number_format = config.trainer.number_format
    peak = max(old.peak(number_format), rates.flops_per_s)
    peaks = {f"peak_{name}_flops": value for name, value in old.named_peaks().items()}
    if old.peak_flops is not None:
        peaks["peak_flops"] = old.peak_flops
    named = f"peak_{number_format}_flops"
    peaks[named if named in peaks else "peak_flops"] = peak
    where = machine.accelerator or machine.processor
    measured_on = f"{where}, {machine.threads} threads per rank, torch {machine.torch}"
    values: dict[str, object] = {
        "name": name,
        **{name: _short(value) for name, value in peaks.items()},
        "efficiency": _short(min(1.0, rates.flops_per_s / peak)),
        "memory_gb": _short(memory_bytes / 1e9),
        "memory_bandwidth": _short(_memory_bandwidth(profile, config, shape, sizes)),
        "unit_overhead_s": _short(rates.unit_overhead_s),
        "stage_overhead_s": _short(rates.stage_overhead_s),
        "step_overhead_s": _short(profile.rest_s),
        "intra_bandwidth": _short(old.intra_bandwidth),
        "intra_latency_s": _short(old.intra_latency_s),
        "inter_bandwidth": _short(old.inter_bandwidth),
        "inter_latency_s": _short(old.inter_latency_s),
        "gpus_per_node": old.gpus_per_node,
        "measured_on": '"' + measured_on.replace("\\", "/").replace('"', "'") + '"',
        "fit_error": _short(rates.error),
    }
    if profile.messages is not None:
        values["intra_bandwidth"] = _short(profile.messages.bandwidth)
        values["intra_latency_s"] = _short(profile.messages.latency_s)
    if profile.reductions is not None:
        values["ring_bandwidth"] = _short(profile.reductions.bandwidth)
        values["ring_latency_s"] = _short(profile.reductions.latency_s)
        values["lockstep_loss"] = _short(profile.lockstep_loss)
    lines = [
        f"# Measured by mode=profile, in {number_format}, which efficiency is of; peaks, inter_* "
        f"and gpus_per_node are those of hardware={old.name}.",
        *(f"{key}: {value}" for key, value in values.items()),
    ]
    return "\n".join(lines) + "\n"


def fit_rates(profile: Profile, config: LaunchConfig, shape: ModelShape) -> Rates:
    """Operations per second and seconds beside them: least squares, nothing negative."""
    rows: list[Measured] = []
    wholes: list[tuple[list[Measured], list[int]]] = []
    counts = _counts(shape, len(profile.classes))
    for size, figures in profile.sizes:
        loads = _class_loads(config, shape, size, len(profile.classes))
        each = [unit.seconds for unit in figures.units]
        whole = sum(n * (s.forward + s.backward) for n, s in zip(counts, each, strict=True)) / 3
        found = [
            Measured(load.forward_flops, 1, (s.forward + s.backward) / 3, n / whole**2)
            for load, s, n in zip(loads, each, counts, strict=True)
        ]
        fixed = (figures.fixed.forward + figures.fixed.backward) / 3
        rows += [*found, Measured(0.0, 0, fixed, 1 / whole**2)]
        wholes.append((found, counts))
    stage = sum(r.weight * r.seconds for r in rows if not r.units) / sum(
        r.weight for r in rows if not r.units
    )
    slope, overhead = _line([row for row in rows if row.units])
    # Seconds that units are off over those that they take: a small one cannot be far off.
    errors = []
    for found, numbers in wholes:
        pairs = list(zip(found, numbers, strict=True))
        missed = sum(n * abs(slope * row.flops + overhead - row.seconds) for row, n in pairs)
        errors.append(missed / sum(n * row.seconds for row, n in pairs))
    error = sum(errors) / len(errors)
    return Rates(1.0 / max(slope, 1e-18), overhead, stage, error)


def _line(rows: Sequence[Measured]) -> tuple[float, float]:
    """Seconds per operation and seconds beside them."""
    total = sum(row.weight for row in rows)
    mean_x = sum(row.weight * row.flops for row in rows) / total
    mean_y = sum(row.weight * row.seconds for row in rows) / total
    spread = sum(row.weight * (row.flops - mean_x) ** 2 for row in rows)
    both = sum(row.weight * (row.flops - mean_x) * (row.seconds - mean_y) for row in rows)
    slope = both / spread if spread else 0.0
    overhead = mean_y - slope * mean_x
    if overhead < 0.0 or slope <= 0.0:
        through = sum(row.weight * row.flops**2 for row in rows)
        return sum(row.weight * row.flops * row.seconds for row in rows) / through, 0.0
    return slope, overhead


def _counts(shape: ModelShape, num_classes: int) -> list[int]:
    numbers = class_numbers(shape)
    return [numbers.count(kind) for kind in range(num_classes)]


def _class_loads(
    config: LaunchConfig, shape: ModelShape, size: int, num_classes: int
) -> list[Load]:
    """What one unit of each class takes."""
    numbers = class_numbers(shape)
    loads = unit_loads(shape, config.tp, size, sequence_parallel=config.sequence_parallel)
    return [loads[numbers.index(kind)] for kind in range(num_classes)]


def _memory_bandwidth(
    profile: Profile, config: LaunchConfig, shape: ModelShape, sizes: ElementSizes
) -> float:
    """Bytes that an optimizer touches over what it takes, as ``AnalyticCosts`` counts them."""
    touched = sizes.gradient + 2 * (sizes.main or sizes.weight) + 4 * sizes.moment
    touched += sizes.weight if sizes.main else 0
    size, figures = profile.sizes[0]
    loads = _class_loads(config, shape, size, len(profile.classes))
    counts = _counts(shape, len(profile.classes))
    moved = sum(n * load.parameters * touched for n, load in zip(counts, loads, strict=True))
    took = sum(n * unit.seconds.step for n, unit in zip(counts, figures.units, strict=True))
    return moved / took if took > 0 else config.hardware.memory_bandwidth


def _short(value: float) -> str:
    # YAML 1.1 reads 1e9 as a word, 1.0e+09 as a number.
    text = f"{value:.4g}"
    mantissa, mark, exponent = text.partition("e")
    if not mark:
        return text if "." in text else f"{text}.0"
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent):+03d}"
