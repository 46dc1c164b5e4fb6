"""One rank's part of a Lightning checkpoint as pieces and JSON, and back.

Names in a checkpoint say what a value is, and then whose, by the names of the uncut module:
``model:net.0.weight``, ``optimizer.0.exp_avg:net.0.weight``, ``tree.00003.t0:`` (a tensor that only
rank 3 knows the meaning of, such as the state of its generators). Tensors inside a nested value are
``optimizer.0.key!t0:net.0.weight``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from strategies.errors import CheckpointError
from strategies.runtime.storage.piece import Piece, as_piece
from strategies.runtime.tree_io import flatten, unflatten

_STATE = "state_dict"
_OPTIMIZERS = "optimizer_states"
_SPECIAL = frozenset(":!")


@dataclass(slots=True)
class Part:
    """What a rank has to say.

    Attributes:
        tree: Everything that is the rank's own, ready for JSON.
        pieces: Tensors by their names in the checkpoint.
        values: What is no tensor in the state of model and optimizers, by name, ready for JSON.
    """

    tree: Any = None
    pieces: dict[str, Piece] = field(default_factory=dict)
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

    Args:
        checkpoint: Model and optimizer state by parameter names; tensors, DTensors or pieces.
        rank: Its global rank.
        holders: Per parameter, the ranks that hold the same of it. What no parameter's is (buffers)
            may differ between replicas: the first one's counts.
        optimizer_holders: The same for its optimizer state. It lacks a parameter whose state is
            on the first replica only, or whose state is given as pieces.
        first_replica: Whether this rank belongs to it.

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
                            "takes texts without ':' and '!' only."
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
    """Those of a checkpoint's tensors that a rank needs.

    Args:
        names: All names in the checkpoint.
        rank: The rank whose tree it takes.
        wanted: Names of its module's state.
        optimized: Parameters whose optimizer state it wants.
    """
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
