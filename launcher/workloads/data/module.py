"""The Lightning data module for text, and in which order each data-parallel replica reads blocks.

That order is a pure function of (seed, epoch): all pipeline stages of a replica must see the same
batch, whatever their global generators have gone through.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from launcher.workloads.data.source import DEFAULT_SOURCE, Split, TextSource, split_blocks
from launcher.workloads.data.tokens import Tokens, load_tokens
from launcher.workloads.transformer import derived_seed
from strategies.errors import DataError

_CHECKED_IDS = 1 << 24


class TextDataModule(pl.LightningDataModule):
    """Batches ``{"tokens", "targets"}`` of int64 ``[batch_size, sequence]`` from one text.

    The order depends on ``seed`` and the epoch alone. Replicas are told apart by the strategy's
    ``distributed_sampler_kwargs``, so all stages of one pipeline get the same batches. Validation,
    test and prediction read the same part, the end of the text, in its order.

    Args:
        source: Where the text comes from.
        sequence: Tokens per sequence.
        batch_size: Sequences per batch of one data-parallel replica.
        seed: Of the order.
        val_fraction: Share of the sequences that is kept from training.
        num_workers: Loader processes; slicing an array in memory gains nothing from them.
        full_batches: Leaves out a last, smaller batch. Training always does.
        vocab: Vocabulary of the model; ids beyond it are refused before training starts.
    """

    def __init__(
        self,
        source: TextSource = DEFAULT_SOURCE,
        *,
        sequence: int,
        batch_size: int,
        seed: int = 0,
        val_fraction: float = 0.1,
        num_workers: int = 0,
        full_batches: bool = True,
        vocab: int | None = None,
    ) -> None:
        super().__init__()
        self.source = source
        self.sequence = sequence
        self.batch_size = batch_size
        self.seed = seed
        self.val_fraction = val_fraction
        self.num_workers = num_workers
        self.full_batches = full_batches
        self.vocab = vocab
        self._tokens: Tokens | None = None

    def setup(self, stage: str) -> None:
        """Reads the tokens once.

        Raises:
            DataError: The text is missing, too short, or has ids beyond the model's vocabulary.
        """
        if self._tokens is not None:
            return
        tokens = load_tokens(self.source)
        self._split(len(tokens))
        # A mapped file may be larger than memory; its other blocks are checked when they are read.
        check_ids(tokens[:_CHECKED_IDS], vocab=self.vocab)
        self._tokens = tokens

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Shuffled anew in each epoch; resumes where a checkpoint was written."""
        return self._loader(train=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]] | list[Any]:
        """The end of the text, in order; nothing with ``val_fraction=0``."""
        return self._loader(train=False) if self.val_fraction else []

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]] | list[Any]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[dict[str, Tensor]] | list[Any]:
        return self.val_dataloader()

    def _loader(self, *, train: bool) -> DataLoader[dict[str, Tensor]]:
        assert self._tokens is not None, "setup() comes first"
        split = self._split(len(self._tokens))
        blocks = TokenBlocks(
            self._tokens,
            split.train if train else split.validation,
            sequence=self.sequence,
            vocab=self.vocab,
        )
        num_replicas, replica = self._coordinate()
        order = ReplicaOrder(
            len(blocks),
            batch_size=self.batch_size,
            num_replicas=num_replicas,
            replica=replica,
            seed=self.seed,
            shuffle=train,
            full_batches=train or self.full_batches,
        )
        kind = ResumableLoader if train else DataLoader
        return kind(
            blocks,
            batch_size=self.batch_size,
            sampler=order,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            # Copies to a GPU may wait for the device's work otherwise.
            pin_memory=self.trainer is not None
            and self.trainer.strategy.root_device.type == "cuda",
            # Without one, each epoch's start would draw from the global generator.
            generator=torch.Generator().manual_seed(derived_seed(self.seed, "workers")),
        )

    def _coordinate(self) -> tuple[int, int]:
        """Number of data-parallel replicas, and which one this process belongs to."""
        known = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (1, 0) if known is None else (known["num_replicas"], known["rank"])

    def _split(self, num_tokens: int) -> Split:
        num_replicas, _ = self._coordinate()
        return split_blocks(
            num_tokens,
            sequence=self.sequence,
            batch_size=self.batch_size,
            num_replicas=num_replicas,
            val_fraction=self.val_fraction,
            full_batches=self.full_batches,
            label=self.source.label,
        )


class ReplicaOrder(DistributedSampler[int]):
    """Block indices of one replica for one epoch at a time.

    Step by step the epoch's order is dealt out in shares of ``batch_size``, so the replicas are
    disjoint, and what a step sees as a whole depends on its global batch size only, not on how
    that is divided. Being a DistributedSampler keeps Lightning from putting its own around it.

    Without ``full_batches``, the blocks that fill no batch on every replica are not left out but
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


class TokenBlocks(Dataset[dict[str, Tensor]]):
    """Consecutive, non-overlapping sequences of a stream; without ``vocab`` ids stay unchecked."""

    def __init__(
        self, tokens: Tokens, blocks: range, *, sequence: int, vocab: int | None = None
    ) -> None:
        self._tokens = tokens
        self._blocks = blocks
        self._sequence = sequence
        self._vocab = vocab

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``tokens`` and, one token later, ``targets``, both int64 ``[sequence]``."""
        start = self._blocks[index] * self._sequence
        ids = self._tokens[start : start + self._sequence + 1]
        check_ids(ids, vocab=self._vocab)
        # One copy for both: they overlap but for one token, and batching copies them anyway.
        piece = torch.from_numpy(ids.astype(np.int64))
        return {"tokens": piece[:-1], "targets": piece[1:]}


def check_ids(ids: Tokens, *, vocab: int | None) -> None:
    """Refuses ids that an embedding of ``vocab`` rows cannot look up."""
    if vocab is not None and len(ids) and (largest := int(ids.max())) >= vocab:
        raise DataError(
            f"the data has a token id {largest}, but model.vocab={vocab} allows 0 to {vocab - 1}. "
            "Try model.vocab=null, which asks the data, or the data.tokenizer of this model."
        )


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
        return {"epoch": self._epoch, "num_blocks_done": self._num_blocks_done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._epoch, self._num_blocks_done = state_dict["epoch"], state_dict["num_blocks_done"]
        if isinstance(self.sampler, ReplicaOrder):
            self.sampler.resume(epoch=self._epoch, num_blocks_done=self._num_blocks_done)
