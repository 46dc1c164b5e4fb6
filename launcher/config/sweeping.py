"""Keys of sweeps: what ``-m`` does with its jobs."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.key import key


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """``sweep.*``: how the jobs of ``-m`` end, and which of them is the best."""

    fail_fast: bool = key(False, "Stop a sweep at its first failing job.")
    metric: str = key(
        "auto",
        "Figure by which the best job is named, a column of sweep.csv; auto = validation loss "
        "where learning varies, else the step time.",
        example="val_loss",
    )
    trials: int | None = key(
        None,
        "Search: so many jobs, chosen by Optuna among the values and interval()s of -m; null = "
        "every combination.",
        low=1,
        high=1000,
        example=20,
    )
    dir: str | None = key(
        None,
        "mode=collect: the sweep's folder; null = the newest below multirun/.",
        example="multirun/2030-01-31/12-00-00",
    )
