"""Whether a plan's times stand on a measurement, in words."""

from __future__ import annotations

from launcher.config import LaunchConfig
from launcher.report.units import format_percent


def is_calibrated(config: LaunchConfig) -> bool:
    """Whether the hardware's figures were measured (``mode=profile profile.hardware=``)."""
    return config.hardware.measured_on is not None


def label(config: LaunchConfig) -> str:
    """One word, and how far the figures are from what was measured where that is known."""
    if not is_calibrated(config):
        return "uncalibrated"
    error = config.hardware.fit_error
    return "calibrated" if error is None else f"calibrated, +-{format_percent(error)}"


def calibration(config: LaunchConfig) -> str:
    """The same as a sentence."""
    hardware = config.hardware
    if not is_calibrated(config):
        return (
            "uncalibrated: times are computed from datasheet figures, at "
            f"{hardware.efficiency:.0%} of the peak"
        )
    return f"{label(config)}: times are computed from figures measured on {hardware.measured_on}"
