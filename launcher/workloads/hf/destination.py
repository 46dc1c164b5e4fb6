"""Where ``mode=export`` writes, and whether it may. Torch-free."""

from __future__ import annotations

from pathlib import Path

from launcher.config import LaunchConfig
from strategies.errors import PlanError


def export_folder(config: LaunchConfig, run_dir: Path) -> Path:
    """The folder to be, absolute."""
    asked = config.export.path
    return run_dir / "export" if asked is None else Path(asked).expanduser().absolute()


def check_destination(folder: Path) -> None:
    """Refuses to write over anything.

    Raises:
        PlanError: There is a file, or a folder with something in it.
    """
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise PlanError(
            f"export.path={folder} exists and is never overwritten. Try another export.path, or "
            "without it: each run has a folder of its own."
        )
