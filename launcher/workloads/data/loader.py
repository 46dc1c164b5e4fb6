"""A DataLoader for training that can go on in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from launcher.workloads.data.order import ReplicaOrder


class ResumableLoader(DataLoader[dict[str, Tensor]]):
    """Batches in a ``ReplicaOrder``, with the position as state.

    Lightning saves and restores the state of such loaders by itself, from the first rank. That is
    enough: the position counts the sequences of all replicas together, so it holds on every rank,
    and under another number of replicas or another batch size, too. With ``overfit_batches``
    Lightning exchanges the sampler for a sequential one; then there is no position to keep.
    """

    # Class attributes, as Lightning copies a DataLoader by what its constructor takes.
    _epoch = 0
    _num_blocks_done = 0

    # torch declares its own iterator class; all that is used of one is that it iterates.
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """One epoch, or the rest of it after ``load_state_dict``."""
        order = self.sampler
        if not isinstance(order, ReplicaOrder):
            yield from super().__iter__()
            return
        self._epoch = order.epoch
        self._num_blocks_done = order.num_blocks_skipped
        per_step = (self.batch_size or 1) * order.num_replicas
        for batch in super().__iter__():
            # Counted when handed out: a checkpoint is written after the batch's step.
            self._num_blocks_done += per_step
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch has got."""
        return {"epoch": self._epoch, "num_blocks_done": self._num_blocks_done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on behind the sequences that were already handed out."""
        self._epoch, self._num_blocks_done = state_dict["epoch"], state_dict["num_blocks_done"]
        if isinstance(self.sampler, ReplicaOrder):
            self.sampler.resume(epoch=self._epoch, num_blocks_done=self._num_blocks_done)
