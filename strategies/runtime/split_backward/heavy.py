"""Which nodes are heavy: those with a rule that agrees with torch on this device."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from strategies.runtime.split_backward.convolution import CONVOLUTION
from strategies.runtime.split_backward.embedding import EMBEDDING
from strategies.runtime.split_backward.graph import Kind
from strategies.runtime.split_backward.matmul import RULES as PRODUCTS
from strategies.runtime.split_backward.rule import Rule, Sample
from strategies.runtime.split_backward.saved import read_saved

_LOG = logging.getLogger(__name__)
_RULES = {rule.node: rule for rule in (*PRODUCTS, CONVOLUTION, EMBEDDING)}
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
    saved = read_saved(node, rule, names, shapes=shapes, flipped=())
    turned = read_saved(node, rule, names, shapes=shapes, flipped=edges)
    incoming = torch.cos(sample.output.detach())
    found = [rule.gradients(version, incoming, edges) for version in (saved, turned)]
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
