"""Which forwards keep only their input and are run again before their backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from strategies.errors import PlanError

Policy = Literal["none", "full", "selective", "mario", "optimal"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

NUM_PASSES = 4


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
    """

    policy: Policy = "none"
    passes: int = NUM_PASSES
    max_full_activations: float | None = None

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

    @property
    def rewrites(self) -> bool:
        """Whether programs have R instructions."""
        return self.policy in ("full", "mario", "optimal")


NO_RECOMPUTE = Recompute()
