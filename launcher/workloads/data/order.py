"""In which order each data-parallel replica reads the blocks.

A pure function of (seed, epoch): all pipeline stages of a replica must see the same batch, whatever
their global generators have gone through.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from launcher.workloads.seeds import derived_seed


class ReplicaOrder(DistributedSampler[int]):
    """Block indices of one replica for one epoch at a time.

    Step by step the epoch's order is dealt out in shares of ``batch_size``, so the replicas are
    disjoint, and what a step sees as a whole depends on its global batch size only, not on how
    that is divided. Being a DistributedSampler keeps Lightning from putting its own around it.

    Args:
        num_blocks: Size of the dataset.
        batch_size: Blocks per batch of one replica.
        num_replicas: Data-parallel replicas.
        replica: Which one this is.
        seed: Of the whole run.
        shuffle: Whether epochs are permuted, each differently.
        full_batches: Leaves out the blocks that fill no batch on every replica. Otherwise they are
            shared evenly as one smaller batch, and fewer than ``num_replicas`` are left out.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        batch_size: int,
        num_replicas: int = 1,
        replica: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        full_batches: bool = True,
    ) -> None:
        super().__init__(
            range(num_blocks),  # type: ignore[arg-type]  # it asks for the length only
            num_replicas=num_replicas,
            rank=replica,
            shuffle=shuffle,
            seed=seed,
            drop_last=full_batches,
        )
        self._num_blocks = num_blocks
        self._batch_size = batch_size
        self._resumed = (0, 0)

    def __len__(self) -> int:
        """Blocks per replica in a whole epoch, also in one that was resumed in its middle."""
        return self._share(self._num_blocks)

    def __iter__(self) -> Iterator[int]:
        order = self._epoch_order()[self.num_blocks_skipped :]
        step = self._batch_size * self.num_replicas
        num_full = len(order) // step
        dealt = order[: num_full * step].view(num_full, self.num_replicas, self._batch_size)
        yield from dealt[:, self.rank].flatten().tolist()
        rest = self._share(len(order)) - num_full * self._batch_size
        start = num_full * step + self.rank * rest
        yield from order[start : start + rest].tolist()

    def resume(self, *, epoch: int, num_blocks_done: int) -> None:
        """Leaves out the first ``num_blocks_done`` blocks (of all replicas) of ``epoch``."""
        self._resumed = (epoch, num_blocks_done)

    @property
    def num_blocks_skipped(self) -> int:
        """Blocks of all replicas that the current epoch leaves out since it was resumed."""
        epoch, num_blocks_done = self._resumed
        return num_blocks_done if epoch == self.epoch else 0

    def _share(self, num_blocks: int) -> int:
        if self.drop_last:
            return num_blocks // (self._batch_size * self.num_replicas) * self._batch_size
        return num_blocks // self.num_replicas

    def _epoch_order(self) -> Tensor:
        if not self.shuffle:
            return torch.arange(self._num_blocks)
        generator = torch.Generator().manual_seed(derived_seed(self.seed, f"order/{self.epoch}"))
        return torch.randperm(self._num_blocks, generator=generator)
