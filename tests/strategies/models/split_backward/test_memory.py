"""What is alive after F, I and W. The garbage collector is off: nothing may wait for it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from strategies.models.split_backward.input_step import input_backward
from tests.strategies.models.split_backward.cases import CASES
from tests.strategies.models.split_backward.harness import attach, flatten, forward, start
from tests.strategies.models.split_backward.live_bytes import LiveBytes

ROWS, DIM, DEPTH = 32, 16, 5
ACTIVATION = ROWS * DIM * 8


@pytest.fixture(autouse=True, scope="module")
def no_garbage_collector():
    # Rules are compared with torch once, and torch imports parts of itself when first used.
    for _ in range(2):
        with LiveBytes():
            warm, x = stack(nn.Tanh, nn.GELU), example()
            y = warm(x)
            input_backward([y], [torch.ones_like(y)], [x]).run()
    gc.disable()
    yield
    gc.enable()


def example():
    return torch.randn(ROWS, DIM, dtype=torch.float64, requires_grad=True)


def stack(*between):
    layers = []
    for _ in range(DEPTH):
        layers += [nn.Linear(DIM, DIM), *(layer() for layer in between)]
    return attach(nn.Sequential(*layers).double()).module


def test_after_i_only_products_operands_and_their_gradients_are_left():
    module = stack(nn.Tanh, nn.GELU)
    x = example()
    with LiveBytes() as live:
        y = module(x)
        # Every layer keeps what tanh and GELU gave.
        assert live() == 2 * DEPTH * ACTIVATION
        pending = input_backward([y], [torch.ones_like(y)], [x])
        del y
        # A data operand (the first one is x) and a gradient for each layer, and x's gradient.
        assert live() == ((DEPTH - 1) + DEPTH + 1) * ACTIVATION
        pending.run()
        assert live() == ACTIVATION


def test_w_frees_each_layer_as_it_goes():
    module = stack(nn.Tanh)
    x = example()
    seen = []
    with LiveBytes() as live:
        y = module(x)
        pending = input_backward([y], [torch.ones_like(y)], [x])
        del y
        pending.run(lambda _: seen.append(live()))
    # Weight and bias get ready together; a layer's operands go when the next one is at work.
    drops = [a - b for a, b in zip(seen[::2], seen[2::2], strict=False)]
    assert len(drops) == DEPTH - 1
    assert all(drop >= ACTIVATION for drop in drops)


@pytest.mark.parametrize("name", CASES)
def test_after_w_nothing_is_left(name):
    case = CASES[name]
    ours, _ = start(case)
    for _ in range(2):
        with LiveBytes() as live:
            outputs, gradients = forward(ours, case, 0)
            pending = input_backward(outputs, gradients, ours.inputs[-1])
            del outputs, gradients
            pending.run()
            ours.inputs.clear()
            assert live() == 0


def test_an_exception_in_i_leaves_nothing_behind():
    module = stack(nn.Tanh)
    x = example()

    def fail(_):
        raise ValueError("in the middle")

    with LiveBytes() as live:
        y = x.detach().requires_grad_()
        for index, layer in enumerate(module):
            y = layer(y)
            if index == DEPTH:
                y.register_hook(fail)
        with pytest.raises(ValueError, match="in the middle"):
            input_backward([y], [torch.ones_like(y)], [x])
        del y, layer
        assert live() == 0


def test_an_exception_in_i_leaves_no_hooks_on_the_graph():
    module = stack(nn.Tanh)
    x = example()
    y = module(x)
    failing = y.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        input_backward([y], [torch.ones_like(y)], [x])
    failing.remove()
    before = [p.grad.clone() for p in module.parameters()]
    assert not any(grad.any() for grad in before)
    # Nothing had run yet, so the same graph serves a full backward.
    with LiveBytes() as live:
        torch.autograd.backward(flatten(y), [torch.ones_like(y)])
        del y
        assert live() == ACTIVATION  # of x alone: no hook has caught a gradient
    assert all(p.grad.any() for p in module.parameters())
