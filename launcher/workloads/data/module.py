"""The Lightning data module for text."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from launcher.workloads.data.order import ReplicaOrder, ResumableLoader, TokenBlocks, check_ids
from launcher.workloads.data.source import DEFAULT_SOURCE, Split, TextSource, split_blocks
from launcher.workloads.data.tokens import Tokens, load_tokens
from launcher.workloads.initialisation import derived_seed

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
