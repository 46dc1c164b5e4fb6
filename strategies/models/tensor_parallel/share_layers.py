"""Layers with a share of their weights for modules that nobody has written for it.

As ``sharded_layers.py``, between whose entrance and end they compute; but what they leave cut knows
its whole shape (``share_values.py``), they take a value whole or cut in whatever way, and shares
need not come out even. A layer that a replay asks for shapes alone answers as the uncut one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack

from strategies.models.replay.hole import Hole
from strategies.models.replay.shape_mode import ShapeMode
from strategies.models.tensor_parallel.regions import Entrance, leave
from strategies.models.tensor_parallel.share_values import ShareValues
from strategies.models.tensor_parallel.tensor_ranks import Shard

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class CutLayer:
    """What all of these have: who shares, how the weight is cut, and the layer as it was.

    Attributes:
        cut: Of ``weight``.
        gathers: Whether every rank gets all of the outputs.
    """

    def __init__(
        self,
        layer: nn.Module,
        sizes: Mapping[str, torch.Size],
        values: ShareValues,
        entrance: Entrance,
        cut: Shard,
        *,
        gathers: bool,
    ) -> None:
        self.values = values
        self.entrance = entrance
        self.cut = cut
        self.gathers = gathers
        self.held = cut.held(values.ranks.rank)
        # In a tuple: it is nobody's child and has no weights.
        self._uncut = (_without_data(layer, sizes),)

    def is_by_shape(self, layer: nn.Module) -> bool:
        """Whether only shapes are wanted: a replay asks for them, or the weights are elsewhere."""
        modes: Any = _get_current_function_mode_stack  # Untyped in torch.
        return isinstance(layer.weight, Hole) or any(
            isinstance(mode, ShapeMode) for mode in modes()
        )

    def by_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self._uncut[0](*args, **kwargs)

    def enter(self, value: Tensor) -> Tensor:
        return self.entrance(self.values.whole(value))

    def leave_cut(self, local: Tensor, dim: int) -> Tensor:
        """Outputs of this rank as what the layer gives; padding goes."""
        if local.shape[dim] != self.held:
            local = local.narrow(dim, 0, self.held)
        share = self.values.left(local, dim, self.cut.size, self.cut.segments)
        if not self.gathers and self.values.is_share(share):
            return share
        whole = self.values.whole(share)
        # What DTensor gives is a view of its own, which nobody may write into.
        return whole.clone() if whole.requires_grad else whole

    def own(self, value: Tensor, dim: int) -> Tensor:
        return self.values.own(value, dim)

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
        share: CutLayer = layer.share
        if share.is_by_shape(layer):
            return share.by_shape(*args, **kwargs)
        with share.values.taking_shares():
            return forward(layer, *args, **kwargs)

    return cast(_Forward, run)


class LinearByOutputs(nn.Linear):
    """A linear layer of which each rank computes some outputs."""

    share: CutLayer

    @_computed
    def forward(self, input: Tensor) -> Tensor:
        share = self.share
        local = functional.linear(share.enter(input), self.weight, self.bias)
        return share.leave_cut(local, -1)


class LinearByInputs(nn.Linear):
    """A linear layer of which each rank has some inputs; the bias is added once, to the sum."""

    share: CutLayer

    @_computed
    def forward(self, input: Tensor) -> Tensor:
        share = self.share
        own = share.own(input, -1)
        partial = functional.linear(own, share.held_weight(self.weight))
        total = leave(partial, share.values.ranks)
        return total if self.bias is None else total + self.bias


class TransposedLinearByOutputs(nn.Module):
    """A layer with a weight ``[inputs, outputs]``, as GPT-2's in transformers, by outputs."""

    share: CutLayer
    weight: nn.Parameter
    bias: nn.Parameter | None

    @_computed
    def forward(self, input: Tensor) -> Tensor:
        share = self.share
        local = functional.linear(share.enter(input), self.weight.t(), self.bias)
        return share.leave_cut(local, -1)


class TransposedLinearByInputs(nn.Module):
    """The same by inputs."""

    share: CutLayer
    weight: nn.Parameter
    bias: nn.Parameter | None

    @_computed
    def forward(self, input: Tensor) -> Tensor:
        share = self.share
        partial = functional.linear(share.own(input, -1), share.held_weight(self.weight).t())
        total = leave(partial, share.values.ranks)
        return total if self.bias is None else total + self.bias


class EmbeddingByIds(nn.Embedding):
    """The vectors of some ids; others come from the ranks that have them."""

    share: CutLayer

    @_computed
    def forward(self, input: Tensor) -> Tensor:
        share = self.share
        rank = share.values.ranks.rank
        first = share.cut.start(rank)
        ids = share.values.whole(input) - first
        elsewhere = (ids < 0) | (ids >= share.held)
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < share.held:
            padding = None
        vectors = functional.embedding(
            ids.masked_fill(elsewhere, 0), self.weight, padding_idx=padding
        )
        own = vectors.masked_fill(elsewhere.unsqueeze(-1), 0)
        return leave(own, share.values.ranks, whole=True)


class EmbeddingByWidth(nn.Embedding):
    """A part of every vector."""

    share: CutLayer

    @_computed
    def forward(self, input: Tensor) -> Tensor:
        share = self.share
        local = functional.embedding(
            share.values.whole(input), self.weight, padding_idx=self.padding_idx
        )
        return share.leave_cut(local, -1)


class BagByWidth(nn.EmbeddingBag):
    """A part of every vector that is summed or averaged in a bag."""

    share: CutLayer

    @_computed
    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        share = self.share
        if per_sample_weights is not None:
            per_sample_weights = share.enter(per_sample_weights)
        local = nn.EmbeddingBag.forward(self, input, offsets, per_sample_weights)
        return share.leave_cut(local, -1)


class _ConvolutionByOutputs:
    """Some channels come out of each rank; in groups, of the rank's own channels."""

    share: CutLayer

    @_computed
    def forward(self: Any, input: Tensor) -> Any:
        share = self.share
        channels = self.weight.dim() - 1
        if self.groups == 1:
            own, bias = share.enter(input), self.bias
            local = self._conv_forward(own, self.weight, bias)
        else:
            own = share.own(input, -channels)
            groups, self.groups = self.groups, self.groups // share.values.ranks.size
            try:
                local = self._conv_forward(own, self.weight, self.bias)
            finally:
                self.groups = groups
        return share.leave_cut(local, local.dim() - channels)


class _ConvolutionByInputs:
    """Each rank has some channels of the input."""

    share: CutLayer

    @_computed
    def forward(self: Any, input: Tensor) -> Any:
        share = self.share
        channels = self.weight.dim() - 1
        own = share.own(input, input.dim() - channels)
        partial = self._conv_forward(own, share.held_weight(self.weight), None)
        total = leave(partial, share.values.ranks)
        if self.bias is None:
            return total
        return total + self.bias.view(-1, *(1,) * (channels - 1))


class _TransposedByOutputs:
    """A transposed convolution of which some channels come out of each rank."""

    share: CutLayer

    @_computed
    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Any:
        share = self.share
        kind: Any = next(kind for kind in type(self).__mro__ if kind in TRANSPOSED)
        local: Tensor = kind.forward(self, share.enter(input), output_size)
        return share.leave_cut(local, local.dim() - (self.weight.dim() - 1))


class _TransposedByInputs:
    """A transposed convolution of which each rank has some channels of the input."""

    share: CutLayer

    @_computed
    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Any:
        share = self.share
        channels = self.weight.dim() - 1
        own = share.own(input, input.dim() - channels)
        if share.held != self.weight.shape[0]:
            own = functional.pad(
                own, (0, 0) * (channels - 1) + (0, self.weight.shape[0] - share.held)
            )
        kind: Any = next(kind for kind in type(self).__mro__ if kind in TRANSPOSED)
        bias, self._parameters["bias"] = self.bias, None
        try:
            partial = kind.forward(self, own, output_size)
        finally:
            self._parameters["bias"] = bias
        total = leave(partial, share.values.ranks)
        return total if bias is None else total + bias.view(-1, *(1,) * (channels - 1))


def _kinds(how: type[Any], *kinds: type[nn.Module]) -> dict[type[nn.Module], type[Any]]:
    return {kind: type(kind.__name__ + how.__name__[-9:], (how, kind), {}) for kind in kinds}


# torch's layer -> what it becomes.
BY_OUTPUTS = _kinds(_ConvolutionByOutputs, *CONVOLUTIONS)
BY_OUTPUTS |= _kinds(_TransposedByOutputs, *TRANSPOSED)
BY_INPUTS = _kinds(_ConvolutionByInputs, *CONVOLUTIONS)
BY_INPUTS |= _kinds(_TransposedByInputs, *TRANSPOSED)


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
