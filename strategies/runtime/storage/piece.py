"""A box of a tensor: what one process holds, writes or wants of it.

The unit in which checkpoints are written and read. A whole tensor, a tensor-parallel shard and a
share of a sharded optimizer are all boxes, so a checkpoint of any layout loads into any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one tensor.

    Attributes:
        tensor: Its values, local and plain.
        global_shape: Shape of the whole tensor.
        offsets: Where the box begins, an index per dimension.
        holders: Global ranks that all hold this same box and that all say so with the same tuple;
            one of them writes it. None: this process writes it.
    """

    tensor: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    holders: tuple[int, ...] | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Extent of the box per dimension."""
        return tuple(self.tensor.shape)

    @property
    def num_bytes(self) -> int:
        """What it takes on disk."""
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The box in the words of torch.distributed.checkpoint."""
        return ChunkStorageMetadata(
            offsets=torch.Size(self.offsets), sizes=torch.Size(self.tensor.shape)
        )


def as_piece(value: Tensor | Piece, holders: tuple[int, ...] | None = None) -> Piece:
    """What this process holds of a tensor: all of a plain one, its shard of a DTensor.

    Args:
        value: A piece stays as it is.
        holders: See ``Piece``; for tensors only.
    """
    if isinstance(value, Piece):
        return value
    if isinstance(value, DTensor):
        _, offsets = compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )
        local = value.to_local().detach()
        return Piece(local, tuple(value.shape), tuple(offsets), holders)
    return Piece(value.detach(), tuple(value.shape), (0,) * value.dim(), holders)


def like(value: Tensor, local: Tensor) -> Tensor:
    """``local`` in the form of ``value``: a DTensor if that is one."""
    if isinstance(value, DTensor):
        return DTensor.from_local(
            local,
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    return local


def own_share(pieces: Mapping[str, Piece], rank: int) -> dict[str, Piece]:
    """Those of its pieces that a rank writes, so that all holders write about equally much.

    Without a message: all holders of a box hold the same boxes, so all find the same answer. The
    largest goes first, to whoever has least.

    >>> def piece(size):
    ...     return Piece(torch.zeros(size), (size,), (0,), holders=(4, 5))
    >>> held = {"a": piece(5), "b": piece(3), "c": piece(2)}
    >>> sorted(own_share(held, 4)), sorted(own_share(held, 5))
    (['a'], ['b', 'c'])
    """
    load: dict[tuple[int, ...], dict[int, int]] = {}
    mine: set[str] = set()
    for name in sorted(pieces, key=lambda name: (-pieces[name].num_bytes, name)):
        holders = pieces[name].holders
        if holders is None:
            mine.add(name)
            continue
        loads = load.setdefault(holders, dict.fromkeys(holders, 0))
        writer = min(holders, key=lambda holder: (loads[holder], holder))
        loads[writer] += pieces[name].num_bytes
        if writer == rank:
            mine.add(name)
    return {name: piece for name, piece in pieces.items() if name in mine and _holds(piece)}


def _holds(piece: Piece) -> bool:
    """An uneven shard may be empty; an empty tensor is still written."""
    return piece.tensor.numel() > 0 or 0 in piece.global_shape
