"""Stages of a graph by an integer program: no order is given beforehand, so branches may be mixed.

As in TePDist (https://github.com/alibaba/TePDist): stages rise along edges, no stage exceeds its
share by more than ``balance_ratio``, and the bytes that cross are least. In prefix form: y[v, k] is
1 where unit v lies in stage k or later, which makes rising stages y[u, k] <= y[v, k] and a
crossing y[v, k] - y[u, k]. Unlike there, a tensor with several consumers behind a boundary counts
once. Solved by HiGHS through scipy, which is an extra; the cut along the given order bounds it.
"""

from __future__ import annotations

import importlib
from typing import Any

from strategies.errors import ModelError, PlanError, install_words
from strategies.planner.cut import UnitGraph, crossing_bytes, cut_in_order

_SECONDS = 60.0
_SAME = 1e-9


def cut_by_ilp(
    graph: UnitGraph, num_stages: int, *, balance_ratio: float, in_order: bool = False
) -> tuple[int, ...]:
    """The stage of each unit.

    Args:
        graph: The model.
        num_stages: 1 or more.
        balance_ratio: The slowest stage may take that many times an equal share, or as long as the
            best cut along the given order needs if that is longer.
        in_order: Units keep the graph's order, as a runtime needs it that runs a model's own code:
            it cannot take a later branch first.

    Raises:
        PlanError: scipy is not installed.
        ModelError: There are fewer units than stages, or no cut was found in a minute.
    """
    count = len(graph.times)
    start = cut_in_order(graph, num_stages, balance_ratio=balance_ratio)
    if start is None:
        raise ModelError(
            f"{num_stages} stages for a model of {count} units: a stage needs at least one unit. "
            f"Try pp * schedule.stages_per_rank <= {count}."
        )
    known = tuple(stage for stage, units in enumerate(start) for _ in range(units))
    if num_stages == 1:
        return known
    slowest = max(
        sum(time for time, stage in zip(graph.times, known, strict=True) if stage == wanted)
        for wanted in range(num_stages)
    )
    limit = max(balance_ratio * sum(graph.times) / num_stages, slowest) * (1 + _SAME)
    return _solve(graph, num_stages, limit, crossing_bytes(graph, known), in_order=in_order)


def _solve(
    graph: UnitGraph, num_stages: int, limit: float, most_bytes: float, *, in_order: bool
) -> tuple[int, ...]:
    optimize, sparse, numpy = load_scipy("planner.partition=ilp", "planner.partition=dp")
    count, boundaries = len(graph.times), num_stages - 1
    tensors = [tensor for tensor in graph.tensors if tensor.consumers]
    offset = count * boundaries

    def later(unit: int, boundary: int) -> int:
        return unit * boundaries + boundary

    def crosses(tensor: int, boundary: int) -> int:
        return offset + tensor * boundaries + boundary

    rows: list[dict[int, float]] = []
    lows: list[float] = []
    highs: list[float] = []

    def add(row: dict[int, float], low: float, high: float) -> None:
        rows.append(row)
        lows.append(low)
        highs.append(high)

    for unit in range(count):
        for boundary in range(boundaries - 1):
            add({later(unit, boundary): 1.0, later(unit, boundary + 1): -1.0}, 0.0, numpy.inf)
    for unit in range(count - 1 if in_order else 0):
        for boundary in range(boundaries):
            add({later(unit + 1, boundary): 1.0, later(unit, boundary): -1.0}, 0.0, numpy.inf)
    for number, tensor in enumerate(tensors):
        for unit in tensor.consumers:
            for boundary in range(boundaries):
                edge = {later(unit, boundary): 1.0, later(tensor.producer, boundary): -1.0}
                add(edge, 0.0, numpy.inf)
                add({crosses(number, boundary): 1.0} | {k: -v for k, v in edge.items()}, 0.0,
                    numpy.inf)  # fmt: skip
    # Times of stage k: those in stage k or later minus those in stage k + 1 or later.
    whole = sum(graph.times)
    for stage in range(num_stages):
        row: dict[int, float] = {}
        members: dict[int, float] = {}
        for unit, time in enumerate(graph.times):
            if stage > 0:
                row[later(unit, stage - 1)] = time
                members[later(unit, stage - 1)] = 1.0
            if stage < boundaries:
                row[later(unit, stage)] = -time
                members[later(unit, stage)] = -1.0
        first = stage == 0
        add(row, -numpy.inf, limit - (whole if first else 0.0))
        add(members, 1.0 - (count if first else 0.0), numpy.inf)  # no stage is empty
    size = offset + len(tensors) * boundaries
    costs = numpy.zeros(size)
    for number, tensor in enumerate(tensors):
        for boundary in range(boundaries):
            costs[crosses(number, boundary)] = tensor.num_bytes
    add({i: float(c) for i, c in enumerate(costs) if c}, 0.0, most_bytes * (1 + _SAME))
    matrix = sparse.lil_matrix((len(rows), size))
    for index, row in enumerate(rows):
        for column, value in row.items():
            matrix[index, column] = value
    integral = numpy.zeros(size)
    integral[:offset] = 1
    result = optimize.milp(
        costs,
        constraints=optimize.LinearConstraint(matrix.tocsr(), lows, highs),
        integrality=integral,
        bounds=optimize.Bounds(0.0, 1.0),
        options={"time_limit": _SECONDS},
    )
    if result.x is None:
        raise ModelError(
            f"planner.partition=ilp found no cut of {count} units into {num_stages} stages in "
            f"{_SECONDS:g} s. Try planner.partition=dp, or a larger planner.balance_ratio."
        )
    return tuple(
        sum(round(result.x[later(unit, boundary)]) for boundary in range(boundaries))
        for unit in range(count)
    )


def load_scipy(what: str, instead: str) -> tuple[Any, Any, Any]:
    """scipy.optimize, scipy.sparse and numpy, only where they are asked for.

    Args:
        what: What needs them, in front of "needs scipy".
        instead: What does not.

    Raises:
        PlanError: scipy is not installed.
    """
    try:
        names = ("scipy.optimize", "scipy.sparse", "numpy")
        optimize, sparse, numpy = map(importlib.import_module, names)
        return optimize, sparse, numpy
    except ImportError as error:
        raise PlanError(
            f"{what} needs scipy, which is not installed. "
            f"Try {install_words('scipy')}, or {instead}."
        ) from error
