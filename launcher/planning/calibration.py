"""Whether a plan's times stand on a measurement, in words.

Two measurements can be behind them: a profile of the model's own layers (``costs=profiled``), or
hardware figures that a profile gave (``mode=profile profile.hardware=``).
"""

from __future__ import annotations

from launcher.planning.question import Question
from launcher.report.units import format_percent


def is_calibrated(asked: Question) -> bool:
    """Whether layers, or the hardware's figures, were measured."""
    return asked.problem.measured is not None or asked.config.hardware.measured_on is not None


def calibration_error(asked: Question) -> float | None:
    """How far the figures are from what they were measured from; None where that is not known."""
    measured = asked.problem.measured
    return asked.config.hardware.fit_error if measured is None else measured.error


def label(asked: Question) -> str:
    """One word, and the error where that is known."""
    if not is_calibrated(asked):
        return "uncalibrated"
    error = calibration_error(asked)
    return "calibrated" if error is None else f"calibrated, +-{format_percent(error)}"


def calibration(asked: Question) -> str:
    """The same as a sentence."""
    config = asked.config
    if asked.problem.measured is not None:
        return f"{label(asked)}: layers and links were measured (costs.file={config.costs.file})"
    if is_calibrated(asked):
        return (
            f"{label(asked)}: times are computed from figures measured on "
            f"{config.hardware.measured_on}"
        )
    return (
        "uncalibrated: times are computed from datasheet figures, at "
        f"{config.hardware.efficiency:.0%} of the peak"
    )
