"""The figures of a run as a table for the terminal, one screen at most."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TextIO

from strategies.errors import readable

if TYPE_CHECKING:
    from rich.table import Table

Result = Mapping[str, object]
# A figure as (number, unit and remark), from its value and the whole result.
_Write = Callable[[object, Result], tuple[str, str]]


def print_summary(result: Result, *, file: TextIO | None = None) -> None:
    """Prints the table; headings are bold on a terminal, and plain in a pipe or file.

    ``result``: the mapping of result.json; missing and null figures are left out.
    """
    # Here, so that durations are written where there is no terminal and no rich: in a browser.
    from rich.console import Console
    from rich.text import Text

    # Rich takes 80 columns for whatever is no terminal and would cut longer lines there.
    probe = Console(file=file, highlight=False)
    width = None if probe.is_terminal else 200
    console = Console(file=file, highlight=False, width=width)
    console.print(Text(readable(_headline(result)), style="bold"))
    if result.get("group_choice") is not None:
        console.print(Text(str(result["group_choice"])))
    console.print(_table(result))


def summary(result: Result) -> str:
    """The table as plain text, a line per figure, without a newline at the end."""
    file = io.StringIO()
    print_summary(result, file=file)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _table(result: Result) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(overflow="fold")  # gives way first where a terminal is narrow
    for section, figures in _SECTIONS:
        rows = list(_rows(result, figures))
        if rows:
            table.add_row(Text(section, style="bold"))
        for row in rows:
            table.add_row(*(Text(readable(cell)) for cell in row))
    return table


def _headline(result: Result) -> str:
    words = [str(result.get("schedule", ""))]
    words += [f"{key}={result[key]}" for key in ("pp", "dp", "tp") if result.get(key) is not None]
    words += [f"ep={result['ep']}"] if result.get("ep", 1) != 1 else []
    for key, word in (("stages_per_rank", "stages per rank"), ("num_microbatches", "microbatches")):
        if result.get(key) is not None:
            words.append(f"{result[key]} {word}")
    if result.get("group") is not None:
        words.append(f"group {result['group']}")
    for key in ("recompute", "overlap"):
        if result.get(key) is not None:
            words.append(f"{key}={result[key]}")
    return "  ".join(word for word in words if word)


def _rows(
    result: Result, figures: Mapping[str, tuple[str, _Write]]
) -> Iterator[tuple[str, str, str]]:
    for key, (label, write) in figures.items():
        value = result.get(key)
        if value is not None and not _is_beside_the_point(key, result):
            number, remark = write(value, result)
            yield f"  {label}", number, remark


def _is_beside_the_point(key: str, result: Result) -> bool:
    """Whether a figure says nothing, or stands under a name that says more."""
    if key == "peak_memory_bytes":  # of a run this is the measured one
        return result.get("measured_peak_memory_bytes") is not None
    if key == "hardware":
        return result.get("time_unit") != "s"
    alone = result.get("dp") == 1 and "exposed" in key
    return alone and result[key] == 0


def _duration(value: object, result: Result) -> tuple[str, str]:
    time_unit = str(result.get("time_unit", "s"))
    number, _, unit = format_duration(_float(value), time_unit).partition(" ")
    return number, unit


def _seconds(value: object, result: Result) -> tuple[str, str]:
    return _duration(value, {})


def _bound(value: object, result: Result) -> tuple[str, str]:
    number, unit = _duration(value, result)
    return number, f"{unit}  {result.get('binding_bound', '')}{_other_bound(result)}".rstrip()


def _other_bound(result: Result) -> str:
    """The bound that does not bind, in brackets."""
    other = "lb2" if str(result.get("binding_bound", "")).startswith("LB1") else "lb1"
    if result.get(other) is None:
        return ""
    number, unit = _duration(result[other], result)
    return f" ({other.upper()} rank {result.get(f'{other}_rank')}: {number} {unit})"


def _throughput(value: object, result: Result) -> tuple[str, str]:
    return f"{_float(value):.4g}", f"microbatches per {result.get('time_unit', 's')}"


def _percent(value: object, result: Result) -> tuple[str, str]:
    return format_percent(_float(value)).removesuffix(" %"), "%"


def _utilisation(value: object, result: Result) -> tuple[str, str]:
    number, unit = _percent(value, result)
    peak = result.get("peak_flops")
    if peak is None:
        return number, unit
    return number, f"{unit}  of {format_peak(_float(peak), str(result['peak_format']))}"


def _number(value: object, result: Result) -> tuple[str, str]:
    if isinstance(value, float):
        return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"), ""
    return (f"{value:,}" if isinstance(value, int) else str(value)), ""


def _name(value: object, result: Result) -> tuple[str, str]:
    return "", str(value)


def _count(value: object, result: Result) -> tuple[str, str]:
    return (f"{value:,}" if value else "none"), ""


def _peak(value: object, result: Result) -> tuple[str, str]:
    largest, remark = _largest(value)
    return f"{largest:.4g}", f"microbatches  {remark}"


def _gib(value: object, result: Result) -> tuple[str, str]:
    largest, remark = _largest(value)
    return f"{largest / 2**30:.4g}", f"GiB  {remark}"


MEASURED_MEMORY = {
    "allocator_peak": "peak of the allocator",
    "resident_growth": "growth of the resident size",
}
"""What a measured peak of a rank is, by ``measured_memory_kind`` in result.json."""


def _measured_gib(value: object, result: Result) -> tuple[str, str]:
    number, remark = _gib(value, result)
    known = MEASURED_MEMORY.get(str(result.get("measured_memory_kind")))
    return number, remark if known is None else f"{remark}; {known}"


def _memory(value: object, result: Result) -> tuple[str, str]:
    """The fullest rank, by what it holds."""
    assert isinstance(value, list)
    fullest = max(value, key=lambda held: held["total"])
    # What is less than a fiftieth of it stays in result.json.
    names = [n for n in fullest if n != "total" and fullest[n] * 50 >= fullest["total"] > 0]
    names.sort(key=lambda name: -fullest[name])
    parts = (f"{name.replace('_', ' ')} {fullest[name] / 2**30:.3g}" for name in names)
    return "", f"GiB  {', '.join(parts)}"


def _largest(value: object) -> tuple[float, str]:
    """The largest of the ranks' figures, and where it and the smallest are."""
    if not isinstance(value, (list, tuple)):
        return _float(value), ""
    known = {rank: _float(v) for rank, v in enumerate(value) if v is not None}
    if not known:
        return 0.0, ""
    high, low = max(known, key=known.__getitem__), min(known, key=known.__getitem__)
    return known[high], f"rank {high}" + (f", rank {low} least" if low != high else "")


def _per(what: str) -> _Write:
    """A whole number per rank or stage: the largest, and all of them."""

    def write(value: object, result: Result) -> tuple[str, str]:
        assert isinstance(value, (list, tuple))
        return f"{max(value)}", f"per {what} {' '.join(map(str, value))}"

    return write


def _float(value: object) -> float:
    assert isinstance(value, (int, float)), f"result.json holds {value!r} for a number"
    return float(value)


_SECTIONS: tuple[tuple[str, Mapping[str, tuple[str, _Write]]], ...] = (
    (
        "one step, predicted",
        {
            "makespan": ("makespan", _duration),
            "period": ("period", _duration),
            "lower_bound": ("lower bound", _bound),
            "bound_gap": ("above the bound", _percent),
            "gap_to_ideal": ("above the ideal", _percent),
            "bubble_ratio": ("bubble ratio", _percent),
            "exposed_grad_reduce": ("exposed reduction", _duration),
            "throughput": ("throughput", _throughput),
            "num_messages": ("messages", _count),
            "recomputed": ("forwards run again", _count),
            "peak_activations": ("peak activations", _peak),
            "staleness": ("updates late, no flush", _per("stage")),
            "weight_versions": ("versions of the weights", _per("rank")),
            "predicted_peak_memory_bytes": ("peak memory, predicted", _gib),
            "peak_memory_bytes": ("peak memory, predicted", _gib),
            "predicted_memory_breakdown": ("its parts, predicted", _memory),
            "predicted_step_time_s": ("step time", _seconds),
            "hardware": ("hardware", _name),
        },
    ),
    (
        "training",
        {
            "num_parameters": ("parameters", _number),
            "steps": ("steps", _number),
            "loss_first": ("first loss", _number),
            "loss_last": ("last loss", _number),
            "val_loss": ("validation loss", _number),
            "step_time_s": ("step time, median", _seconds),
            "tokens_per_s": ("tokens per second", _number),
            "mfu": ("model FLOPs utilisation", _utilisation),
            "measured_makespan_s": ("makespan of a step, measured", _seconds),
            "measured_period_s": ("period of a step, measured", _seconds),
            "measured_norm_sync_s": ("waiting for the clipping norm", _seconds),
            "measured_bubble_ratio": ("bubble ratio, measured", _percent),
            "measured_exposed_grad_reduce_s": ("exposed reduction, measured", _seconds),
            "measured_peak_memory_bytes": ("peak memory, measured", _measured_gib),
        },
    ),
)


# How durations are written for people.

SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def format_duration(value: float, unit: str) -> str:
    """A duration with its unit, four significant digits.

    Seconds are written in the largest unit that gives at least 1.

    >>> format_duration(13.5, "F"), format_duration(0.0125, "s"), format_duration(0.0, "s")
    ('13.5 F', '12.5 ms', '0 s')
    """
    if unit != "s" or value == 0.0:
        return f"{value:.4g} {unit}"
    scale, name = next((pair for pair in SECONDS if abs(value) >= pair[0]), SECONDS[-1])
    return f"{value / scale:.4g} {name}"


def format_peak(flops: float, number_format: str) -> str:
    """The peak of one rank, e.g. ``312 TFLOPS bf16``."""
    scale, unit = (1e12, "TFLOPS") if flops >= 1e12 else (1e9, "GFLOPS")
    return f"{flops / scale:.4g} {unit} {number_format}"


def format_percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def round_ticks(low: float, high: float) -> list[float]:
    """At most five round numbers of a range.

    >>> round_ticks(0.0, 8.0)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]
