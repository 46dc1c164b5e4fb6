"""Cutting a batch into microbatches, and telling whether two ranks hold the same batch."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from strategies.errors import DataError
from strategies.ir.placement import Placement
from strategies.models.state import Fetch

_SAMPLE = 65_536


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A share of one rank's batch."""

    data: Any  # as the user's loader made it, tensors cut along dimension 0
    share: float  # its rows over the batch's rows
    # Shapes and types of its tensors; equal signatures give equal boundary shapes.
    signature: tuple[tuple[tuple[int, ...], torch.dtype], ...]


def split_batch(batch: Any, num_microbatches: int) -> list[Microbatch]:
    """At most ``num_microbatches`` shares whose rows differ by at most one (fewer if rows lack).

    Tensors whose dimension 0 is the batch are cut; everything else is the same in every share.

    Raises:
        DataError: The batch holds no tensor with a batch dimension.
    """
    rows = count_rows(batch)
    count = min(num_microbatches, rows)
    bounds = [rows * index // count for index in range(count + 1)]
    # The longer shares come first, as torch.tensor_split has them.
    sizes = sorted((high - low for low, high in pairwise(bounds)))[::-1]
    shares = []
    start = 0
    for size in sizes:
        data = _cut(batch, rows, start, size)
        shares.append(Microbatch(data, size / rows, signature(data)))
        start += size
    return shares


def count_rows(batch: Any) -> int:
    """Rows of a batch: the size that most of its tensors have in dimension 0.

    Raises:
        DataError: No tensor has rows, or two sizes are equally frequent.
    """
    sizes = Counter(tensor.shape[0] for tensor in list_tensors(batch) if tensor.dim() > 0)
    (rows, votes), *others = sizes.most_common() or [(0, 0)]
    if rows == 0:
        raise DataError(
            "the batch holds no tensor with rows in dimension 0, so it cannot be cut into "
            "microbatches. Return tensors, or a tuple, list or dict of them, from the data loader."
        )
    if others and others[0][1] == votes:
        raise DataError(
            f"the batch's tensors have {rows} and {others[0][0]} rows in dimension 0, so it is not "
            "clear which is the batch. Give all tensors of a batch the batch's rows first."
        )
    return rows


def _cut(value: Any, rows: int, start: int, size: int) -> Any:
    """Tensors, and lists and tuples of other things, of the batch's length are cut."""
    if isinstance(value, Tensor):
        whole = value.dim() == 0 or value.shape[0] != rows
        return value if whole else value[start : start + size]
    if isinstance(value, Mapping):
        parts = {key: _cut(item, rows, start, size) for key, item in value.items()}
        return parts if type(value) is dict else _like(value, parts)
    if isinstance(value, list | tuple) and not list_tensors(value) and len(value) == rows:
        return value[start : start + size]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(item, rows, start, size) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_cut(item, rows, start, size) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        changes = {
            f.name: _cut(getattr(value, f.name), rows, start, size) for f in fields(value) if f.init
        }
        return replace(value, **changes)
    return value


def _like(value: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    """A mapping of the same type (transformers' BatchEncoding, say) with other values."""
    result = copy(value)
    for key, part in parts.items():
        result[key] = part  # type: ignore[index]
    return result


def list_tensors(batch: Any) -> list[Tensor]:
    """All tensors of a nested batch, in a fixed order."""
    found: list[Tensor] = []
    apply_to_collection(batch, Tensor, found.append)
    return found


def signature(batch: Any) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in list_tensors(batch))


def checksum(batch: Any) -> int:
    """32 bits of a batch: equal batches have equal ones; of huge tensors a sample counts."""
    return start_checksum(batch)()


def start_checksum(batch: Any) -> Callable[[], int]:
    """What gives the checksum later, of the batch as it is now; waits for no device until then."""
    tensors = list_tensors(batch)
    if not any(tensor.is_cuda for tensor in tensors):
        value = _checksum([(tuple(tensor.shape), _sample(tensor)) for tensor in tensors])
        return lambda: value
    samples = [(tuple(tensor.shape), Fetch(_sample(tensor))) for tensor in tensors]
    return lambda: _checksum([(shape, sample.tensor()) for shape, sample in samples])


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.numel() > _SAMPLE:
        flat = flat[:: flat.numel() // _SAMPLE]
    return flat.contiguous()


def _checksum(samples: Sequence[tuple[tuple[int, ...], Tensor]]) -> int:
    value = 0
    for shape, flat in samples:
        data = flat.cpu().view(torch.uint8) if flat.numel() else flat
        value = zlib.crc32(repr(shape).encode(), value)
        value = zlib.crc32(data.numpy().tobytes(), value)
    return value


def in_order(placement: Placement, gathered: list[list[Any]]) -> list[Any]:
    """Microbatches' results in order, from those of each owner of the last stage."""
    last = placement.num_stages - 1
    queues = dict(zip(placement.owners(last), map(iter, gathered), strict=True))
    return [
        next(queues[placement.rank_of(last, microbatch)])
        for microbatch in range(sum(map(len, gathered)))
    ]


def concatenate(results: list[Any]) -> Any:
    if results and all(isinstance(item, Tensor) and item.dim() > 0 for item in results):
        return torch.cat([item.cpu() for item in results])
    if not results or all(item is None for item in results):
        return None
    if len(results) == 1:
        return results[0]
    if all(isinstance(item, dict) for item in results):
        return {key: concatenate([item[key] for item in results]) for key in results[0]}
    if all(isinstance(item, tuple) for item in results):
        return tuple(concatenate(list(column)) for column in zip(*results, strict=True))
    return results
