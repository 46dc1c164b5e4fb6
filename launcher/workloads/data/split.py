"""Cuts a stream of tokens into blocks, and the blocks into training and validation. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from strategies.errors import DataError, PlanError


@dataclass(frozen=True, slots=True)
class Split:
    """Block indices of both parts; block i covers tokens ``i * sequence`` to one sequence further.

    Validation is the end of the stream, so both parts are contiguous text.
    """

    train: range
    validation: range


def split_blocks(
    num_tokens: int,
    *,
    sequence: int,
    batch_size: int = 1,
    num_replicas: int = 1,
    val_fraction: float = 0.1,
    full_batches: bool = True,
    label: str = "data",
) -> Split:
    """Divides the blocks of ``num_tokens`` tokens.

    The last token of each block's targets is the first of the next block's inputs, hence the one
    token that does not count.

    Args:
        num_tokens: Length of the stream.
        sequence: Tokens per block.
        batch_size: Blocks per batch and replica.
        num_replicas: Data-parallel replicas.
        val_fraction: Share of the blocks for validation, rounded, at least one unless 0.
        full_batches: Whether validation, too, needs one complete batch; training always does.
        label: How messages name the data.

    Raises:
        DataError: Too few tokens for one block, or too few blocks for one batch of either part.
        PlanError: ``val_fraction`` is not in [0, 1), or a count is below 1.
    """
    if not 0 <= val_fraction < 1:
        raise PlanError(
            f"data.val_fraction={val_fraction} is not in [0, 1). Try data.val_fraction=0.1."
        )
    for key, count in (("model.sequence", sequence), ("data.microbatch_size", batch_size)):
        if count < 1:
            raise PlanError(f"{key}={count} is below 1. Try {key}=1.")
    need = batch_size * num_replicas
    need_validation = (need if full_batches else num_replicas) if val_fraction else 0
    request = _Request(num_tokens, val_fraction, need, need_validation)
    train, validation = request.divide(sequence)
    if train < need or validation < need_validation:
        share = f"({batch_size} per replica * dp={num_replicas})"
        raise DataError(
            f"{label} has {request.explain(sequence, share)} {request.advise(sequence)}"
        )
    return Split(range(train), range(train, train + validation))


@dataclass(frozen=True, slots=True)
class _Request:
    """Everything but the length of a sequence, which is what an answer can vary."""

    num_tokens: int
    val_fraction: float
    need_train: int
    need_validation: int

    def divide(self, sequence: int) -> tuple[int, int]:
        """Training and validation blocks."""
        blocks = max(0, self.num_tokens - 1) // sequence
        validation = max(1, round(blocks * self.val_fraction)) if self.val_fraction else 0
        return blocks - min(validation, blocks), min(validation, blocks)

    def fits(self, sequence: int) -> bool:
        train, validation = self.divide(sequence)
        return train >= self.need_train and validation >= self.need_validation

    def explain(self, sequence: int, share: str) -> str:
        """What there is too little of."""
        train, validation = self.divide(sequence)
        if not train + validation:
            return (
                f"{max(self.num_tokens, 0)} tokens, but one sequence with its targets takes "
                f"model.sequence + 1 = {sequence + 1}."
            )
        if train < self.need_train:
            return (
                f"{train} training sequences of {sequence} tokens, but one step takes "
                f"{self.need_train} {share}."
            )
        return (
            f"{validation} validation sequences of {sequence} tokens (data.val_fraction="
            f"{self.val_fraction} of {train + validation}), but one batch takes "
            f"{self.need_validation} {share}."
        )

    def advise(self, sequence: int) -> str:
        """A value that does work, tried out before it is recommended."""
        train, validation = self.divide(sequence)
        if train >= self.need_train:
            wanted = math.ceil(100 * self.need_validation / (train + validation)) / 100
            if wanted < 1 and replace(self, val_fraction=wanted).fits(sequence):
                return f"Try data.val_fraction={wanted}."
        shorter = next((s for s in range(sequence - 1, 1, -1) if self.fits(s)), None)
        if shorter is not None:
            return f"Try model.sequence={shorter}, or a longer text."
        return "Try a longer text, or data=stdlib."
