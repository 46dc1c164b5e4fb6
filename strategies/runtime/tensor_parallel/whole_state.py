"""State of weights that are cut, as checkpoints have it: under the uncut module's names and shapes.

So a checkpoint says nothing about how many ranks shared a matrix, and loads at any number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from strategies.errors import CheckpointError
from strategies.runtime.tensor_parallel.ranks import TensorRanks
from strategies.runtime.tensor_parallel.shard import Shard

Shards = Mapping[str, Shard]


def gather_state(state: Mapping[str, Tensor], shards: Shards, ranks: TensorRanks) -> dict[str, Any]:
    """A module's state with whole tensors, in host memory where they are cut.

    Collective. The first of the ranks keeps them; the others, which write nothing, keep what they
    have.
    """
    return {
        name: _whole(tensor, shards[name], ranks) if name in shards else tensor
        for name, tensor in state.items()
    }


def gather_optimizer_state(
    named: Mapping[str, Any],
    shards: Shards,
    ranks: TensorRanks,
    *,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Any]:
    """The same for an optimizer's state by parameter names.

    Args:
        named: As ``name_optimizer_state`` gives it.
        shards: How weights are cut.
        ranks: Who has the other shares.
        shapes: Of the shares.

    Raises:
        CheckpointError: State of a cut weight has neither its shape nor a single value.
    """
    state = {
        name: {
            key: _whole(value, shards[name], ranks)
            if name in shards and _follows(name, key, value, shapes[name])
            else value
            for key, value in entry.items()
        }
        for name, entry in named["state"].items()
    }
    return {**named, "state": state}


def _whole(tensor: Tensor, shard: Shard, ranks: TensorRanks) -> Tensor:
    shares = ranks.gather(tensor.detach())
    return tensor if ranks.rank > 0 else shard.whole(shares.cpu().unbind(0))


def _follows(name: str, key: str, value: Any, shape: tuple[int, ...]) -> bool:
    if not isinstance(value, Tensor) or value.dim() == 0 or value.numel() == 1 != _count(shape):
        return False
    if tuple(value.shape) == shape:
        return True
    raise CheckpointError(
        f"the optimizer's {key} of {name} has shape {tuple(value.shape)}, the rank's share of the "
        f"weight {shape}: it cannot be put together for a checkpoint. Use an optimizer whose state "
        "has the weights' shapes (Adam, SGD), or tp=1."
    )


def _count(shape: tuple[int, ...]) -> int:
    size = 1
    for width in shape:
        size *= width
    return size


def take_shares(state: Mapping[str, Any], shards: Shards, rank: int) -> dict[str, Any]:
    """This rank's share of a module's whole state.

    Raises:
        CheckpointError: A tensor does not have the size that the model has.
    """
    return {
        name: _share(name, tensor, shards[name], rank) if name in shards else tensor
        for name, tensor in state.items()
    }


def take_optimizer_shares(saved: Mapping[str, Any], shards: Shards, rank: int) -> dict[str, Any]:
    """This rank's share of an optimizer's whole state by parameter names."""
    state = {
        name: {
            key: _share(f"{key} of {name}", value, shards[name], rank)
            if name in shards and isinstance(value, Tensor) and value.dim() > shards[name].dim
            else value
            for key, value in entry.items()
        }
        for name, entry in saved["state"].items()
    }
    return {**saved, "state": state}


def _share(name: str, whole: Tensor, shard: Shard, rank: int) -> Tensor:
    if whole.shape[shard.dim] != shard.size:
        raise CheckpointError(
            f"the checkpoint's {name} has {whole.shape[shard.dim]} along dimension {shard.dim}, "
            f"the model {shard.size}. Use the model it was written with."
        )
    return shard.local(whole, rank)
