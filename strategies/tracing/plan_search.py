"""``find_shardings``: a module, a microbatch and a machine to a plan; and plans by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from strategies.costs.hardware import ElementSizes, Hardware, NumberFormat
from strategies.models.tensor_parallel.sharding import Column, Row, Vocabulary, read_style
from strategies.planner.shardings.critical_values import Level
from strategies.planner.shardings.plan_rows import Planner
from strategies.planner.shardings.prices import Prices
from strategies.sharding_plan import FoundPlan
from strategies.tracing.operator_trace import trace_operators


def find_shardings(
    module: nn.Module,
    batch: Any,
    rows: int,
    tp: int,
    hardware: Hardware,
    *,
    level: Level = "O2",
    sizes: ElementSizes | None = None,
    number_format: NumberFormat = "fp32",
    num_microbatches: int = 1,
    boundaries: Collection[str] = (),
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> FoundPlan:
    """The best plan for a module that says nothing about it.

    Args:
        module: Its parameters may be on the meta device; nothing of it is changed.
        batch: One microbatch.
        rows: Of it.
        tp: Ranks that share.
        hardware: Their figures and links.
        level: ``O2``, or ``O3`` for one program over the whole model.
        sizes: Bytes of elements; None for 4 each.
        number_format: Of matrix products.
        num_microbatches: Of a step.
        boundaries: Names of modules whose outputs stay whole.
        autocast: The types in which steps run.

    Raises:
        ModelError: The step cannot run on shapes; names the operation and the module.
        PlanError: It needs an integer program, and scipy is not installed.
    """
    (graph,) = trace_operators(module, batch, rows, [tp], boundaries=boundaries, autocast=autocast)
    prices = Prices(
        hardware,
        tp,
        sizes=sizes or ElementSizes(),
        number_format=number_format,
        num_microbatches=num_microbatches,
    )
    return Planner(graph, prices, level=level).found()


def styles_by_hand(module: nn.Module) -> dict[str, str] | None:
    """Style names by layer of a module's own ``tensor_parallel_plan()``; None where it has none."""
    plan = getattr(module, "tensor_parallel_plan", None)
    given_plan = plan() if callable(plan) else None
    if given_plan is None:
        return None
    words = {Column: "column", Row: "row", Vocabulary: "vocabulary"}
    found: dict[str, str] = {}
    names = [name for name, _ in module.named_modules() if name]
    for pattern, given in given_plan.items():
        style = words.get(type(read_style(pattern, given)), "replicated")
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        found.update({name: style for name in names if expression.fullmatch(name)})
    return found
