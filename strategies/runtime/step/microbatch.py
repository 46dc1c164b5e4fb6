"""Cutting a batch into microbatches, and telling whether two ranks hold the same batch."""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from strategies.errors import DataError, ModelError
from strategies.ir.program import Placement
from strategies.models.state import Fetch

_SAMPLE = 65_536


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A share of one rank's batch."""

    data: Any  # as the user's loader made it, tensors cut along dimension 0
    share: float  # its rows over the batch's rows
    weight: float  # on its loss and its logged means; the same but for loss_over=tokens
    # Shapes and types of its tensors; equal signatures give equal boundary shapes.
    signature: tuple[tuple[tuple[int, ...], torch.dtype], ...]


def split_batch(
    batch: Any, num_microbatches: int, loaders: TreeSpec | None = None
) -> list[Microbatch]:
    """At most ``num_microbatches`` shares whose rows differ by at most one (fewer if rows lack).

    Tensors whose dimension 0 is the batch are cut; everything else is the same in every share.
    Where the batch holds one of each of several ``loaders``, each is cut by its own rows, and all
    into equal shares: a mean over the rows of one is then that over its shares.

    Raises:
        DataError: The batch holds no tensor with a batch dimension.
    """
    parts, spec = _parts(batch, loaders)
    sizes = [0 if part is None else count_rows(part) for part in parts]
    rows = [size for size in sizes if size]
    count = min(num_microbatches, min(rows))
    if len(set(rows)) > 1:
        count = max(n for n in range(1, count + 1) if all(size % n == 0 for size in rows))
    shares = [share_sizes(size, count) if size else [0] * count for size in sizes]
    cuts = [
        _deal(part, size, [_Range(*ends) for ends in pairwise(accumulate(share, initial=0))])
        for part, size, share in zip(parts, sizes, shares, strict=True)
    ]
    first = next(place for place, size in enumerate(sizes) if size)
    microbatches = []
    for *cut, rows_here in zip(*cuts, shares[first], strict=True):
        data = cut[0] if spec is None else tree_unflatten(cut, spec)
        share = rows_here / sizes[first]
        microbatches.append(Microbatch(data, share, share, signature(data)))
    return microbatches


def _parts(batch: Any, loaders: TreeSpec | None) -> tuple[list[Any], TreeSpec | None]:
    """The batches of several loaders; one that is through has None."""
    try:
        found = None if loaders is None else loaders.flatten_up_to(batch)
    except (ValueError, TypeError):  # A hook of the user's has made something else of them.
        found = None
    if found is None or all(part is None for part in found):
        return [batch], None
    return found, loaders


def share_sizes(rows: int, num_microbatches: int) -> list[int]:
    """Rows of each share; the longer ones come first, as ``torch.tensor_split`` has them."""
    count = min(num_microbatches, rows)
    bounds = [rows * index // count for index in range(count + 1)]
    return sorted((high - low for low, high in pairwise(bounds)), reverse=True)


def first_rows(batch: Any, count: int) -> Any:
    """A batch of the first rows of another."""
    return _deal(batch, count_rows(batch), [_Range(0, count)])[0]


def pick_rows(batch: Any, rows: Sequence[int]) -> Any:
    """A batch of these rows of another, in this order; one may come several times."""
    return _deal(batch, count_rows(batch), [_Picked(rows)])[0]


def count_rows(batch: Any, loaders: TreeSpec | None = None) -> int:
    """Rows of a batch: the size that most of its tensors have in dimension 0.

    A list with an entry per row (boxes of each image) counts as one tensor of its length. With
    several ``loaders``, those of the first one's batch.

    Raises:
        DataError: No tensor has rows, or two sizes are equally frequent.
    """
    batch = next(part for part in _parts(batch, loaders)[0] if part is not None)
    sizes = _sizes(batch)
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


def row_lists(batch: Any, loaders: TreeSpec | None = None) -> dict[str, Sequence[Any]]:
    """Lists of words or numbers that have as many entries as the batch has rows, not all equal.

    The keys are their places in the batch, as a user writes them.
    """
    rows = count_rows(batch, loaders)
    found: dict[str, Sequence[Any]] = {}

    def look(value: Any, place: str, top: bool = False) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                look(item, f"{place}[{key!r}]")
        elif isinstance(value, list | tuple):
            if len(value) == rows and all(isinstance(item, str | int | float) for item in value):
                if len({*value}) > 1:
                    found[place] = value
            elif top or not _has_an_entry_per_row(value, rows):
                for number, item in enumerate(value):
                    look(item, f"{place}[{number}]")

    look(batch, "batch", top=True)
    return found


def _sizes(batch: Any) -> Counter[int]:
    lists: list[Any] = []
    found = Counter(_lengths(_outside(batch, lists, top=True)))
    outside = set(found)
    for value in lists:
        per_row = len(value) in outside and _has_an_entry_per_row(value, len(value))
        found.update([len(value)] if per_row else _lengths(list_tensors(value)))
    return found


def _lengths(tensors: Iterable[Tensor]) -> Iterator[int]:
    return (tensor.shape[0] for tensor in tensors if tensor.dim() > 0)


def _outside(value: Any, lists: list[Any], *, top: bool = False) -> list[Tensor]:
    """Tensors that are in no list inside of a batch; those lists are noted."""
    if isinstance(value, Mapping):
        return [t for item in value.values() for t in _outside(item, lists)]
    if isinstance(value, list | tuple) and (top or hasattr(value, "_fields")):
        return [t for item in value for t in _outside(item, lists)]
    found = list_tensors(value)
    if isinstance(value, list | tuple) and found:
        lists.append(value)
        return []
    return found


def _has_an_entry_per_row(value: Any, rows: int) -> bool:
    """Whether a list with tensors has entries of rows, not columns of the whole batch.

    Columns have all rows each, and are alike or of unlike kinds; entries of rows have a length of
    their own.
    """
    if len(value) != rows or hasattr(value, "_fields") or len({type(item) for item in value}) > 1:
        return False
    leaves = [list_tensors(item) for item in value]
    lengths = {length for found in leaves for length in _lengths(found)}
    if rows not in lengths:
        return True
    shapes = {tuple(tuple(tensor.shape) for tensor in found) for found in leaves}
    if isinstance(value[0], Tensor):
        return len(shapes) > 1 and len({tuple(tensor.shape[1:]) for tensor in value}) == 1
    return len(shapes) > 1


class _Range:
    """Takes the items from one place up to another."""

    def __init__(self, start: int, stop: int) -> None:
        self._slice = slice(start, stop)

    def __call__(self, whole: Any) -> Any:
        return whole[self._slice]


class _Picked:
    """Takes some items of a tensor, a list or a tuple."""

    def __init__(self, places: Sequence[int]) -> None:
        self._places = places

    def __call__(self, whole: Any) -> Any:
        if isinstance(whole, Tensor):
            return whole[torch.tensor(self._places, device=whole.device)]
        return type(whole)(whole[place] for place in self._places)


def _deal(
    value: Any, rows: int, picks: Sequence[Callable[[Any], Any]], *, top: bool = True
) -> list[Any]:
    """What each of the picks takes of a batch: of its tensors, and of lists with as many items."""
    if isinstance(value, Tensor):
        if value.dim() == 0 or value.shape[0] != rows:
            return [value] * len(picks)
        return [pick(value) for pick in picks]
    if isinstance(value, Mapping):
        dealt = _columns(value.values(), rows, picks)
        parts = [dict(zip(value, part, strict=True)) for part in dealt]
        return parts if type(value) is dict else [_like(value, part) for part in parts]
    if isinstance(value, list | tuple):
        if not list_tensors(value) and len(value) == rows:
            return [pick(value) for pick in picks]
        if not top and _has_an_entry_per_row(value, rows):
            return [pick(value) for pick in picks]
        dealt = _columns(value, rows, picks)
        named = hasattr(value, "_fields")
        return [type(value)(*part) if named else type(value)(part) for part in dealt]
    if is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in fields(value) if f.init]
        dealt = _columns([getattr(value, name) for name in names], rows, picks)
        return [replace(value, **dict(zip(names, part, strict=True))) for part in dealt]
    return [value] * len(picks)


def _columns(
    values: Iterable[Any], rows: int, picks: Sequence[Callable[[Any], Any]]
) -> Iterable[Sequence[Any]]:
    """For each pick what it takes of all values."""
    columns = [_deal(value, rows, picks, top=False) for value in values]
    return zip(*columns, strict=True) if columns else [()] * len(picks)


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


def concatenate(results: Sequence[Any], rows: Sequence[int]) -> Any:
    """The prediction of a batch from those of its microbatches, which have so many ``rows``.

    Tensors and arrays are joined along dimension 0, lists and tuples with an item per row end to
    end, other containers item by item; what is the same in all microbatches is kept.

    Raises:
        ModelError: A value belongs to a microbatch as a whole.
    """
    first = results[0]
    if len(results) == 1:
        return first.cpu() if isinstance(first, Tensor) else first
    kind: Any = type(first)
    if any(type(item) is not kind for item in results):
        raise _cannot_join(results)
    if isinstance(first, Tensor) and first.dim() > 0:
        return torch.cat([item.cpu() for item in results])
    if kind.__module__ == "numpy" and getattr(first, "ndim", 0) > 0:
        return sys.modules["numpy"].concatenate(results)
    if isinstance(first, Mapping):
        return _join_mappings(results, rows)
    if is_dataclass(first):
        record = copy(first)
        for entry in fields(first):
            column = [getattr(item, entry.name) for item in results]
            object.__setattr__(record, entry.name, concatenate(column, rows))
        return record
    if isinstance(first, list | tuple):
        named = hasattr(first, "_fields")
        per_row = all(len(result) == size for result, size in zip(results, rows, strict=True))
        if per_row and not named and not all(map(_are_columns, results, rows)):
            return kind(item for result in results for item in result)
        if len({len(item) for item in results}) == 1:
            columns = [concatenate(column, rows) for column in zip(*results, strict=True)]
            return kind(*columns) if named else kind(columns)
        if not list_tensors(results):  # Of what was found in it, so many in this microbatch.
            return kind(item for result in results for item in result)
    elif all(_equal(first, item) for item in results):
        if kind is int and list(results) == list(rows):
            raise _cannot_join(results)  # Its length, of which the batch has another.
        return first
    raise _cannot_join(results)


def _are_columns(value: Any, rows: int) -> bool:
    """Whether a list holds what has a row for each of the batch's, or things of several kinds."""
    sizes = [_length(item) for item in value]
    several = len({type(item) for item in value}) > 1 and any(size is not None for size in sizes)
    return several or all(size == rows for size in sizes)


def _length(value: Any) -> int | None:
    if isinstance(value, list | tuple):
        return len(value)
    shape: Any = getattr(value, "shape", ())
    return int(shape[0]) if len(shape) else None


def _join_mappings(results: Sequence[Any], rows: Sequence[int]) -> Any:
    first = results[0]
    names = [list(item) for item in results]
    if all(set(keys) == set(names[0]) for keys in names):
        parts = {key: concatenate([item[key] for item in results], rows) for key in names[0]}
    elif len({key for keys in names for key in keys}) == sum(map(len, names)):
        parts = {key: item[key] for item in results for key in item}  # Keyed by row.
    else:
        raise _cannot_join(results)
    return parts if type(first) is dict else _like(first, parts)


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first.cpu(), second.cpu())
    try:
        return bool(first == second)
    except (RuntimeError, TypeError, ValueError):
        return False


def _cannot_join(results: Sequence[Any]) -> ModelError:
    kinds = ", ".join(dict.fromkeys(type(item).__name__ for item in results))
    return ModelError(
        f"predict_step gives {kinds} for a microbatch as a whole, and those of {len(results)} "
        "microbatches are not the one of their batch. Return tensors with the batch's rows first, "
        "lists with an item per row, or dicts, tuples and dataclasses of them; or use "
        "num_microbatches=1."
    )
