"""Which nodes are heavy: those with a rule that agrees with torch on this device."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from strategies.runtime.split_backward.convolution import CONVOLUTION
from strategies.runtime.split_backward.embedding import EMBEDDING
from strategies.runtime.split_backward.matmul import RULES as PRODUCTS
from strategies.runtime.split_backward.rule import Rule, Sample
from strategies.runtime.split_backward.saved import read_saved

_LOG = logging.getLogger(__name__)
_RULES = {rule.node: rule for rule in (*PRODUCTS, CONVOLUTION, EMBEDDING)}
_TOLERANCE = {torch.bfloat16: 2e-2}


@functools.cache
def rule_of(kind: type) -> Rule | None:
    """The rule of a type of node. Functions that users write have other names than torch's."""
    return _RULES.get(kind.__name__) if kind.__module__ == "builtins" else None


@functools.cache
def agrees(rule: Rule, device: torch.device) -> bool:
    """Whether the rule gives what this torch gives; if not, such nodes are left to the engine."""
    try:
        with (
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
            torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)
            if False
            else torch.enable_grad(),
        ):
            same = all(_same(rule, sample) for sample in rule.samples(device))
    except (RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
        _LOG.info("%s is not split on %s: %s", rule.node, device, error)
        return False
    if not same:
        _LOG.warning("%s is not split on %s: the gradients differ from torch's", rule.node, device)
    return same
