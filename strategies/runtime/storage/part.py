"""One rank's part of a Lightning checkpoint as pieces and JSON, and back.

Names in a checkpoint say what a value is, and then whose, by the names of the uncut module:
``model:net.0.weight``, ``optimizer.0.exp_avg:net.0.weight``, ``tree.00003.t0:`` (a tensor that only
rank 3 knows the meaning of, such as the state of its generators). Tensors inside a nested value are
``optimizer.0.key!t0:net.0.weight``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from strategies.errors import CheckpointError

_STATE = "state_dict"
_OPTIMIZERS = "optimizer_states"
_SPECIAL = frozenset(":!")


@dataclass(slots=True)
class Part:
    """What a rank has to say."""

    tree: Any = None  # everything that is the rank's own, ready for JSON
    pieces: dict[str, Piece] = field(default_factory=dict)  # tensors, by name in the checkpoint
    # What is no tensor in the state of model and optimizers, by name, ready for JSON.
    values: dict[str, Any] = field(default_factory=dict)


def split(
    checkpoint: Mapping[str, Any],
    *,
    rank: int,
    holders: Mapping[str, tuple[int, ...]],
    optimizer_holders: Mapping[str, tuple[int, ...]],
    first_replica: bool,
) -> Part:
    """Takes apart what Lightning has collected on a rank; tensors are not copied.

    Of ``holders``, the ranks that hold the same of a parameter, ``optimizer_holders`` lacks those
    whose optimizer state is on the first replica only, or is given as pieces. What no parameter's
    is (buffers) may differ between replicas: the first one's counts.

    Raises:
        CheckpointError: The state holds an object that is neither plain data nor a tensor.
    """
    part = Part()
    for name, value in checkpoint.get(_STATE, {}).items():
        _add(part, "model", name, value, holders, first_replica)
    rest = {key: value for key, value in checkpoint.items() if key != _STATE}
    if _OPTIMIZERS in checkpoint:
        rest[_OPTIMIZERS] = []
        for index, optimizer in enumerate(checkpoint[_OPTIMIZERS]):
            rest[_OPTIMIZERS].append({**optimizer, "state": {}})
            for name, entry in optimizer["state"].items():
                for key, value in entry.items():
                    if not isinstance(key, str) or not _SPECIAL.isdisjoint(key):
                        raise CheckpointError(
                            f"the optimizer's state of {name} has the key {key!r}: a checkpoint "
                            "takes texts without ':' and '!' only. Rename it in the optimizer."
                        )
                    prefix = f"optimizer.{index}.{key}"
                    _add(part, prefix, name, value, optimizer_holders, first_replica)
    part.tree, tensors = flatten(rest)
    for key, tensor in tensors.items():
        part.pieces[tree_name(rank, key)] = as_piece(tensor)
    return part


def _add(
    part: Part,
    prefix: str,
    name: str,
    value: Any,
    holders: Mapping[str, tuple[int, ...]],
    first_replica: bool,
) -> None:
    if isinstance(value, Tensor | Piece):
        if isinstance(value, Piece) or name in holders or first_replica:
            part.pieces[f"{prefix}:{name}"] = as_piece(value, holders.get(name))
    elif first_replica:
        tree, tensors = flatten(value)
        part.values[f"{prefix}:{name}"] = tree
        for key, tensor in tensors.items():
            part.pieces[f"{prefix}!{key}:{name}"] = as_piece(tensor)


def tree_name(rank: int, key: str) -> str:
    """A tensor of a rank's own tree."""
    return f"tree.{rank:05d}.{key}:"


def _subject(name: str) -> tuple[str, str]:
    """What a value is, and whose."""
    kind, _, owner = name.partition(":")
    return kind, owner


def tensors_for(
    names: Iterable[str], *, rank: int, wanted: set[str], optimized: set[str]
) -> list[str]:
    """Those of a checkpoint's tensors that a rank needs, which takes the tree of ``rank``."""
    needed = []
    own = tree_name(rank, "")[:-1]
    for name in names:
        kind, owner = _subject(name)
        if kind.startswith("tree."):
            if name.startswith(own):
                needed.append(name)
        elif owner in (optimized if kind.startswith("optimizer.") else wanted):
            needed.append(name)
    return needed


def join(
    tree: Any,
    *,
    rank: int,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    wanted: set[str],
    optimized: set[str],
) -> dict[str, Any]:
    """The inverse of ``split``, for whatever names a rank wants now."""
    head = tree_name(rank, "")[:-1]
    own = {
        name[len(head) : -1]: tensor for name, tensor in tensors.items() if name.startswith(head)
    }
    part: dict[str, Any] = unflatten(tree, own)
    state: dict[str, Any] = {}
    part[_STATE] = state
    entries: dict[str, Any] = {}
    nested: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        kind, owner = _subject(name)
        around, _, inner = kind.partition("!")
        if inner:
            nested[f"{around}:{owner}"][inner] = tensor
        elif not kind.startswith("tree."):
            entries[name] = tensor
    for name, value in values.items():
        kind, owner = _subject(name)
        if owner in (optimized if kind.startswith("optimizer.") else wanted):
            entries[name] = unflatten(value, nested[name])
    for name, item in entries.items():
        kind, owner = _subject(name)
        if kind == "model":
            state[owner] = item
        else:
            _, index, key = kind.split(".", 2)
            part[_OPTIMIZERS][int(index)]["state"].setdefault(owner, {})[key] = item
    return part


# ------------------------------------------------------------------------------------------- piece
# The unit in which checkpoints are written and read. A whole tensor, a tensor-parallel shard and a
# share of a sharded optimizer are all boxes, so a checkpoint of any layout loads into any other.


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one tensor: its values, local and plain, and where in the whole it begins.

    Or several of one size, side by side in ``tensor`` and equally far apart in the whole.
    """

    tensor: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    # Global ranks that all hold this same box and that all say so with the same tuple; one of them
    # writes it. None: this process writes it.
    holders: tuple[int, ...] | None = None
    # Where they are several: their dimension, and how many they are.
    strips: tuple[int, int] | None = None

    def boxes(self) -> list[Piece]:
        """Those it is made of, as pieces of one box; their tensors are views."""
        if self.strips is None:
            return [self]
        dim, count = self.strips
        found = []
        for number, view in enumerate(self.tensor.chunk(count, dim)):
            start = list(self.offsets)
            start[dim] += number * (self.global_shape[dim] // count)
            found.append(Piece(view, self.global_shape, tuple(start), self.holders))
        return found

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(
            offsets=torch.Size(self.offsets), sizes=torch.Size(self.tensor.shape)
        )


def as_piece(value: Tensor | Piece, holders: tuple[int, ...] | None = None) -> Piece:
    """All of a plain tensor, the own shard of a DTensor; a piece as it is, with its own holders."""
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


# ----------------------------------------------------------------------------------------- tree io
# Tensors go into a flat mapping under numbered keys; the tree around them is JSON in which a tagged
# object stands for what JSON lacks (tensors, tuples, dicts with keys that are no strings).


_TAG = "__kind__"


def flatten(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Splits nested state into a JSON-ready tree and its tensors.

    Raises:
        CheckpointError: The state holds an object that is neither plain data nor a tensor.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(tree, tensors, "checkpoint"), tensors


def unflatten(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of ``flatten``; tensors that are not in the mapping become None.

    Raises:
        ValueError: Something in it was never written by ``flatten``; its reader knows the path.
    """
    if isinstance(tree, list):
        return [unflatten(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(_TAG)
    if kind is None:
        return {key: unflatten(value, tensors) for key, value in tree.items()}
    value = tree["value"]
    if kind == "tensor":
        return tensors.get(value)
    if kind == "float":
        return float(value)
    if kind == "tuple":
        return tuple(unflatten(item, tensors) for item in value)
    if kind == "bytes":
        return bytes.fromhex(value)
    if kind == "dict":
        return {unflatten(k, tensors): unflatten(v, tensors) for k, v in value}
    raise ValueError(f"an unknown kind of value: {str(kind)[:40]!r}")


def _encode(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if isinstance(value, Tensor):
        key = f"t{len(tensors)}"
        tensors[key] = value.detach()
        return {_TAG: "tensor", "value": key}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, bytes):
        return {_TAG: "bytes", "value": value.hex()}
    if isinstance(value, tuple):
        items = [_encode(item, tensors, f"{path}[{i}]") for i, item in enumerate(value)]
        return {_TAG: "tuple", "value": items}
    if isinstance(value, list):
        return [_encode(item, tensors, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: _encode(item, tensors, f"{path}.{key}") for key, item in value.items()}
        pairs = [
            [_encode(k, tensors, path), _encode(v, tensors, f"{path}.{k}")]
            for k, v in value.items()
        ]
        return {_TAG: "dict", "value": pairs}
    if isinstance(value, np.generic):
        return _encode(value.item(), tensors, path)
    if isinstance(value, torch.dtype):
        return str(value)
    raise CheckpointError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold: only tensors, "
        "numbers, text, lists and dicts are written (nothing is ever unpickled). Return plain data "
        "from on_save_checkpoint() or state_dict()."
    )
