"""Rules are compared with torch before they are used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from strategies.models.split_backward import rules as heavy
from strategies.models.split_backward.input_step import input_backward

CPU = torch.device("cpu")
PRODUCT = heavy._RULES["MmBackward0"]


@pytest.mark.parametrize("node", heavy._RULES)
def test_rules_agree_with_torch(node):
    assert heavy.agrees(node, CPU)


@pytest.fixture
def changed(monkeypatch):
    def change(**fields):
        rules = {**heavy._RULES, "MmBackward0": replace(PRODUCT, **fields)}
        monkeypatch.setattr(heavy, "_RULES", rules)
        heavy.agrees.cache_clear()
        heavy.rule_of.cache_clear()

    yield change
    monkeypatch.undo()
    heavy.agrees.cache_clear()
    heavy.rule_of.cache_clear()


def wrong(saved, incoming, edges):
    return [2 * value for value in PRODUCT.gradients(saved, incoming, edges)]


def fails(device):
    raise RuntimeError("no such operation on this device")


@pytest.mark.parametrize("fields", [{"gradients": wrong}, {"samples": fails}])
def test_a_rule_that_differs_or_fails_leaves_its_nodes_to_the_engine(changed, fields):
    changed(**fields)
    layer, biased = nn.Linear(4, 3, bias=False), nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    y = layer(biased(x))
    expected = torch.autograd.grad(y.sum(), list(layer.parameters()), retain_graph=True)
    pending = input_backward([y], [torch.ones_like(y)], [x])
    assert pending.parameters == (biased.weight, biased.bias)
    torch.testing.assert_close(layer.weight.grad, expected[0])


def test_the_comparison_draws_no_random_numbers():
    heavy.agrees.cache_clear()
    before = torch.get_rng_state()
    assert all(heavy.agrees(node, CPU) for node in heavy._RULES)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_users_function_named_like_a_node_is_not_mistaken_for_it():
    class MmBackward0(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad @ w.t(), 3 * x.t() @ grad

    w = nn.Parameter(torch.randn(4, 3))
    x = torch.randn(2, 4, requires_grad=True)
    y = MmBackward0.apply(x, w)
    type(y.grad_fn).__name__ = "MmBackward0"
    assert heavy.rule_of(type(y.grad_fn)) is None
    assert input_backward([y], [torch.ones_like(y)], [x]).parameters == ()
    torch.testing.assert_close(w.grad, 3 * x.detach().t() @ torch.ones(2, 3))
