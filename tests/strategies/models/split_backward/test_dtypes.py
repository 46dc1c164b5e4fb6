"""Lower precision: casts, autocast, gradients in a wider type than their parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from strategies.models.split_backward.input_step import input_backward

WEIGHTS = {"0.weight", "0.bias", "3.weight", "3.bias"}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))


def run(module, *, split, dtype=torch.float32, autocast=False, microbatches=3):
    """Gradients after some microbatches; with autocast the casts of weights are shared by all."""
    pending, found, waits = [], [], set()
    names = {id(p): name for name, p in module.named_parameters()}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for microbatch in range(microbatches):
            torch.manual_seed(microbatch)
            x = torch.randn(6, 8, dtype=dtype, requires_grad=True)
            found.append((module(x), x))
    for y, x in found:
        if split:
            pending.append(input_backward([y], [torch.ones_like(y)], [x]))
            waits |= {names[id(p)] for p in pending[-1].parameters}
        else:
            y.backward(torch.ones_like(y))
    for item in pending:
        item.run()
    assert waits == (WEIGHTS if split else set())
    return [p.grad for p in module.parameters()] + [x.grad for _, x in found]


def exactly(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_autocast_gives_the_same_bits():
    module = net()
    other = copy.deepcopy(module)
    exactly(
        *(
            run(each, split=each is module, autocast=True, microbatches=1)
            for each in (module, other)
        )
    )


def test_a_backward_under_autocast_keeps_the_types_of_the_forward():
    module = net()
    other = copy.deepcopy(module)
    theirs = run(other, split=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pending, inputs = [], []
        for microbatch in range(3):
            torch.manual_seed(microbatch)
            x = torch.randn(6, 8, requires_grad=True)
            with torch.autocast("cpu", enabled=False):
                y = module(x)
                pending.append(input_backward([y], [torch.ones_like(y)], [x]))
            inputs.append(x)
        for item in pending:
            item.run()
    ours = [p.grad for p in module.parameters()] + [x.grad for x in inputs]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_bfloat16_gives_the_same_bits():
    module = net().bfloat16()
    other = copy.deepcopy(module)
    exactly(
        run(module, split=True, dtype=torch.bfloat16, microbatches=1),
        run(other, split=False, dtype=torch.bfloat16, microbatches=1),
    )


@pytest.mark.parametrize("present", [True, False])
def test_bfloat16_parameters_with_float32_gradients_give_the_same_bits(present):
    found = []
    for split in (True, False):
        module = net().bfloat16()
        for p in module.parameters():
            p.grad_dtype = torch.float32
            if present:
                p.grad = torch.zeros_like(p, dtype=torch.float32)
        found.append(run(module, split=split, dtype=torch.bfloat16))
    assert all(g.dtype is torch.float32 for g in found[0][: len(list(module.parameters()))])
    exactly(*found)


def test_grouped_products_wait():
    found = []
    for split in (True, False):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(2, 16, 8, dtype=torch.bfloat16))
        turned = nn.Parameter(torch.randn(2, 16, 8, dtype=torch.bfloat16))
        x = torch.randn(16, 16, dtype=torch.bfloat16, requires_grad=True)
        ends = torch.tensor([8, 16], dtype=torch.int32)
        y = nn.functional.grouped_mm(x, weight, offs=ends)
        y = nn.functional.grouped_mm(y, turned.transpose(-2, -1), offs=ends)
        if split:
            pending = input_backward([y], [torch.ones_like(y)], [x])
            assert pending.parameters == (turned, weight)
            assert weight.grad is None
            pending.run()
        else:
            y.backward(torch.ones_like(y))
        found.append((x.grad, weight.grad, turned.grad))
    exactly(*found)
