"""State of weights that are cut, as checkpoints have it: boxes of the uncut module's tensors.

A checkpoint says nothing about how many ranks shared a matrix or a layer's experts, and loads at
any number. Padding is never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor

from strategies.errors import CheckpointError
from strategies.models.tensor_parallel.tensor_ranks import Grid, Shard
from strategies.runtime.storage.part import Piece

_Whole = TypeVar("_Whole", bound=Tensor)


class Shares:
    """What one of the ranks that share matrices writes and reads.

    A name that ``shards`` and ``experts`` lack is whole on every rank; one that ``holders`` lacks,
    the global ranks that hold the same share of each, is written by the first replica, and an
    expert by the first who has it.
    """

    def __init__(
        self,
        shards: Mapping[str, Shard],
        rank: int,
        holders: Mapping[str, tuple[int, ...]],
        *,
        first_replica: bool,
        experts: Mapping[str, Shard | Grid] | None = None,
        expert_rank: int = 0,
        first_experts: bool = True,
    ) -> None:
        self._experts = experts or {}
        self._shards: dict[str, Shard | Grid] = {**shards, **self._experts}
        self._rank = rank
        self._expert_rank = expert_rank
        self._holders = holders
        self._first_replica = first_replica
        self._first_experts = first_experts

    def pieces(self, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """A module's state for a checkpoint; other replicas lack what the first one writes."""
        return {
            name: self._box(name, value) if name in self._shards else value
            for name, value in state.items()
            if self._writes(name)
        }

    def pieces_of_whole(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The same from whole tensors."""
        return self.pieces(
            {
                name: self._shards[name].local(value, self._rank_for(name))
                if name in self._shards
                else value
                for name, value in state.items()
            }
        )

    def optimizer_pieces(
        self, named: Mapping[str, Any], parameters: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """The same for an optimizer's state by parameter names.

        Raises:
            CheckpointError: State of a cut weight has neither its shape nor a single value.
        """
        state = {
            name: {
                key: self._box(name, value)
                if name in self._shards and _follows(name, key, value, parameters[name])
                else value
                for key, value in entry.items()
            }
            for name, entry in named["state"].items()
            if self._writes(name)
        }
        return {**named, "state": state}

    def boxes(self, state: Mapping[str, _Whole]) -> dict[str, _Whole | Piece]:
        """What this rank wants of a checkpoint."""
        return {
            name: self._box(name, value) if name in self._shards else value
            for name, value in state.items()
        }

    def padded(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A module's state as this rank has it, from what it has read."""
        return {
            name: self._shards[name].padded(value, self._rank_for(name))
            if name in self._shards
            else value
            for name, value in state.items()
        }

    def padded_optimizer(
        self, saved: Mapping[str, Any], parameters: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """The same for an optimizer's state by parameter names."""

        def own(name: str, value: Any) -> Any:
            shard = self._shards.get(name)
            if shard is None or not isinstance(value, Tensor):
                return value
            rank = self._rank_for(name)
            held = shard.unpadded(parameters[name], rank).shape
            return shard.padded(value, rank) if value.shape == held else value

        state = {
            name: {key: own(name, value) for key, value in entry.items()}
            for name, entry in saved["state"].items()
        }
        return {**saved, "state": state}

    def _writes(self, name: str) -> bool:
        first = self._first_experts if name in self._experts else self._first_replica
        return name not in self._shards or name in self._holders or first

    def _rank_for(self, name: str) -> int:
        return self._expert_rank if name in self._experts else self._rank

    def _box(self, name: str, share: Tensor) -> Piece:
        shard = self._shards[name]
        rank = self._rank_for(name)
        shape, offsets = shard.box(share, rank)
        held = shard.unpadded(share.detach(), rank)
        strips = None
        if isinstance(shard, Shard) and shard.segments > 1:
            strips = (shard.dim, shard.segments)
        return Piece(held, shape, offsets, self._holders.get(name), strips)


def _follows(name: str, key: str, value: Any, share: Tensor) -> bool:
    single = isinstance(value, Tensor) and value.numel() == 1 != share.numel()
    if not isinstance(value, Tensor) or value.dim() == 0 or single:
        return False
    if value.shape == share.shape:
        return True
    raise CheckpointError(
        f"the optimizer's {key} of {name} has shape {tuple(value.shape)}, the rank's share of the "
        f"weight {tuple(share.shape)}: it cannot be put together for a checkpoint. Use an "
        "optimizer whose state has the weights' shapes (Adam, SGD), or tp=1."
    )
