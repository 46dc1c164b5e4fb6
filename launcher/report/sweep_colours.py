"""The colours of instructions in sweep.png: those of the interactive pages (timeline.js)."""

from __future__ import annotations

from colorsys import hls_to_rgb

Rgb = tuple[float, float, float]

# (hue in degrees, saturation in percent): forward and backward also differ in grey.
HUES: dict[str, tuple[int, int]] = {
    "F": (212, 62),
    "B": (28, 78),
    "I": (44, 80),
    "W": (150, 42),
    "R": (272, 42),
    "REDUCE": (184, 58),
    "GATHER": (320, 40),
    "STEP": (0, 0),
}
_OTHER = (348, 45)  # a kind that has no colour of its own yet


def bar_colour(kind: str, stage: int, num_stages: int) -> Rgb:
    """The kind's hue, from light for the first stage to dark for the last."""
    hue, saturation = HUES.get(kind, _OTHER)
    position = stage / (num_stages - 1) if num_stages > 1 else 0.4
    return hls_to_rgb(hue / 360, (76 - 36 * position) / 100, saturation / 100)


def text_colour(fill: Rgb) -> str:
    """The better readable one of black and white upon a colour."""
    red, green, blue = (value**2.2 for value in fill)
    return "#ffffff" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.2 else "#121316"
