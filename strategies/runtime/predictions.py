"""Predictions of microbatches, as one batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strategies.ir.placement import Placement


def in_order(placement: Placement, gathered: list[list[Any]]) -> list[Any]:
    """Microbatches' results in order, from those of each owner of the last stage."""
    last = placement.num_stages - 1
    queues = dict(zip(placement.owners(last), map(iter, gathered), strict=True))
    return [
        next(queues[placement.rank_of(last, microbatch)])
        for microbatch in range(sum(map(len, gathered)))
    ]


def concatenate(results: list[Any]) -> Any:
    """Predictions of the microbatches as one batch; lists stay lists."""
    if results and all(isinstance(item, Tensor) and item.dim() > 0 for item in results):
        return torch.cat([item.cpu() for item in results])
    if not results or all(item is None for item in results):
        return None
    if len(results) == 1:
        return results[0]
    if all(isinstance(item, dict) for item in results):
        return {key: concatenate([item[key] for item in results]) for key in results[0]}
    if all(isinstance(item, tuple) for item in results):
        return tuple(concatenate(list(column)) for column in zip(*results, strict=True))
    return results
