"""Layers that hold one rank's share of a weight, as plain tensors of the local size.

Their gradients, the optimizer's state and the buffers of ``grad_sync`` are then plain, too, and the
products inside them are ordinary nodes of the autograd graph, which a split backward can take
apart. A layer becomes one of these in place (``sharding.py``), under its name and with its hooks.

What lies between layers is the business of their values: ``LocalValues`` where code was written for
shares, or ``WholeShapeValues`` (``share_values.py``), where what a layer leaves cut has its whole
shape, a layer takes a value whole or cut in whatever way, and shares need not come out even. There,
a layer that a replay asks for shapes alone answers as the uncut one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack

from strategies.models.nested import rebuild
from strategies.models.replay.hole import Hole
from strategies.models.replay.shape_mode import ShapeMode
from strategies.models.tensor_parallel.layer_plan import CONVOLUTIONS
from strategies.models.tensor_parallel.regions import (
    TIME,
    Entrance,
    gather_outputs,
    leave,
    split_stream,
)
from strategies.models.tensor_parallel.share_values import WholeShapeValues
from strategies.models.tensor_parallel.tensor_ranks import Shard, TensorRanks
from strategies.models.tensor_parallel.vocabulary import VocabularyShare

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class LocalValues:
    """Between layers lies what a rank has: the module's code was written for that."""

    looked_after: tuple[()] = ()

    def whole(self, value: Tensor) -> Tensor:
        return value

    def own(self, value: Tensor, dim: int) -> Tensor:
        return value

    def whole_of(self, value: Any) -> Any:
        return value

    def look_after(self, layer: nn.Module) -> None:
        """Nothing of it lies cut where code expects the whole."""

    @contextmanager
    def between_layers(self) -> Iterator[None]:
        yield


class ShardedLayer:
    """What all of these have.

    Attributes:
        cut: Of ``weight``.
        gathers: Whether every rank gets all of the outputs.
        uncut: The layer as it was, with shapes alone, where outputs have whole shapes.
    """

    def __init__(
        self,
        layer: nn.Module,
        sizes: Mapping[str, torch.Size],
        values: LocalValues | WholeShapeValues,
        entrance: Entrance,
        cut: Shard,
        ranks: TensorRanks,
        *,
        gathers: bool,
    ) -> None:
        self.values = values
        self.ranks = ranks
        self.entrance = entrance
        self.cut = cut
        self.gathers = gathers
        self.held = cut.held(ranks.rank)
        # In a tuple: it is nobody's child and has no weights.
        self.uncut: tuple[nn.Module, ...] = ()
        if isinstance(values, WholeShapeValues):
            self.uncut = (_without_data(layer, sizes),)

    def linear(self, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's outputs of a product."""
        return self.entrance.linear(self.values.whole(value), weight, bias)

    def enter(self, value: Any) -> Any:
        """An argument of a layer that takes whole ones."""
        if not isinstance(value, Tensor):
            return value
        whole = self.values.whole(value)
        return self.entrance(whole) if whole.is_floating_point() else whole

    def leave_cut(self, local: Tensor, dim: int) -> Tensor:
        """Outputs of this rank as what the layer gives; of whole shapes, without padding."""
        values = self.values
        if isinstance(values, LocalValues):
            return gather_outputs(local, self.ranks, dim) if self.gathers else local
        if local.shape[dim] != self.held:
            local = local.narrow(dim, 0, self.held)
        share = values.left(local, dim, self.cut.size, self.cut.segments)
        if not self.gathers and values.is_share(share):
            return share
        whole = values.whole(share)
        # What DTensor gives is a view of its own, which nobody may write into.
        return whole.clone() if whole.requires_grad else whole

    def held_weight(self, weight: Tensor) -> Tensor:
        """This rank's share without padding."""
        if weight.shape[self.cut.dim] == self.held:
            return weight
        return weight.narrow(self.cut.dim, 0, self.held)


_Forward = TypeVar("_Forward", bound=Callable[..., Any])


def _computed(forward: _Forward) -> _Forward:
    """The forward of a cut layer, which alone takes the share of its weights."""

    @functools.wraps(forward)
    def run(layer: Any, *args: Any, **kwargs: Any) -> Any:
        share: ShardedLayer = layer.share
        values = share.values
        if isinstance(values, LocalValues):
            return forward(layer, *args, **kwargs)
        # Whether only shapes are wanted: a replay asks for them, or the weights are elsewhere.
        modes: Any = _get_current_function_mode_stack  # Untyped in torch.
        if isinstance(layer.weight, Hole) or any(isinstance(mode, ShapeMode) for mode in modes()):
            return share.uncut[0](*args, **kwargs)
        with values.taking_shares():
            return forward(layer, *args, **kwargs)

    return cast(_Forward, run)


class _Column:
    """``[..., inputs]`` to ``[..., local outputs]``."""

    share: ShardedLayer
    dim, cuts_bias = 0, True

    @_computed
    def forward(self: Any, input: Tensor) -> Any:
        weight = self.weight if self.dim == 0 else self.weight.t()
        return self.share.leave_cut(self.share.linear(input, weight, self.bias), -1)


class _Row:
    """``[..., local inputs]`` to ``[..., outputs]``; the bias is added once, to the sum."""

    share: ShardedLayer
    dim, cuts_bias = 1, False

    @_computed
    def forward(self: Any, input: Tensor) -> Tensor:
        share = self.share
        weight = share.held_weight(self.weight)
        own = share.values.own(input, -1)
        partial = functional.linear(own, weight if self.dim == 1 else weight.t())
        total = leave(partial, share.ranks)
        return total if self.bias is None else total + self.bias


class ColumnLinear(_Column, nn.Linear):
    """Some of a linear layer's outputs.

    Attributes:
        vocabulary: Which token ids the outputs are, for a head that leaves them to its user.
    """

    vocabulary: VocabularyShare | None = None


class RowLinear(_Row, nn.Linear):
    """A linear layer from some of its inputs."""


class _TransposedColumn(_Column, nn.Module):
    """With a weight ``[inputs, outputs]``, as GPT-2's in transformers."""

    dim = 1


class _TransposedRow(_Row, nn.Module):
    dim = 0


class VocabularyEmbedding(nn.Embedding):
    """The vectors of some ids; others come from the ranks that have them."""

    share: ShardedLayer
    dim, cuts_bias = 0, False

    @_computed
    def forward(self, input: Tensor) -> Tensor:
        """Ids ``[...]`` to vectors ``[..., hidden]``, whole on every rank."""
        share = self.share
        first = share.cut.start(share.ranks.rank)
        ids = share.values.whole(input) - first
        elsewhere = (ids < 0) | (ids >= share.held)
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < share.held:
            padding = None
        vectors = functional.embedding(
            ids.masked_fill(elsewhere, 0), self.weight, padding_idx=padding
        )
        own = vectors.masked_fill(elsewhere.unsqueeze(-1), 0)
        return leave(own, share.ranks, whole=True)


class _ColumnChannels:
    """Some channels, or a part of every vector: what torch's own forward makes of the share."""

    share: ShardedLayer
    dim, cuts_bias = 1, True

    @_computed
    def forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        share = self.share
        channels = self.weight.dim() - 1
        groups = getattr(self, "groups", 1)
        if groups == 1:
            input, args, kwargs = rebuild((input, args, kwargs), share.enter)
            local = super().forward(input, *args, **kwargs)  # type: ignore[misc]
            return share.leave_cut(local, -channels)
        # Of the rank's own channels.
        self.groups = groups // share.ranks.size
        try:
            local = super().forward(share.values.own(input, -channels))  # type: ignore[misc]
        finally:
            self.groups = groups
        return share.leave_cut(local, -channels)


class _RowChannels:
    """Each rank has some channels of the input; the bias is added once, to the sum."""

    share: ShardedLayer
    dim, cuts_bias = 1, False

    @_computed
    def forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        share = self.share
        channels = self.weight.dim() - 1
        own = share.values.own(input, -channels)
        padding = self.weight.shape[self.dim] - share.held
        if padding:
            own = functional.pad(own, (0, 0) * (channels - 1) + (0, padding))
        bias, self._parameters["bias"] = self.bias, None
        try:
            partial = super().forward(own, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._parameters["bias"] = bias
        total = leave(partial, share.ranks)
        return total if bias is None else total + bias.view(-1, *(1,) * (channels - 1))


def _of(how: type[Any], kind: type[nn.Module], dim: int) -> type[Any]:
    return type(how.__name__.strip("_") + kind.__name__, (how, kind), {"dim": dim})


# torch's layer -> what it becomes by which style.
KINDS: dict[type[nn.Module], dict[str, type[Any]]] = {
    nn.Linear: {"column": ColumnLinear, "row": RowLinear},
    nn.Embedding: {
        "column": _of(_ColumnChannels, nn.Embedding, 1),
        "vocabulary": VocabularyEmbedding,
    },
    nn.EmbeddingBag: {"column": _of(_ColumnChannels, nn.EmbeddingBag, 1)},
    **{
        kind: {"column": _of(_ColumnChannels, kind, 0), "row": _of(_RowChannels, kind, 1)}
        for kind in CONVOLUTIONS
    },
    **{
        kind: {"column": _of(_ColumnChannels, kind, 1), "row": _of(_RowChannels, kind, 0)}
        for kind in TRANSPOSED
    },
}
# transformers is not imported for its one class of such a layer.
CONV1D: dict[str, type[Any]] = {"column": _TransposedColumn, "row": _TransposedRow}


def _without_data(layer: nn.Module, sizes: Mapping[str, torch.Size]) -> nn.Module:
    """The layer as it is, with shapes alone; without hooks, which are those of the other one."""
    twin = type(layer).__new__(type(layer))
    nn.Module.__init__(twin)
    own = {key: value for key, value in layer.__dict__.items() if key not in twin.__dict__}
    twin.__dict__.update(own)
    twin.train(layer.training)
    for name, parameter in layer._parameters.items():
        meta = None
        if parameter is not None:
            empty = torch.empty(sizes[name], dtype=parameter.dtype, device="meta")
            meta = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        twin.register_parameter(name, meta)
    return twin


# -- on the residual stream, where sequence parallelism cuts it ------------------------------------


class SequenceDropout(nn.Dropout):
    """Dropout on a share of the sequence that drops what dropout on the whole would."""

    ranks: TensorRanks

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        shape = list(input.shape)
        shape[TIME] *= self.ranks.size
        ones = torch.ones(shape, dtype=input.dtype, device=input.device)
        mask = functional.dropout(ones, self.p, training=True)
        # A view would keep the whole mask until the backward.
        return input * self.ranks.share_along(mask, TIME).clone()


class SplitOutput:
    """A forward hook: from here on each rank has its share of the sequence."""

    def __init__(self, ranks: TensorRanks) -> None:
        self._ranks = ranks
        self.whole = False  # whether there is nothing to split for a while

    def __call__(self, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return output if self.whole else split_stream(output, self._ranks)
