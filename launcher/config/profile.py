"""Keys of ``mode=profile``: what is measured, and where it is written."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.key import key


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """``mode=profile``: measures layers and links for ``costs=profiled``."""

    file: str | None = key(
        None,
        "Where the profile goes; null = profile.json in the run's folder.",
        example="profile.json",
    )
    microbatch_sizes: tuple[int, ...] = key(
        (), "Microbatch sizes to measure; [] = data.microbatch_size.", low=1, example=[1, 2, 4]
    )
    hardware: str | None = key(
        None,
        "Also writes the figures of this machine there, as an option of hardware= for plans; the "
        "folder above it is a --config-dir.",
        example="my_conf/hardware/cpu_gloo.yaml",
    )
    iterations: int = key(
        10, "Training steps per figure; fewer where they take long.", low=3, high=25
    )
