"""Weight gradients of embeddings: rows summed by index."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from strategies.runtime.split_backward.rule import Rule, Sample, Saved, example

_SETTINGS = (
    "_saved_weight_sym_argsize_0",
    "_saved_padding_idx",
    "_saved_scale_grad_by_freq",
)


def _gradients(saved: Saved, incoming: Tensor, edges: Sequence[int]) -> list[Tensor]:
    settings = (saved.settings[name] for name in _SETTINGS)
    indices = saved.tensors["indices"]
    return [torch.ops.aten.embedding_dense_backward(incoming, indices, *settings) for _ in edges]


def _samples(device: torch.device) -> list[Sample]:
    weight = example(device, 5, 3)
    indices = torch.tensor([[1, 4, 1], [0, 2, 4]], device=device)
    plain = F.embedding(indices, weight)
    padded = F.embedding(indices, weight, padding_idx=2, scale_grad_by_freq=True)
    return [Sample(output, {0: weight}) for output in (plain, padded)]


EMBEDDING = Rule(
    node="EmbeddingBackward0",
    factors=(0,),
    operands={0: ("indices",)},
    weight=0,
    takes_data=False,
    settings=_SETTINGS,
    accepts=lambda node: not node._saved_sparse,
    gradients=_gradients,
    samples=_samples,
)
