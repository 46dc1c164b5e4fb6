"""What decides an optimizer and its learning rate. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from strategies.errors import PlanError

OptimizerName = Literal["adamw", "adam", "sgd"]
LearningRateSchedule = Literal["cosine", "constant"]


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """Update rule and learning rate per step.

    Attributes:
        name: Update rule; ``adamw`` decouples the weight decay from the gradient.
        lr: Peak learning rate.
        weight_decay: For parameters with two or more dimensions; the others get none.
        betas: Averaging factors of adamw and adam.
        eps: Term in the denominator of adamw and adam.
        momentum: Of sgd.
        warmup_steps: Steps of linear rise; step 0 already moves, by ``lr / warmup_steps``.
        schedule: What follows: a cosine down to ``min_lr_ratio * lr``, or a constant.
        min_lr_ratio: Final learning rate over ``lr``.

    Raises:
        PlanError: A value outside its range.
    """

    name: OptimizerName = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.0
    warmup_steps: int = 10
    schedule: LearningRateSchedule = "cosine"
    min_lr_ratio: float = 0.1

    def __post_init__(self) -> None:
        for key, words in (("name", OptimizerName), ("schedule", LearningRateSchedule)):
            value, known = getattr(self, key), get_args(words)
            if value not in known:
                raise PlanError(
                    f"optimizer.{key}={value} is unknown. "
                    f"Try {' or '.join(f'optimizer.{key}={word}' for word in known)}."
                )
        _check("lr", self.lr > 0, self.lr, "above 0", 1e-3)
        _check("weight_decay", self.weight_decay >= 0, self.weight_decay, "at least 0", 0.1)
        inside = all(0 <= beta < 1 for beta in self.betas)
        _check("betas", inside, list(self.betas), "both in [0, 1)", "[0.9,0.95]")
        _check("eps", self.eps > 0, self.eps, "above 0", 1e-8)
        _check("momentum", 0 <= self.momentum < 1, self.momentum, "in [0, 1)", 0.9)
        _check("warmup_steps", self.warmup_steps >= 0, self.warmup_steps, "at least 0", 10)
        _check("min_lr_ratio", 0 <= self.min_lr_ratio <= 1, self.min_lr_ratio, "in [0, 1]", 0.1)


def lr_factor(step: int, *, options: OptimizerOptions, total_steps: float) -> float:
    """The learning rate of ``step`` (from 0) over ``options.lr``.

    Args:
        step: Optimizer steps already taken.
        options: Warm-up and shape of the decay.
        total_steps: Steps of the whole run; ``inf`` for a run without end, where the cosine never
            begins to fall.
    """
    if step < options.warmup_steps:
        return (step + 1) / options.warmup_steps
    if options.schedule == "constant" or math.isinf(total_steps):
        return 1.0
    falling = max(1.0, total_steps - options.warmup_steps)
    done = min(1.0, (step - options.warmup_steps) / falling)
    low = options.min_lr_ratio
    return low + (1 - low) * (1 + math.cos(math.pi * done)) / 2


def _check(key: str, holds: bool, value: object, rule: str, example: object) -> None:
    if not holds:
        raise PlanError(f"optimizer.{key}={value} must be {rule}. Try optimizer.{key}={example}.")
