"""Shardings that are found for a model: asked for by ``planner.explain=[tp=2]``, and in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.config import LaunchConfig
from launcher.planning.model_trace import traced_operators
from launcher.report.summary import format_duration
from launcher.resolve import element_sizes
from strategies.planner.shardings.plan_rows import Planner
from strategies.planner.shardings.prices import Prices
from strategies.sharding_plan import LayerSharding, ShardingPlan


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A found plan, and what it is compared with.

    Attributes:
        by_hand: The model's own plan with the same prices; None where it has none.
        fits: Whether its own plan goes with the shapes; if not, it is not priced.
        planned_s: What the planner's table has for a microbatch's forward and backward on these
            ranks; None where it has none.
        listed: Whether that goes by the same operators; else by what is known of built-in models.
    """

    plan: ShardingPlan
    by_hand: ShardingPlan | None
    fits: bool = True
    planned_s: float | None = None
    listed: bool = True

    def to_json(self) -> dict[str, object]:
        hand = self.by_hand
        return self.plan.to_json() | {
            "planned_seconds": self.planned_s,
            "by_hand_seconds": None if hand is None else hand.seconds,
            "by_hand_above": None if hand is None else hand.seconds / self.plan.seconds - 1.0,
        }


def tensor_plan(
    config: LaunchConfig,
    run_dir: Path,
    tp: int,
    *,
    rows: int,
    num_microbatches: int,
) -> TensorPlan:
    """The best shardings of the model over ``tp`` ranks, for microbatches of so many rows.

    Raises:
        ModelError: Its step cannot run on shapes.
    """
    traced = traced_operators(config, run_dir, [tp])[tp]
    graph, styles = traced.graph, traced.by_hand
    prices = Prices(
        config.hardware,
        tp,
        rows=rows / graph.rows,
        sizes=element_sizes(config),
        number_format=config.trainer.number_format,
        num_microbatches=num_microbatches,
    )
    planner = Planner(graph, prices)
    by_hand = None
    if styles is not None:
        by_hand = planner.priced({name: (style,) for name, style in styles.items()})
    fits = styles is None or by_hand is not None
    return TensorPlan(planner.found(), by_hand, fits)


def tensor_plan_text(found: TensorPlan) -> str:
    """Layer by layer: how it is cut, and what is sent."""
    return "\n".join(_lines(found))


def _lines(found: TensorPlan) -> Iterator[str]:
    plan = found.plan
    yield (
        f"shardings found for tp={plan.tp} (microbatches of {plan.rows} rows): "
        f"{format_duration(plan.seconds, 's')} per microbatch, of "
        f"{format_duration(plan.seconds_whole, 's')} at tp=1; "
        f"{_bytes(plan.weight_bytes)} of weights per rank, of {_bytes(plan.weight_bytes_whole)}"
    )
    if found.planned_s is not None:
        why = "in whole backwards messages run under the weights' gradients"
        if not found.listed:
            why += ", and the kernels of built-in models go by formulas (fused attention)"
        yield f"  the table above has {format_duration(found.planned_s, 's')} for it: {why}"
    for reason in plan.reasons:
        yield f"  {reason}"
    rows = [row for row in plan.layers if row.style != "replicated" or row.partial]
    cells = [_cells(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(_HEAD, *cells, strict=True)]
    if rows:
        yield "  " + _row(_HEAD, widths)
    for cell in cells:
        yield "  " + _row(cell, widths)
    whole = [row.pattern for row in plan.layers if row.style == "replicated" and not row.partial]
    if whole:
        shown = ", ".join(whole[:_MOST_NAMES])
        more = f", ... ({len(whole)} in all)" if len(whole) > _MOST_NAMES else ""
        yield f"  whole on every rank: {shown}{more}"
    yield from _compared(found)


_HEAD = ("layers", "", "how", "forward", "backward", "weights", "time")
_MOST_NAMES = 12


def _cells(row: LayerSharding) -> tuple[str, ...]:
    return (
        row.pattern,
        "" if row.count == 1 else f"x {row.count}",
        how(row),
        _bytes(row.forward_bytes),
        _bytes(row.backward_bytes),
        _bytes(row.weight_bytes),
        format_duration(row.seconds, "s"),
    )


def how(row: LayerSharding) -> str:
    """A row's way to be cut, in a few words."""
    words: str = "whole, on a share" if row.style == "replicated" else row.style
    if row.segments > 1:
        words += f", {row.segments} parts"
    if row.style == "column" and row.whole_output:
        words += ", gathered"
    if row.style == "row" and row.whole_input:
        words += " of a whole input"
    return words


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    names = [cell.ljust(width) for cell, width in zip(cells[:3], widths[:3], strict=True)]
    figures = [cell.rjust(width) for cell, width in zip(cells[3:], widths[3:], strict=True)]
    return "  ".join((*names, *figures)).rstrip()


def _compared(found: TensorPlan) -> Iterator[str]:
    if not found.fits:
        yield "  the model's own tensor_parallel_plan() does not fit these shapes: it is not priced"
    if found.by_hand is None:
        return
    above = found.by_hand.seconds / found.plan.seconds - 1.0
    if above > _SAME:
        yield (
            f"  the model's own tensor_parallel_plan() takes "
            f"{format_duration(found.by_hand.seconds, 's')}, {above:.2%} more than this one"
        )
    elif above < -_SAME:
        yield (
            f"  the model's own tensor_parallel_plan() takes "
            f"{format_duration(found.by_hand.seconds, 's')}, {-above:.2%} less: it cuts light "
            "layers, too, which replicas (dp) would do better"
        )
    else:
        yield "  the model's own tensor_parallel_plan() is as good as this one"


_SAME = 5e-5


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
