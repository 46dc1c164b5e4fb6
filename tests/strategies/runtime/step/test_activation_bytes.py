"""What autograd holds for a stage, counted storage by storage."""

from __future__ import annotations

import torch
from torch import nn

from strategies.models.selective.region import SelectiveLayer
from strategies.models.split_backward.input_step import input_backward
from strategies.runtime.step.activation_bytes import ActivationBytes

ROW = 6 * 4  # bytes of six 32-bit numbers


def measured(module, length=4):
    found = ActivationBytes(module)
    found.begin(length, ())
    return found


def test_each_storage_counts_once_and_parameters_do_not():
    module = nn.Linear(6, 6)
    x = torch.randn(5, 6, requires_grad=True)
    y = torch.exp(module(x))  # exp keeps its result, the product x
    total = (y * y.view(5, 6)).sum()  # the product keeps that result, too
    found = measured(module)
    found.graph(0, 0, (x,), (total,))
    found.sample(0)
    assert found.stages[0].full == found.held[0] == 2 * 5 * ROW


def test_what_a_backward_frees_is_no_longer_held():
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    found = measured(module)
    outputs = []
    for microbatch in range(2):
        x = torch.randn(5, 6, requires_grad=True)
        outputs.append(module(x).sum())
        found.graph(0, microbatch, (x,), (outputs[-1],))
        del x
        found.sample(microbatch)
    outputs.pop(0).backward()
    found.sample(2)
    outputs.pop().backward()
    found.sample(3)
    one = 2 * 5 * ROW
    assert found.held == [one, 2 * one, one, 0]
    assert found.peak == 2 * one


def test_constants_of_several_microbatches_and_the_batch_do_not_count():
    module = nn.Linear(6, 6)
    constant, batch = torch.randn(5, 6), torch.randn(5, 6)
    found = ActivationBytes(module)
    found.begin(1, (batch,))
    outputs = []
    for microbatch in range(2):
        x = torch.randn(5, 6, requires_grad=True)
        outputs.append((module(x) * constant + x * batch).sum())
        found.graph(0, microbatch, (x,), (outputs[-1],))
    del x
    found.sample(0)
    assert found.stages[0].full == 5 * ROW
    assert found.held == [2 * 5 * ROW]


def test_what_waits_for_a_weight_gradient_is_its_operand_and_its_gradient():
    module = nn.Linear(6, 3)
    found = measured(module)
    x = torch.randn(5, 6, requires_grad=True)
    total = torch.exp(module(x)).sum()
    found.graph(0, 0, (x,), (total,))
    found.sample(0)
    pending = input_backward([total], [torch.ones_like(total)], [x])
    del total
    found.note("waiting", 0, 0, pending.held)
    found.sample(1)
    del x
    pending.run()
    found.sample(2)
    assert found.stages[0].full == 5 * ROW + 5 * ROW // 2
    assert found.stages[0].waiting == found.held[1] == 5 * ROW + 5 * ROW // 2
    assert found.held[2] == 0


def test_saved_tensors_of_users_functions_count():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x + 1)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    found = measured(nn.Identity())
    x = torch.randn(5, 6, requires_grad=True)
    y = Double.apply(x).sum()
    found.graph(0, 0, (), (y,))
    assert found.stages[0].full == 5 * ROW


def test_a_layer_that_recomputes_holds_its_input_and_its_products():
    module = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Tanh(), nn.Linear(6, 100))
    found = measured(module)
    x = torch.randn(5, 6, requires_grad=True)
    layer = SelectiveLayer(module, frozenset({"activation"}))
    layer.run(module, (x,), {})  # the first call works on copies
    y = layer.run(module, (x,), {}).sum()
    found.graph(0, 0, (x,), (y,))
    # The first product's result, from which the rest follows. Nobody asks for the last one's.
    assert found.stages[0].full == 2 * 5 * ROW
