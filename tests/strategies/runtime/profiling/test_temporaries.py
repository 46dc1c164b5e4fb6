import pytest
import torch

from strategies.runtime.profiling.temporaries import transient

CPU = torch.device("cpu")


def test_what_stays_and_what_was_there_for_a_while():
    data = torch.zeros(1000)

    def call():
        doubled = data * 2  # gone in the end
        return doubled + 1

    _, stayed, most = transient(CPU, call)
    assert stayed == 4000
    assert 8000 <= most < 8200  # and a scalar or two


def test_a_backward_gives_back_more_than_it_takes():
    weight = torch.zeros(100, 100, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    data = torch.zeros(50, 100)
    loss = torch.tanh(data @ weight).sum()
    _, stayed, most = transient(CPU, loss.backward)
    assert stayed <= 0
    # The gradients behind and before tanh, or of the product and the weight.
    assert 20_000 <= most <= 80_000


def test_errors_go_through():
    def call():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        transient(CPU, call)
