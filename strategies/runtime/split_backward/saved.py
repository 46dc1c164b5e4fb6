"""Reads what a node saved, and tells whether that can be read before the engine does."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from strategies.runtime.selective.packed import Computed, Kept
from strategies.runtime.split_backward.graph import Kind, Node
from strategies.runtime.split_backward.rule import Rule, Saved

# Private to torch, and the only sign that a packed tensor belongs to a checkpointed region.
_Holder: Any = getattr(checkpoint, "_Holder", None)


class Access(enum.Enum):
    """When a node's saved tensors may be read.

    Attributes:
        NOW: They are there.
        LATER: A checkpoint computes them again when the engine comes to the node.
        NEVER: Somebody packed them in a way of his own (off to the CPU, compressed).
    """

    NOW = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


def access_of(node: Node, names: Sequence[str]) -> Access:
    """How the named saved tensors can be read; prepares checkpointed ones to be read twice."""
    holders = []
    later = False
    for name in names:
        raw = getattr(node, "_raw_saved_" + name)
        if raw.unpack_hook is None:
            continue
        packed = raw.data
        if type(packed) is Kept:
            continue
        if type(packed) is Computed:
            later = True
            continue
        if _Holder is None or type(packed) is not _Holder:
            return Access.NEVER
        holders.append(packed)
    for holder in holders:
        if type(holder.handles) is not _KeptHandles:
            holder.handles = _KeptHandles(holder.handles)
    return Access.LATER if holders or later else Access.NOW


class _KeptHandles(dict[int, Any]):
    """Handles of a checkpoint's saved tensor that stay when the tensor has been unpacked.

    A checkpoint gives a tensor out once per backward and forgets it. Here it is needed twice: for
    the input gradient inside the engine, and before that to keep it for the weight gradient. It
    still goes with the node's saved values, which the engine frees as soon as the node has run.
    """

    def __setitem__(self, task: int, handle: Any) -> None:
        if handle is not None:
            super().__setitem__(task, handle)


@functools.cache
def _raw_names(kind: Kind) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def packs(node: Node) -> bool:
    """True if hooks pack any of the tensors that the node saved."""
    kind: Kind = type(node)
    for name in _raw_names(kind):
        raw = getattr(node, name)
        for saved in raw if isinstance(raw, tuple) else (raw,):
            if saved is not None and saved.unpack_hook is not None:
                return True
    return False


def read_saved(
    node: Node,
    rule: Rule,
    names: Sequence[str],
    *,
    shapes: Mapping[int, torch.Size],
    flipped: Sequence[int],
) -> Saved:
    """Takes the named tensors and the rule's settings from a node."""
    # With its history a tensor would keep the graph's nodes, and those the stage's inputs.
    tensors = {name: getattr(node, "_saved_" + name).detach() for name in names}
    settings = {name: signed(getattr(node, name)) for name in rule.settings}
    return Saved(tensors, settings, shapes, flipped)


def signed(value: Any) -> Any:
    """A saved value as it was: torch hands negative integers out as unsigned ones."""
    return value - (1 << 64) if type(value) is int and value >= 1 << 63 else value


def is_plain(tensor: Tensor) -> bool:
    """True for a real dense tensor, False for subclasses and other layouts."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_complex()
    )
