"""Which layers each stage runs and what it hands on, as ``mode=validate`` lists it. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from strategies.costs.trace_file import Line, TracedModel
from strategies.planner.cut import balance, by_counts


def stage_layers(
    trace: TracedModel, num_stages: int, units_per_stage: Sequence[int] | None, *, rows: int
) -> tuple[str, ...]:
    """A sentence per stage: its layers, its parameters, and the tensors that leave it.

    Args:
        trace: Its units have the costs by which ranks balance stages.
        num_stages: S.
        units_per_stage: The cut by hand, None where ranks balance.
        rows: Of the batch on which they do.

    Raises:
        PlanError: The model has too few units, or other ones than are counted.
    """
    costs = [unit.cost.at(rows) for unit in trace.units]
    stages = stage_units(trace, num_stages, units_per_stage, rows=rows)
    sent = _sent(trace, stages)
    lines = []
    for stage, units in enumerate(stages):
        own = [trace.units[unit] for unit in units]
        share = sum(costs[unit] for unit in units) / sum(costs)
        parameters = sum(unit.parameters for unit in own)
        said = f"{spans([unit.name for unit in own])}, {parameters:,} parameters, "
        lines.append("; ".join([f"{said}{share * 100:.0f} % of the forward", *sent[stage]]))
    return tuple(lines)


def stage_units(
    trace: TracedModel, num_stages: int, units_per_stage: Sequence[int] | None, *, rows: int
) -> tuple[range, ...]:
    """Which units each stage has; arguments as for ``stage_layers``."""
    costs = [unit.cost.at(rows) for unit in trace.units]
    if units_per_stage is None:
        return tuple(balance(costs, num_stages))
    return tuple(by_counts(units_per_stage, len(costs), num_stages))


def _sent(trace: TracedModel, stages: Sequence[range]) -> list[list[str]]:
    """Per stage, what goes to which: a tensor that several use travels from one to the next."""
    stage_of = [stage for stage, units in enumerate(stages) for _ in units]
    sums: dict[tuple[int, int], list[Line]] = {}
    for tensor in trace.tensors:
        ends = {stage_of[tensor.producer], *(stage_of[unit] for unit in tensor.consumers)}
        for pair in pairwise(sorted(ends)):
            sums.setdefault(pair, []).append(tensor.num_bytes)
    found: list[list[str]] = [[] for _ in stages]
    for (source, target), lines in sorted(sums.items()):
        fixed, per_row = sum(line.fixed for line in lines), sum(line.per_row for line in lines)
        sizes = [_size(per_row) + " per row"] if per_row else []
        sizes += [_size(fixed)] if fixed else []
        number = f"{len(lines)} tensor" + ("s" if len(lines) > 1 else "")
        found[source].append(f"to stage {target}: {number}, {' and '.join(sizes)}")
    return found


def _size(num_bytes: float) -> str:
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.4g} {unit}"
    return f"{num_bytes:g} B"


def spans(names: Sequence[str]) -> str:
    """Names in short, runs of numbers by their ends.

    >>> spans(["net.in", "net.layers.0", "net.layers.1", "net.layers.2", "head"])
    'net.in, net.layers.0 to 2, head'
    """
    found: list[tuple[str, int, int] | str] = []
    for name in names:
        match = re.fullmatch(r"(.*\.)(\d+)", name)
        last = found[-1] if found else None
        if match is None:
            found.append(name)
        elif isinstance(last, tuple) and (last[0], last[2] + 1) == (match[1], int(match[2])):
            found[-1] = (*last[:2], last[2] + 1)
        else:
            found.append((match[1], int(match[2]), int(match[2])))
    return ", ".join(
        run if isinstance(run, str) else f"{run[0]}{run[1]}" + f" to {run[2]}" * (run[2] > run[1])
        for run in found
    )
