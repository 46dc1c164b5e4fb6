"""Loggers beside metrics.csv: Weights & Biases (offline without a key) and TensorBoard."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from launcher.config import LaunchConfig, dump
from launcher.task import run_id
from strategies.errors import PlanError


def build_loggers(config: LaunchConfig, run_dir: Path) -> list[Logger]:
    """The loggers that ``tracking=`` asks for; metrics.csv needs none.

    Raises:
        PlanError: A package for it is not installed.
    """
    name = config.tracking.name
    if name == "wandb":
        return [_wandb(config, run_dir)]
    if name == "tensorboard":
        from lightning.pytorch.loggers import TensorBoardLogger

        try:
            return [TensorBoardLogger(save_dir=run_dir, name="tensorboard", version="")]
        except ModuleNotFoundError as error:
            raise PlanError(
                "tracking=tensorboard needs the package tensorboard. Try pip install "
                "'foldpipe[tensorboard]', or tracking=csv."
            ) from error
    return []


def _wandb(config: LaunchConfig, run_dir: Path) -> Logger:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    tracking = config.tracking
    offline = not _has_key() if tracking.offline == "auto" else bool(tracking.offline)
    settings: dict[str, Any] = {
        "entity": tracking.entity,
        "group": tracking.group or config.experiment_name,
        "tags": list(tracking.tags),
        "config": dump(config),
        # One run per training, also across requeues.
        "id": run_id(run_dir),
        # What a rank prints is in its own log, masked; wandb would keep a copy of its own.
        "settings": wandb.Settings(console="off"),
    }
    if not offline:
        settings["resume"] = "allow"
    return WandbLogger(
        name=run_dir.name, project=tracking.project, save_dir=run_dir, offline=offline, **settings
    )


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc

    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return False
