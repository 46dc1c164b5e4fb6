"""Which forwards keep only their input and are run again before their backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from strategies.errors import PlanError

Policy = Literal["none", "full", "selective", "mario", "optimal"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

NUM_PASSES = 4

Family = Literal["matmul", "attention", "norm", "activation"]
FAMILIES: tuple[Family, ...] = get_args(Family)


@dataclass(frozen=True, slots=True)
class Recompute:
    """What ``recompute=`` asks for.

    Attributes:
        policy: ``none``: nothing; ``full``: every forward, right before its backward;
            ``selective``: inside the layers only, no R in the program; ``mario``: every forward,
            moved into idle time (``passes``); ``optimal``: as many forwards as the memory demands,
            and those that cost least.
        passes: For ``mario``, how many of its passes run: 1 apply-checkpoint, 2 overlap-recompute,
            3 remove-redundancy, 4 prepose-forward.
        max_full_activations: For ``optimal``, how many full activations a rank may hold, in
            full-rank microbatches; None for what fits into the rank's memory.
        layers: For ``selective``, type names of layers and what is recomputed in them; elsewhere
            it is everything but ``matmul``, products with weights. ``attention`` is its core,
            ``activation`` all that is cheap: elementwise operations, dropout.
    """

    policy: Policy = "none"
    passes: int = NUM_PASSES
    max_full_activations: float | None = None
    layers: tuple[tuple[str, tuple[Family, ...]], ...] = ()

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise PlanError(
                f"recompute={self.policy} is unknown. Try recompute="
                f"{' or recompute='.join(POLICIES)}."
            )
        if not 1 <= self.passes <= NUM_PASSES:
            raise PlanError(
                f"recompute.passes={self.passes}: there are {NUM_PASSES}, applied in order. Try "
                f"recompute.passes={NUM_PASSES}."
            )
        if self.passes != NUM_PASSES and self.policy != "mario":
            raise PlanError(
                f"recompute.passes={self.passes} are the passes of recompute=mario, but "
                f"recompute={self.policy}. Try recompute=mario recompute.passes={self.passes}."
            )
        self._check_layers()
        cap = self.max_full_activations
        if cap is None:
            return
        if self.policy != "optimal":
            raise PlanError(
                f"recompute.max_full_activations={cap:g} is the cap of recompute=optimal, but "
                f"recompute={self.policy}. Try recompute=optimal "
                f"recompute.max_full_activations={cap:g}."
            )
        if not cap > 0:
            raise PlanError(
                f"recompute.max_full_activations={cap:g}: a backward needs one full activation. "
                "Try recompute.max_full_activations=1."
            )

    def _check_layers(self) -> None:
        if self.layers and self.policy != "selective":
            name = self.layers[0][0]
            raise PlanError(
                f"recompute.layers=[{name}:...] says what recompute=selective does in a layer, but "
                f"recompute={self.policy}. Try recompute=selective, or leave recompute.layers out."
            )
        for name, families in self.layers:
            for family in families:
                if family not in FAMILIES:
                    raise PlanError(
                        f"recompute.layers=[{name}:{family}]: {family} is none of "
                        f"{', '.join(FAMILIES)}. Try recompute.layers=[{name}:activation]."
                    )

    @property
    def rewrites(self) -> bool:
        """Whether programs have R instructions."""
        return self.policy in ("full", "mario", "optimal")


NO_RECOMPUTE = Recompute()
