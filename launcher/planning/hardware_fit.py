"""Figures of ``hardware=`` fitted to a profile: what ``profile.hardware=PATH`` writes.

A profile knows each kind of unit of one model; a plan also asks about layouts that nobody has
measured (tp, other models). So its figures are fitted by those of ``Hardware``: operations per
second, seconds beside them per unit and per stage, memory, links. How far the fit is from what
was measured is written into the file, and told with every plan that is made with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config import LaunchConfig
from launcher.planning.profile_check import class_numbers
from launcher.workloads.loads import unit_loads
from launcher.workloads.model_share import ModelShape
from strategies.costs.hardware import ElementSizes
from strategies.costs.load import Load
from strategies.costs.profile_file import Profile
from strategies.errors import PlanError

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
    old, number_format = config.hardware, config.trainer.number_format
    values = hardware_values(name, profile, config, shape, sizes, memory_bytes)
    lines = [
        f"# Measured by mode=profile, in {number_format}, which efficiency is of; peaks, inter_* "
        f"and gpus_per_node are those of hardware={old.name}.",
        *(f"{key}: {_spelt(value)}" for key, value in values.items()),
    ]
    return "\n".join(lines) + "\n"


def hardware_values(
    name: str,
    profile: Profile,
    config: LaunchConfig,
    shape: ModelShape,
    sizes: ElementSizes,
    memory_bytes: float,
    *,
    peak: float = 0.0,
) -> dict[str, Any]:
    """Keys of ``hardware.*`` as a profile has them.

    ``peak``: FLOP/s that products were measured at; 0 for what ``config`` has.
    """
    rates = fit_rates(profile, config, shape)
    old, machine = config.hardware, profile.machine
    number_format = config.trainer.number_format
    peak = max(peak or old.peak(number_format), rates.flops_per_s)
    peaks = {f"peak_{name}_flops": value for name, value in old.named_peaks().items()}
    if old.peak_flops is not None:
        peaks["peak_flops"] = old.peak_flops
    named = f"peak_{number_format}_flops"
    peaks[named if named in peaks else "peak_flops"] = peak
    where = machine.accelerator or machine.processor
    values: dict[str, Any] = {
        "name": name,
        **peaks,
        "efficiency": min(1.0, rates.flops_per_s / peak),
        "memory_gb": memory_bytes / 1e9,
        "memory_bandwidth": _memory_bandwidth(profile, config, shape, sizes),
        "unit_overhead_s": rates.unit_overhead_s,
        "stage_overhead_s": rates.stage_overhead_s,
        "step_overhead_s": profile.rest_s,
        "intra_bandwidth": old.intra_bandwidth,
        "intra_latency_s": old.intra_latency_s,
        "inter_bandwidth": old.inter_bandwidth,
        "inter_latency_s": old.inter_latency_s,
        "gpus_per_node": old.gpus_per_node,
        "measured_on": f"{where}, {machine.threads} threads per rank, torch {machine.torch}",
        "fit_error": rates.error,
    }
    if profile.messages is not None:
        values["intra_bandwidth"] = profile.messages.bandwidth
        values["intra_latency_s"] = profile.messages.latency_s
    if profile.reductions is not None:
        values["ring_bandwidth"] = profile.reductions.bandwidth
        values["ring_latency_s"] = profile.reductions.latency_s
        values["lockstep_loss"] = profile.lockstep_loss
    return values


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


def _spelt(value: object) -> str:
    if isinstance(value, str) and " " in value:
        return '"' + value.replace("\\", "/").replace('"', "'") + '"'
    return _short(value) if isinstance(value, float) else str(value)


def _short(value: float) -> str:
    # YAML 1.1 reads 1e9 as a word, 1.0e+09 as a number.
    text = f"{value:.4g}"
    mantissa, mark, exponent = text.partition("e")
    if not mark:
        return text if "." in text else f"{text}.0"
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent):+03d}"
