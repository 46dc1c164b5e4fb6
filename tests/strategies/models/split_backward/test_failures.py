"""What goes wrong loudly: changed operands, second calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from strategies.models.split_backward.input_step import input_backward


def pending_of(x, gradient, module=None):
    module = module or nn.Linear(4, 3)
    return input_backward([module(x)], [gradient], [x] if x.requires_grad else [])


def test_a_gradient_buffer_that_is_used_again_before_w_is_noticed():
    gradient = torch.ones(2, 3)
    pending = pending_of(torch.randn(2, 4, requires_grad=True), gradient)
    gradient.zero_()
    with pytest.raises(RuntimeError, match="the incoming gradient"):
        pending.run()


def test_an_input_buffer_that_is_used_again_before_w_is_noticed():
    buffer = torch.randn(2, 4)
    pending = pending_of(buffer.detach().requires_grad_(), torch.ones(2, 3))
    buffer.fill_(0)
    with pytest.raises(RuntimeError, match=r"AddmmBackward0.*mat1"):
        pending.run()


def test_an_input_that_is_changed_before_i_is_noticed_by_torch():
    module, x = nn.Linear(4, 3), torch.randn(2, 4)
    y = module(x)
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        input_backward([y], [torch.ones(2, 3)], [])


def test_weights_may_change_between_i_and_w():
    module, x = nn.Conv1d(4, 3, 2), torch.randn(2, 4, 5, requires_grad=True)
    y = module(x)
    expected = torch.autograd.grad(y, module.weight, torch.ones_like(y), retain_graph=True)[0]
    pending = input_backward([y], [torch.ones_like(y)], [x])
    with torch.no_grad():
        module.weight.fill_(torch.nan)
    pending.run()
    torch.testing.assert_close(module.weight.grad, expected)


def test_weight_gradients_are_computed_once():
    module = nn.Linear(4, 3)
    pending = pending_of(torch.randn(2, 4, requires_grad=True), torch.ones(2, 3), module)
    pending.run()
    expected = module.weight.grad.clone()
    with pytest.raises(RuntimeError, match="already"):
        pending.run()
    assert torch.equal(module.weight.grad, expected)


def test_a_failing_w_keeps_nothing_for_a_second_try():
    pending = pending_of(torch.randn(2, 4, requires_grad=True), torch.ones(2, 3))

    def fail(_):
        raise ValueError("not ready")

    with pytest.raises(ValueError, match="not ready"):
        pending.run(fail)
    assert pending.parameters == ()


def test_outputs_and_gradients_must_match():
    with pytest.raises(ValueError, match="zip"):
        input_backward([torch.ones(1, requires_grad=True) * 2], [], [])


def test_a_missing_gradient_needs_a_scalar():
    with pytest.raises(RuntimeError, match="scalar"):
        pending_of(torch.randn(2, 4, requires_grad=True), None)


def test_nothing_to_do_is_no_error():
    pending = input_backward([torch.ones(1)], [torch.ones(1)], [])
    assert pending.parameters == ()
    pending.run()
