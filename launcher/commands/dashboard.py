"""``mode=dashboard``: the workspace of the repository, saved in a W&B project."""

from __future__ import annotations

from launcher.config import LaunchConfig
from launcher.dashboard.push import find_account, push
from launcher.terminal import say


def run(config: LaunchConfig) -> int:
    """Pushes it; leaves no run folder.

    Raises:
        PlanError: No key is set up.
        RunError: The server cannot be reached, or refuses.
    """
    account = find_account()
    address = push(account, project=config.tracking.project, entity=config.tracking.entity)
    say(f"dashboard: {address}")
    return 0
