"""Keys of recomputation: which forwards keep their input only, and are run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from launcher.config.key import key
from strategies.errors import PlanError
from strategies.recompute import FAMILIES, NUM_PASSES, Family, Recompute


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
    layers: tuple[str, ...] = key(
        (),
        "selective: types of layers and what is recomputed in them (attention, norm, activation, "
        "matmul, or none), joined by +; in others all but matmul.",
        example=["Mlp:activation", "Attention:attention+norm", "Head:none"],
    )


def recompute_policy(config: RecomputeConfig) -> Recompute:
    """``recompute.*`` as the compiler's type.

    Raises:
        PlanError: A key that the policy would ignore, or a value out of range.
    """
    layers = tuple(map(_layer, config.layers))
    return Recompute(config.name, config.passes, config.max_full_activations, layers)


def _layer(entry: str) -> tuple[str, tuple[Family, ...]]:
    name, colon, families = entry.partition(":")
    if not name or not colon or not families:
        raise PlanError(
            f"recompute.layers=[{entry}]: an entry is a type of layers, a colon, and what is "
            "recomputed in them. Try recompute.layers=[Mlp:activation]."
        )
    if families == "none":
        return name, ()
    found = families.split("+")
    for family in found:
        if family not in FAMILIES:
            raise PlanError(
                f"recompute.layers=[{entry}]: {family} is none of {', '.join(FAMILIES)}, none. "
                f"Try recompute.layers=[{name}:{'+'.join(FAMILIES[1:])}]."
            )
    return name, cast(tuple[Family, ...], tuple(found))
