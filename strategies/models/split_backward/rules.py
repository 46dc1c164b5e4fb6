"""The rules: weight gradients of convolutions, embeddings and matrix products.

Those of convolutions hold for any dimension, transposed and grouped ones included.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.graph import GradientEdge

from strategies.models.split_backward.autograd_graph import Kind
from strategies.models.split_backward.rule import (
    Product,
    Rule,
    Sample,
    Saved,
    example,
    read_saved,
    summed_to,
)

_WEIGHT, _BIAS = 1, 2
_CONVOLUTION_SETTINGS = (
    "_saved_bias_sym_sizes_opt",
    "_saved_stride",
    "_saved_padding",
    "_saved_dilation",
    "_saved_transposed",
    "_saved_output_padding",
    "_saved_groups",
)


def _convolution_gradients(saved: Saved, incoming: Tensor, edges: Sequence[int]) -> list[Tensor]:
    data = saved.tensors["input"]
    # Only the weight's shape matters here; its values may have changed since.
    weight = incoming.new_empty(()).expand(saved.shapes[_WEIGHT])
    bias, *settings = (saved.settings[name] for name in _CONVOLUTION_SETTINGS)
    found = torch.ops.aten.convolution_backward(
        incoming, data, weight, bias, *settings, [False, _WEIGHT in edges, _BIAS in edges]
    )
    return [found[edge] for edge in edges]


def _convolution_samples(device: torch.device) -> list[Sample]:
    found = []
    data, bias = example(device, 2, 4, 6, 6), example(device, 6)
    for call, shape in ((F.conv2d, (6, 2, 3, 3)), (F.conv_transpose2d, (4, 3, 3, 3))):
        weight = example(device, *shape)
        output = call(data, weight, bias, stride=2, padding=1, groups=2)
        found.append(Sample(output, {_WEIGHT: weight, _BIAS: bias}))
    return found


_CONVOLUTION = Rule(
    node="ConvolutionBackward0",
    factors=(0, _WEIGHT),
    operands={_WEIGHT: ("input",)},
    weight=_WEIGHT,
    bias=_BIAS,
    shaped=(_WEIGHT,),
    settings=_CONVOLUTION_SETTINGS,
    gradients=_convolution_gradients,
    samples=_convolution_samples,
)


# -- embeddings: rows summed by index --------------------------------------------------------------

_EMBEDDING_SETTINGS = (
    "_saved_weight_sym_argsize_0",
    "_saved_padding_idx",
    "_saved_scale_grad_by_freq",
)


def _embedding_gradients(saved: Saved, incoming: Tensor, edges: Sequence[int]) -> list[Tensor]:
    settings = (saved.settings[name] for name in _EMBEDDING_SETTINGS)
    indices = saved.tensors["indices"]
    return [torch.ops.aten.embedding_dense_backward(incoming, indices, *settings) for _ in edges]


def _embedding_samples(device: torch.device) -> list[Sample]:
    weight = example(device, 5, 3)
    indices = torch.tensor([[1, 4, 1], [0, 2, 4]], device=device)
    plain = F.embedding(indices, weight)
    padded = F.embedding(indices, weight, padding_idx=2, scale_grad_by_freq=True)
    return [Sample(output, {0: weight}) for output in (plain, padded)]


_EMBEDDING = Rule(
    node="EmbeddingBackward0",
    factors=(0,),
    operands={0: ("indices",)},
    weight=0,
    takes_data=False,
    settings=_EMBEDDING_SETTINGS,
    accepts=lambda node: not node._saved_sparse,
    gradients=_embedding_gradients,
    samples=_embedding_samples,
)


# -- matrix products: plain, batched, with an addend, grouped --------------------------------------


def _product_rule(node: str, left: str, right: str, *, addend: bool, batched: bool) -> Rule:
    first = 1 if addend else 0

    def product(saved: Saved, incoming: Tensor, edge: int) -> Product:
        scale = saved.settings.get("_saved_alpha", 1)
        if edge == first:
            return Product(incoming, saved.tensors[right].mT, scale)
        return Product(saved.tensors[left].mT, incoming, scale)

    def gradients(saved: Saved, incoming: Tensor, edges: Sequence[int]) -> list[Tensor]:
        found = []
        for edge in edges:
            if addend and edge == 0:
                beta = saved.settings["_saved_beta"]
                scaled = incoming if beta == 1 else incoming * beta
                found.append(summed_to(scaled, saved.shapes[0]))
            elif edge in saved.flipped:
                found.append(product(saved, incoming, edge).turned().value().mT)
            else:
                found.append(product(saved, incoming, edge).value())
        return found

    def samples(device: torch.device) -> list[Sample]:
        batch = (2,) if batched else ()
        a, b = example(device, *batch, 4, 3), example(device, *batch, 3, 5)
        if not addend:
            return [Sample(torch.bmm(a, b) if batched else torch.mm(a, b), {0: a, 1: b})]
        c = example(device, 5)
        call = torch.baddbmm if batched else torch.addmm
        return [Sample(call(c, a, b, beta=0.5, alpha=1.5), {0: c, 1: a, 2: b})]

    return Rule(
        node=node,
        factors=(first, first + 1),
        operands={first: (right,), first + 1: (left,)},
        weight=first + 1,
        bias=0 if addend else None,
        shaped=(0,) if addend else (),
        settings=("_saved_alpha", "_saved_beta") if addend else (),
        gradients=gradients,
        product=product,
        samples=samples,
    )


def _grouped_gradients(saved: Saved, incoming: Tensor, edges: Sequence[int]) -> list[Tensor]:
    data, ends = saved.tensors["self"], saved.tensors["offs"]
    if 1 in saved.flipped:
        return [F.grouped_mm(incoming.mT, data, offs=ends).mT for _ in edges]
    return [F.grouped_mm(data.mT, incoming, offs=ends) for _ in edges]


def _grouped_samples(device: torch.device) -> list[Sample]:
    rows = example(device, 16, 16, dtype=torch.bfloat16)
    weights = example(device, 2, 16, 8, dtype=torch.bfloat16)
    ends = torch.tensor([8, 16], dtype=torch.int32, device=device)
    return [Sample(F.grouped_mm(rows, weights, offs=ends), {1: weights})]


_GROUPED = Rule(
    node="GroupedMmBackward0",
    factors=(0, 1),
    operands={1: ("self", "offs")},
    weight=1,
    # Rows in groups times one matrix per group; the other layouts have no weights in them.
    accepts=lambda node: (
        node._saved_offs is not None
        and len(node._saved_self_sym_sizes) == 2
        and len(node._saved_mat2_sym_sizes) == 3
    ),
    gradients=_grouped_gradients,
    samples=_grouped_samples,
    watches_hooks=False,
)


# -- which nodes are heavy: those with a rule that agrees with torch on this device ----------------

_LOG = logging.getLogger(__name__)
_RULES = {
    rule.node: rule
    for rule in (
        _product_rule("AddmmBackward0", "mat1", "mat2", addend=True, batched=False),
        _product_rule("MmBackward0", "self", "mat2", addend=False, batched=False),
        _product_rule("BmmBackward0", "self", "mat2", addend=False, batched=True),
        _product_rule("BaddbmmBackward0", "batch1", "batch2", addend=True, batched=True),
        _GROUPED,
        _CONVOLUTION,
        _EMBEDDING,
    )
}
_TOLERANCE = {torch.bfloat16: 2e-2}


@functools.cache
def rule_of(kind: Kind) -> Rule | None:
    """The rule of a type of node. A user's functions have other names than torch's nodes."""
    return _RULES.get(kind.__name__) if kind.__module__ == "builtins" else None


@functools.cache
def agrees(node: str, device: torch.device) -> bool:
    """Whether a node's rule gives what this torch gives; if not, the engine computes such nodes."""
    rule = _RULES[node]
    try:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            same = all(_same(rule, sample) for sample in rule.samples(device))
    except Exception as error:  # whatever it is, the engine can do without the rule
        _LOG.info("%s is not split on %s: %s", node, device, error)
        return False
    if not same:
        _LOG.warning("%s is not split on %s: its gradients differ from torch's", node, device)
    return same


def _same(rule: Rule, sample: Sample) -> bool:
    node = sample.output.grad_fn
    assert node is not None
    if node.name() != rule.node:
        return False
    edges = tuple(sample.leaves)
    shapes = {edge: leaf.shape for edge, leaf in sample.leaves.items()}
    names = [name for edge in edges for name in rule.operands.get(edge, ())]
    incoming = torch.cos(sample.output.detach())
    found = []
    for flipped in ((), edges):
        saved = read_saved(node, rule, names, shapes=shapes, flipped=flipped)
        found.append(rule.gradients(saved, incoming, edges))
    expected = torch.autograd.grad(
        GradientEdge(node, 0), list(sample.leaves.values()), grad_outputs=incoming
    )
    return all(
        _close(ours, theirs)
        for version in found
        for ours, theirs in zip(version, expected, strict=True)
    )


def _close(ours: Tensor, theirs: Tensor) -> bool:
    tolerance = _TOLERANCE.get(theirs.dtype, 1e-3)  # wide enough for tf32
    return ours.shape == theirs.shape and bool(
        torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    )
