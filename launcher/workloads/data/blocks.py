"""Blocks of a token stream as (tokens, targets) pairs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from launcher.workloads.data.token_file import Tokens
from strategies.errors import DataError


class TokenBlocks(Dataset[dict[str, Tensor]]):
    """Consecutive, non-overlapping sequences of a stream.

    Args:
        tokens: The whole stream, maybe memory-mapped.
        blocks: Which blocks belong to this dataset.
        sequence: Tokens per block.
        vocab: Vocabulary of the model; None leaves ids unchecked.
    """

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
        """``tokens`` and, one token later, ``targets``, both int64 ``[sequence]``.

        Raises:
            DataError: An id beyond the vocabulary.
        """
        start = self._blocks[index] * self._sequence
        ids = self._tokens[start : start + self._sequence + 1]
        check_ids(ids, vocab=self._vocab)
        # One copy for both: they overlap but for one token, and batching copies them anyway.
        piece = torch.from_numpy(ids.astype(np.int64))
        return {"tokens": piece[:-1], "targets": piece[1:]}


def check_ids(ids: Tokens, *, vocab: int | None) -> None:
    """Refuses ids that an embedding of ``vocab`` rows cannot look up.

    Raises:
        DataError: An id beyond the vocabulary.
    """
    if vocab is not None and len(ids) and (largest := int(ids.max())) >= vocab:
        raise DataError(
            f"the data has a token id {largest}, but model.vocab={vocab} allows 0 to {vocab - 1}. "
            "Try model.vocab=null, which asks the data, or the data.tokenizer of this model."
        )
