"""How durations are written for people."""

from __future__ import annotations

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def format_duration(value: float, unit: str) -> str:
    """A duration with its unit, four significant digits.

    Args:
        value: In ``unit``.
        unit: ``F`` or ``s``; seconds are written in the largest unit that gives at least 1.

    >>> format_duration(13.5, "F"), format_duration(0.0125, "s"), format_duration(0.0, "s")
    ('13.5 F', '12.5 ms', '0 s')
    """
    if unit != "s" or value == 0.0:
        return f"{value:.4g} {unit}"
    scale, name = next((pair for pair in _SECONDS if abs(value) >= pair[0]), _SECONDS[-1])
    return f"{value / scale:.4g} {name}"


def format_percent(ratio: float) -> str:
    """A ratio in percent, one decimal."""
    return f"{100 * ratio:.1f} %"
