"""Hooks on activations, modules, nodes and parameters see what they see in a full backward."""

from __future__ import annotations

import torch
from torch import nn

from strategies.models.split_backward.input_step import input_backward


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.log = []

    def forward(self, x):
        hidden = self.a(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad * 2)
            hidden.retain_grad()
            self.hidden = hidden
        return self.b(self.norm(hidden).tanh())


def both(prepare=lambda net: None):
    """The same net after a split backward and after a full one, with their inputs."""
    found = []
    for split in (True, False):
        torch.manual_seed(0)
        net = Net().double()
        prepare(net)
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        y = net(x)
        if split:
            input_backward([y], [torch.ones_like(y)], [x]).run()
        else:
            torch.autograd.backward([y], [torch.ones_like(y)])
        found.append((net, x))
    (ours, x), (theirs, expected) = found
    torch.testing.assert_close(x.grad, expected.grad)
    torch.testing.assert_close(ours.hidden.grad, theirs.hidden.grad)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert ours.log == theirs.log
    return ours, theirs


def test_hooks_of_activations_change_what_w_computes():
    both()


def test_hooks_of_modules_are_called_once():
    def prepare(net):
        for name, module in net.named_children():
            module.register_full_backward_hook(
                lambda m, gi, go, name=name: net.log.append((name, gi[0].sum().item()))
            )

    ours, _ = both(prepare)
    assert [name for name, _ in ours.log] == ["b", "norm", "a"]


def test_hooks_of_parameters_may_replace_the_gradient():
    def prepare(net):
        net.a.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        net.b.bias.register_hook(lambda grad: net.log.append(grad.sum().item()))

    ours, _ = both(prepare)
    assert ours.a.weight.grad.abs().max() <= 0.1
    assert len(ours.log) == 1


def test_ready_comes_after_the_last_of_several_contributions():
    layer = nn.Linear(4, 4).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    y = layer(layer(layer(x).tanh()).tanh())
    expected = torch.autograd.grad(y.sum(), [layer.weight, layer.bias], retain_graph=True)
    seen = []
    pending = input_backward([y], [torch.ones_like(y)], [x])
    pending.run(lambda p: seen.append((p, p.grad.clone())))
    assert [p for p, _ in seen] == [layer.weight, layer.bias]
    for (_, grad), wanted in zip(seen, expected, strict=True):
        torch.testing.assert_close(grad, wanted)


def test_parameters_get_ready_in_the_order_of_the_backward():
    net = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
    x = torch.randn(3, 4, requires_grad=True)
    y = net(x)
    pending = input_backward([y], [torch.ones_like(y)], [x])
    seen = []
    pending.run(seen.append)
    assert [id(p) for p in seen] == [id(p) for p in reversed(list(net.parameters()))]
    assert y.grad_fn is not None


def test_first_gradients_are_new_tensors_laid_out_like_their_parameters():
    conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    head = nn.Linear(4, 2)
    x = torch.randn(2, 4, 3, 3, requires_grad=True)
    y = head(conv(x).flatten(1))
    gradient = torch.randn_like(y)
    input_backward([y], [gradient], [x]).run()
    for p in (*conv.parameters(), *head.parameters()):
        assert p.grad.stride() == p.stride()
        assert p.grad._base is None
        assert p.grad.data_ptr() != gradient.data_ptr()


class Mixed(nn.Module):
    """The first layer's weight is the sum of those of the two behind it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        self.log = []

    def forward(self, x):
        hidden = nn.functional.linear(x, self.a + self.b)
        return nn.functional.linear(nn.functional.linear(hidden, self.b), self.a)


def test_hooks_of_a_parameter_in_the_weights_of_several_layers_see_the_sum():
    found = []
    for split in (True, False):
        torch.manual_seed(0)
        net = Mixed().double()
        for name, parameter in net.named_parameters():
            parameter.register_hook(lambda grad, net=net, name=name: net.log.append((name, grad)))
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        y = net(x)
        if split:
            input_backward([y], [torch.ones_like(y)], [x]).run()
        else:
            torch.autograd.backward([y], [torch.ones_like(y)])
        found.append(dict(net.log))
        assert len(net.log) == 2
    assert found[0].keys() == found[1].keys()
    for name, grad in found[0].items():
        torch.testing.assert_close(grad, found[1][name])
