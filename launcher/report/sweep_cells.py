"""How the figures of a column are written: one unit and as many decimals for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.report.sweep_figures import Quantity

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_BYTES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_FORMATS: dict[Quantity, str] = {"percent": "{:.1%}", "count": "{:,.0f}", "loss": "{:.4f}"}
_MAX_DECIMALS = 3

Number = int | float | None


def write_column(
    values: Sequence[Number], quantity: Quantity, time_unit: str | None
) -> tuple[str, list[str]]:
    """The column's unit, and a text per value; empty for None.

    Args:
        values: As in result.json.
        quantity: What they are.
        time_unit: Of ``time`` values, ``F`` or ``s``.

    >>> write_column([0.0125, None, 0.00098], "seconds", None)
    ('ms', ['12.50', '', '0.98'])
    >>> write_column([33.0, 28.5], "time", "F")
    ('F', ['33.0', '28.5'])
    >>> write_column([0.375, 0.0], "percent", None)
    ('%', ['37.5', '0.0'])
    """
    pattern = _FORMATS.get(quantity)
    if pattern is not None:
        texts = ["" if value is None else pattern.format(value) for value in values]
        unit = "%" if quantity == "percent" else ""
        return unit, [text.removesuffix("%") for text in texts]
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    if quantity == "seconds" or (quantity == "time" and time_unit == "s"):
        scale, unit = _scale(_SECONDS, largest)
    elif quantity == "bytes":
        scale, unit = _scale(_BYTES, largest)
    else:
        scale, unit = 1.0, "F" if quantity == "time" else ""
    return unit, _aligned([None if value is None else value / scale for value in values])


def _scale(units: Sequence[tuple[float, str]], largest: float) -> tuple[float, str]:
    """The largest unit in which the largest value is at least 1."""
    if largest == 0.0:
        return units[0]
    return next((pair for pair in units if largest >= pair[0]), units[-1])


def _aligned(values: Sequence[Number]) -> list[str]:
    """Four significant digits, the decimal points under each other."""
    short = [f"{value:.4g}" for value in values if value is not None and abs(value) < 1e15]
    if any("e" in text for text in short):
        short = [f"{value:.{_MAX_DECIMALS}f}" for value in values if value is not None]
    decimals = max((len(text.partition(".")[2]) for text in short), default=0)
    decimals = min(decimals, _MAX_DECIMALS)
    return ["" if value is None else f"{value:,.{decimals}f}" for value in values]
