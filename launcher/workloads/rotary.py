"""Rotary position embedding: queries and keys are turned by their position."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10_000.0


def rotary_constants(like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines for the positions and the head size of ``like``.

    They are computed anew in every unit, which costs less than shipping or keeping them, and leaves
    nothing to restore when a unit is built on the meta device.

    Args:
        like: Queries ``[batch, heads, sequence, head size]``, head size even.

    Returns:
        Two tensors ``[sequence, head size]`` in the dtype of ``like``, worked out in at least
        float32.
    """
    sequence, size = like.shape[-2:]
    dtype = torch.promote_types(like.dtype, torch.float32)
    exponents = torch.arange(0, size, 2, dtype=dtype, device=like.device) / size
    positions = torch.arange(sequence, dtype=dtype, device=like.device)
    half = positions[:, None] * BASE ** (-exponents)
    angles = torch.cat((half, half), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns ``heads`` ``[batch, heads, sequence, head size]``.

    Dimension i is paired with i + size/2 (not with i + 1), as in published LLaMA checkpoints for
    the transformers library, so weights need no permutation to be exchanged.
    """
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines
