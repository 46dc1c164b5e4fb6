"""Builds the optimizer and its learning-rate schedule for whatever parameters a rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from launcher.workloads.optimizer_options import OptimizerOptions, lr_factor


def build_optimizer(parameters: Iterable[nn.Parameter], options: OptimizerOptions) -> Optimizer:
    """An optimizer with two groups: with weight decay (two or more dimensions) and without.

    Both groups always exist, maybe empty: ranks whose stage lacks a kind, or has no parameter at
    all, then keep the same group indices as the others, and torch accepts an optimizer of empty
    groups but not of none.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {
            "params": [parameter for parameter in trained if parameter.dim() >= 2],
            "weight_decay": options.weight_decay,
        },
        {
            "params": [parameter for parameter in trained if parameter.dim() < 2],
            "weight_decay": 0.0,
        },
    ]
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum)
    kind = torch.optim.AdamW if options.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=options.lr, betas=options.betas, eps=options.eps)


def build_scheduler(
    optimizer: Optimizer, options: OptimizerOptions, *, total_steps: float
) -> LambdaLR:
    """Linear warm-up, then cosine or constant; to be stepped once per optimizer step."""
    return LambdaLR(optimizer, partial(lr_factor, options=options, total_steps=total_steps))
