"""Keys of recomputation: which forwards keep their input only, and are run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.config.key import key
from strategies.recompute import NUM_PASSES, Recompute


@dataclass(frozen=True, slots=True)
class RecomputeConfig:
    """``recompute=``: which activations are computed again instead of being kept."""

    name: Literal["none", "full", "selective", "mario", "optimal"] = key(
        "none",
        "none; full: every forward, right before its backward; selective: inside the layers; "
        "mario: every forward, in the time in which ranks wait; optimal: no more than the memory "
        "demands, in an order made for it.",
    )
    passes: int = key(
        NUM_PASSES,
        "mario: how many of its passes run: 1 apply-checkpoint, 2 overlap-recompute, "
        "3 remove-redundancy, 4 prepose-forward.",
        low=1,
        high=NUM_PASSES,
    )
    max_full_activations: float | None = key(
        None,
        "optimal: full activations that a rank may hold, in full-rank microbatches; null = what "
        "hardware.memory_gb has room for.",
        above=0,
        example=1,
    )


def recompute_policy(config: RecomputeConfig) -> Recompute:
    """``recompute.*`` as the compiler's type.

    Raises:
        PlanError: A key that the policy would ignore, or a value out of range.
    """
    return Recompute(config.name, config.passes, config.max_full_activations)
