"""Recomputing inside layers: what matrix products give is kept, the rest is computed again."""

from strategies.runtime.selective.packed import Computed, Kept
from strategies.runtime.selective.policy import Selection
from strategies.runtime.selective.region import SelectiveLayer

__all__ = ["Computed", "Kept", "Selection", "SelectiveLayer"]
