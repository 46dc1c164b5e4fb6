"""Builds the optimizer and its learning-rate schedule for whatever parameters a rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from launcher.config.workload import OptimizerConfig


def build_optimizer(parameters: Iterable[nn.Parameter], options: OptimizerConfig) -> Optimizer:
    """An optimizer with two groups: with weight decay (two or more dimensions) and without.

    Both groups always exist, maybe empty: ranks whose stage lacks a kind, or has no parameter at
    all, then keep the same group indices as the others, and torch accepts an optimizer of empty
    groups but not of none.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum or 0.0)
    kind = torch.optim.AdamW if options.name == "adamw" else torch.optim.Adam
    betas, eps = options.betas or (0.9, 0.95), options.eps or 1e-8
    return kind(groups, lr=options.lr, betas=betas, eps=eps)


def build_scheduler(
    optimizer: Optimizer, options: OptimizerConfig, *, total_steps: float
) -> LambdaLR:
    """Linear warm-up, then cosine or constant; to be stepped once per optimizer step."""
    return LambdaLR(optimizer, partial(lr_factor, options=options, total_steps=total_steps))


def lr_factor(step: int, *, options: OptimizerConfig, total_steps: float) -> float:
    """The learning rate of ``step`` (from 0) over ``options.lr``.

    Step 0 already moves, by ``lr / warmup_steps``. In a run without end (``total_steps=inf``) the
    cosine never begins to fall.
    """
    if step < options.warmup_steps:
        return (step + 1) / options.warmup_steps
    if options.schedule == "constant" or math.isinf(total_steps):
        return 1.0
    falling = max(1.0, total_steps - options.warmup_steps)
    done = min(1.0, (step - options.warmup_steps) / falling)
    low = options.min_lr_ratio
    return low + (1 - low) * (1 + math.cos(math.pi * done)) / 2
