"""Packed sequences: recurrent layers get the rows of a batch without what fills them up.

``pack_padded_sequence`` takes lengths, which are the batch's, so every stage has them: its counts
(``batch_sizes``) are real on all, and the packed values of layers are a hole of as many rows as
the lengths add up to. That number differs between microbatches of the same shape, so no cut is
where packed values are on their way (``varies``).

``pad_packed_sequence`` fills up to the longest sequence that it has, which is the microbatch's, or
to ``total_length``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strategies.errors import ModelError
from strategies.models.nested import tensors
from strategies.models.replay.hole import (
    Args,
    Function,
    Kwargs,
    Spec,
    user_line,
)
from strategies.models.replay.inference import New, Outcome

_VARIES = "_varies"
# Of recurrent layers on packed values the first result is packed, the last states are not.
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_SHAPED = """
    __setitem__ index_add index_add_ index_copy index_copy_ index_put index_put_ masked_scatter
    masked_scatter_ scatter scatter_ scatter_add scatter_add_
"""
_SHAPED_BY_FIRST = frozenset(_SHAPED.split())


def packs(func: Function) -> bool:
    return getattr(func, "__name__", "") == "_pack_padded_sequence"


def pads(func: Function) -> bool:
    return getattr(func, "__name__", "") == "_pad_packed_sequence"


def infer_packing(
    func: Function, args: Args, tracked: Callable[[Tensor], bool], noted: Callable[[Tensor], None]
) -> tuple[Outcome, list[Tensor]]:
    """The outcome of packing or padding values of layers; counts and lengths are real.

    ``noted`` is called with the counts of what is packed.

    Raises:
        ModelError: Layers have computed the lengths.
    """
    values, sizes, *rest = args
    if tracked(sizes):
        raise ModelError(
            f"{user_line()}: a packed sequence whose lengths are computed by layers: the shape of "
            "what crosses stages would depend on their values. Take lengths of the batch, give the "
            "recurrent layer the padded tensor, or use pp=1."
        )
    zeros = torch.zeros(values.shape, dtype=values.dtype)
    with torch._C.DisableTorchFunction():  # also for modes around this one
        made, told = func(zeros, sizes, *rest)
    if packs(func):
        noted(told)
    meta = made.to("meta")
    if values.requires_grad and torch.is_grad_enabled():
        meta = meta.requires_grad_().clone()
    device = values.device
    template = (New(0), told)
    return Outcome(template, (Spec.of(meta, device),), exact=False), [meta]


def note_size(func: Function, args: Args, kwargs: Kwargs, result: Any) -> None:
    """Follows through an operation which values have as many rows as lengths add up to."""
    name = getattr(func, "__name__", "")
    given = args[:1] if name in _SHAPED_BY_FIRST else (args, kwargs)
    size_varies = packs(func) or (not pads(func) and varies(given))
    if not size_varies:
        return
    found = tensors(result)
    for tensor in found[:1] if name in _RECURRENT or packs(func) else found:
        if tensor.dim() > 0:
            setattr(tensor, _VARIES, True)


def varies(value: Any) -> bool:
    """Whether the size of a tensor in it depends on the lengths' values."""
    return any(getattr(tensor, _VARIES, False) for tensor in tensors(value))
