"""Cutting an ordinary LightningModule into stages: replay of the user's step with holes."""

from strategies.runtime.replay.model import ReplayModel

__all__ = ["ReplayModel"]
