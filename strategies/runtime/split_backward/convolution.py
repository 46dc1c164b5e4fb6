"""Weight gradients of convolutions of any dimension, transposed and grouped ones included."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from strategies.runtime.split_backward.rule import Rule, Sample, Saved, example

_WEIGHT, _BIAS = 1, 2
_SETTINGS = (
    "_saved_bias_sym_sizes_opt",
    "_saved_stride",
    "_saved_padding",
    "_saved_dilation",
    "_saved_transposed",
    "_saved_output_padding",
    "_saved_groups",
)


def _gradients(saved: Saved, incoming: Tensor, edges: Sequence[int]) -> list[Tensor]:
    data = saved.tensors["input"]
    # Only the weight's shape matters here; its values may have changed since.
    weight = incoming.new_empty(()).expand(saved.shapes[_WEIGHT])
    bias, *settings = (saved.settings[name] for name in _SETTINGS)
    found = torch.ops.aten.convolution_backward(
        incoming, data, weight, bias, *settings, [False, _WEIGHT in edges, _BIAS in edges]
    )
    return [found[edge] for edge in edges]


def _samples(device: torch.device) -> list[Sample]:
    found = []
    data, bias = example(device, 2, 4, 6, 6), example(device, 6)
    for call, shape in ((F.conv2d, (6, 2, 3, 3)), (F.conv_transpose2d, (4, 3, 3, 3))):
        weight = example(device, *shape)
        output = call(data, weight, bias, stride=2, padding=1, groups=2)
        found.append(Sample(output, {_WEIGHT: weight, _BIAS: bias}))
    return found


CONVOLUTION = Rule(
    node="ConvolutionBackward0",
    factors=(0, _WEIGHT),
    operands={_WEIGHT: ("input",)},
    weight=_WEIGHT,
    bias=_BIAS,
    shaped=(_WEIGHT,),
    settings=_SETTINGS,
    gradients=_gradients,
    samples=_samples,
)
