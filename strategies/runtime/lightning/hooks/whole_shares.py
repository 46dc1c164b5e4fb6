"""This rank's shares of matrices and experts as whole weights, while a hook looks at them.

A parameter stays the object that it is: for a while its data, and its gradient, are those of the
whole. Behind the hook the rank's share of them goes back to where it was.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from strategies.errors import ModelError
from strategies.models.tensor_parallel.tensor_ranks import Grid, Shard, is_cut
from strategies.runtime.engine.rank_engine import Engine


class WholeShares:
    """Parameters of which this rank has a share; empty where it has none."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._shards: dict[str, Shard | Grid] = {**engine.model.shards, **engine.model.experts}
        self._own = {
            name: parameter
            for name, parameter in engine.named_parameters().items()
            if is_cut(self._shards.get(name))
        }
        self.ids = {id(parameter) for parameter in self._own.values()}
        self._shares: dict[str, Tensor] = {}  # as they are without a hook
        self._gradients: dict[str, Tensor | None] = {}

    def refusal(self, share: Tensor, what: str, where: str) -> ModelError:
        """For code that takes a share for the whole, outside of hooks."""
        name = next(name for name, parameter in self._own.items() if parameter is share)
        degree = "ep" if name in self._engine.model.experts else "tp"
        return ModelError(
            f"{what} {name}, of which this rank has a share. Do that in {where}, which has all of "
            f"it, or use {degree}=1."
        )

    def by_shape(self, leaf: Any) -> Any:
        """A share as the whole, without values; anything else as it is."""
        name = next((name for name, parameter in self._own.items() if parameter is leaf), None)
        if name is None:
            return leaf
        shape = self._shards[name].box(leaf.detach(), 0)[0]
        return torch.empty(shape, dtype=leaf.dtype, device="meta")

    def bring(self) -> None:
        """Makes the weights whole; collective over the ranks that share them."""
        for name, parameter in self._own.items():
            self._shares[name] = parameter.data
            parameter.data = self._gathered(name, parameter.data)
        self._engine.model.compute_whole(True)

    def bring_gradients(self, graded: Collection[str]) -> None:
        """The same of gradients; ``graded`` has the names of those that any of these ranks has."""
        for name, parameter in self._own.items():
            if name in graded:
                share = self._gradients[name] = parameter.grad
                if share is None:
                    share = torch.zeros_like(self._shares[name])
                parameter.grad = self._gathered(name, share)

    def part(self) -> None:
        """Takes over this rank's share of what a hook has made of the wholes."""
        if not self._shares:
            return
        self._engine.model.compute_whole(False)
        for name, parameter in self._own.items():
            share, gradient = self._shares[name], parameter.grad
            share.copy_(self._local(name, parameter.data))
            if name in self._gradients and gradient is not None:
                own = self._gradients[name]
                local = self._local(name, gradient)
                gradient = local if own is None else own.copy_(local)
            parameter.grad = None
            parameter.data = share
            parameter.grad = gradient
        self._shares.clear()
        self._gradients.clear()

    def _gathered(self, name: str, share: Tensor) -> Tensor:
        shard, ranks = self._shards[name], self._engine.tensor_ranks
        if name in self._engine.model.experts:
            assert self._engine.exchangers is not None
            return self._engine.exchangers.whole(share, shard)
        assert ranks is not None and isinstance(shard, Shard)
        return shard.whole(ranks.gather(share).unbind(0))

    def _local(self, name: str, whole: Tensor) -> Tensor:
        experts, where = self._engine.model.experts, self._engine.coordinates
        place = where.ep_rank if name in experts else where.tp_rank
        return self._shards[name].local(whole, place)
