"""How torch's own layers may be cut: by outputs, by inputs, by the ids or channels they are for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from strategies.planner.shardings.operators import ENTERED, WHOLE, Choice, Message
from strategies.sharding_plan import LayerKind
from strategies.tracing.operator_shardings import Cut, read_state

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_KINDS: tuple[tuple[tuple[type[nn.Module], ...], LayerKind], ...] = (
    ((nn.Linear,), "linear"),
    ((*_CONVOLUTIONS, *_TRANSPOSED), "conv"),
    ((nn.Embedding, nn.EmbeddingBag), "embedding"),
    ((*_BATCH_NORMS, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm), "norm"),
)
_SEGMENTS = (2, 3)


def layer_kind(layer: nn.Module) -> LayerKind | None:
    """What a layer is; None for one that is not known, whose operations are looked at instead."""
    # A weight that is computed (weight_norm) is no share of anything that could be cut.
    plain = isinstance(layer._parameters.get("weight"), nn.Parameter)
    for kinds, name in _KINDS:
        for kind in kinds if plain or name == "norm" else ():
            if isinstance(layer, kind) and type(layer).forward is kind.forward:
                return name
    # The projection of transformers' GPT-2: a Linear whose weight stands the other way round.
    if type(layer).__name__ == "Conv1D" and hasattr(layer, "nf") and hasattr(layer, "nx"):
        return "linear"
    return None


class LayerCall(NamedTuple):
    """A call of a layer: its input and output, the states that the input may have."""

    layer: nn.Module
    kind: LayerKind
    given: Tensor
    states: Sequence[str]
    made: Tensor
    free: bool  # Whether its input may be cut at all; ids may not.
    tp: int
    scores: bool  # Whether a loss takes its outputs where they are cut.


def layer_choices(call: LayerCall) -> tuple[tuple[Choice, ...], tuple[tuple[str, str], ...]]:
    """All choices, the uncut one first; and (style, reason) of those that sizes rule out."""
    finders = {"linear": _linear, "conv": _conv, "embedding": _embedding, "norm": _norm}
    excluded: list[tuple[str, str]] = []
    found = [Choice((WHOLE,), (WHOLE,), "replicated"), *finders[call.kind](call, excluded)]
    possible = (*call.states, ENTERED, WHOLE)
    unique = dict.fromkeys(
        choice if call.free else replace(choice, inputs=())
        for choice in found
        if all(state in possible for state in choice.inputs)
    )
    return tuple(unique), tuple(dict.fromkeys(excluded))


def products(call: LayerCall) -> tuple[int, int, int, int]:
    """(rows, columns, inner, batch) of a layer's matrix product; zeros where it has none."""
    layer: Any = call.layer
    if call.kind == "linear":
        inner = call.given.shape[-1]
        return call.given.numel() // inner, call.made.shape[-1], inner, 1
    if call.kind == "conv":
        transposed = isinstance(layer, _TRANSPOSED)
        ends = call.given if transposed else call.made
        places = ends.numel() // (layer.in_channels if transposed else layer.out_channels)
        kernel = 1
        for size in layer.kernel_size:
            kernel *= size
        inner = layer.in_channels // layer.groups * kernel
        return places, layer.out_channels // layer.groups, inner, layer.groups
    return 0, 0, 0, 0


def _linear(call: LayerCall, excluded: list[tuple[str, str]]) -> Iterator[Choice]:
    outputs, inputs = call.made.shape[-1], call.given.shape[-1]
    flipped = not isinstance(call.layer, nn.Linear)
    dims = (1, 0) if flipped else (0, 1)
    yield from _by_column(call, outputs, call.made.dim() - 1, dims[0], excluded)
    if call.scores:
        share = -(-outputs // call.tp) / outputs
        yield Choice(
            (_entered(call),), (str(Cut(call.made.dim() - 1, scores=True)),), "vocabulary",
            share, share, split_dim=dims[0], whole_output=False,
        )  # fmt: skip
    yield from _by_row(call, inputs, call.given.dim() - 1, dims[1], excluded)
    yield from _alongside(call, call.given.dim() - 1)


def _conv(call: LayerCall, excluded: list[tuple[str, str]]) -> Iterator[Choice]:
    layer: Any = call.layer
    if call.given.dim() != len(layer.kernel_size) + 2 or layer.padding_mode != "zeros":
        excluded.append(("column", "only convolutions of a batch, padded by zeros, are cut"))
        return
    flipped = isinstance(layer, _TRANSPOSED)
    if layer.groups == 1:
        yield from _by_column(call, layer.out_channels, 1, int(flipped), excluded)
        yield from _by_row(call, layer.in_channels, 1, 1 - int(flipped), excluded)
    elif layer.groups % call.tp == 0:
        yield from _channels(call, layer.out_channels // layer.groups)
    else:
        excluded.append(("column", f"{layer.groups} groups are not divisible by {call.tp}"))


def _embedding(call: LayerCall, excluded: list[tuple[str, str]]) -> Iterator[Choice]:
    layer: Any = call.layer
    if layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq or call.free:
        excluded.append(
            ("vocabulary", "max_norm, scale_grad_by_freq and sparse tables are not cut")
        )
        return
    size = _size(call.made)
    share = -(-layer.num_embeddings // call.tp) / layer.num_embeddings
    if isinstance(layer, nn.Embedding):  # Bags are cut by width alone.
        yield Choice((), (WHOLE,), "vocabulary", 1.0, share, (Message("sum", size),), split_dim=0)
    width = layer.embedding_dim
    if width % call.tp:
        excluded.append(("column", f"a width of {width} is not divisible by {call.tp}"))
        return
    part = 1 / call.tp
    yield Choice(
        (), (str(Cut(call.made.dim() - 1)),), "column", part, part, split_dim=1,
        whole_output=False,
    )  # fmt: skip
    yield Choice((), (WHOLE,), "column", part, part, (Message("gather", size),), split_dim=1)


def _norm(call: LayerCall, excluded: list[tuple[str, str]]) -> Iterator[Choice]:
    layer: Any = call.layer
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        yield from _alongside(call, call.given.dim() - len(layer.normalized_shape))
        return
    if isinstance(layer, nn.GroupNorm):
        if layer.num_groups % call.tp:
            reason = f"{layer.num_groups} groups are not divisible by {call.tp}"
            excluded.append(("column", reason))
            return
        yield from _channels(call, layer.num_channels // layer.num_groups)
    elif layer.num_features % call.tp == 0:
        yield from _channels(call, 1)


def _by_column(
    call: LayerCall, count: int, dim: int, split_dim: int, excluded: list[tuple[str, str]]
) -> Iterator[Choice]:
    """Outputs are cut: left so, or gathered."""
    if count % call.tp:
        excluded.append(("column", f"{count} outputs are not divisible by {call.tp}"))
        return
    part, entered = 1 / call.tp, _entered(call)
    for segments in (1, *_SEGMENTS) if call.kind == "linear" else (1,):
        if count % (segments * call.tp) == 0:
            yield Choice(
                (entered,), (str(Cut(dim, segments)),), "column", part, part,
                split_dim=split_dim, segments=segments, whole_output=False,
            )  # fmt: skip
    gathered = (Message("gather", _size(call.made)),)
    yield Choice((entered,), (WHOLE,), "column", part, part, gathered, split_dim=split_dim)


def _by_row(
    call: LayerCall, count: int, dim: int, split_dim: int, excluded: list[tuple[str, str]]
) -> Iterator[Choice]:
    """Inputs are cut already, or each rank takes its share of them; outputs are summed."""
    if count % call.tp:
        excluded.append(("row", f"{count} inputs are not divisible by {call.tp}"))
        return
    part, summed = 1 / call.tp, Message("sum", _size(call.made))
    yield Choice(
        (str(Cut(dim)),), (WHOLE,), "row", part, part, (summed,), split_dim=split_dim,
        whole_input=False,
    )  # fmt: skip
    back = Message("gather", _size(call.given), backward=True)
    messages = (summed, back) if call.given.requires_grad else (summed,)
    yield Choice((WHOLE,), (WHOLE,), "row", part, part, messages, split_dim=split_dim)


def _alongside(call: LayerCall, last: int) -> Iterator[Choice]:
    """Whole weights on a share of what they are applied to, over and over."""
    own = sum(_size(parameter) for parameter in call.layer.parameters())
    added = (Message("sum", own, backward=True, once=True),)
    for state in call.states:
        cut = read_state(state)
        if cut is not None and cut.dim < last and not cut.scores:
            yield Choice(
                (state,), (state,), "replicated", 1 / call.tp, 1.0, added,
                whole_input=False, whole_output=False, partial=True,
            )  # fmt: skip


def _channels(call: LayerCall, block: int) -> Iterator[Choice]:
    """Each rank has some of the channels, of weights as of inputs."""
    state, part = str(Cut(1)), 1 / call.tp
    yield Choice(
        (state,), (state,), "column", part, part, split_dim=0, block=block, whole_input=False,
        whole_output=False,
    )  # fmt: skip


def _entered(call: LayerCall) -> str:
    return ENTERED if call.given.requires_grad else WHOLE


def _size(tensor: Tensor) -> float:
    return float(tensor.numel())
