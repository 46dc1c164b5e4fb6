"""What runs while input gradients are added up, and how many sums there are."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from strategies.models.split_backward.input_step import input_backward
from strategies.models.tensor_parallel.regions import Entrance
from strategies.models.tensor_parallel.sharded_layers import ColumnLinear, RowLinear
from strategies.runtime.step.stage_compute import backward_under_sums
from tests.strategies.models.tensor_parallel.fake_ranks import FakeRanks


class Half(nn.Module):
    """Three column layers that read one tensor, a row layer, a residual."""

    def __init__(self, ranks):
        super().__init__()
        torch.manual_seed(0)
        entrance = Entrance(ranks)
        entrance.forget_after(self)
        self.norm = nn.LayerNorm(4)
        self.columns = nn.ModuleList(
            ColumnLinear(nn.Parameter(torch.randn(6, 4)), None, entrance=entrance) for _ in range(3)
        )
        self.row = RowLinear(
            nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(4)), ranks=ranks
        )

    def forward(self, stream):
        normed = self.norm(stream)
        first, second, third = (column(normed) for column in self.columns)
        return stream + self.row(functional.silu(first) * second + third)


def net_of(ranks, blocks=2):
    net = nn.Sequential(*(Half(ranks) for _ in range(blocks))).double()
    for name, parameter in net.named_parameters():
        if "norm" not in name and "bias" not in name:
            parameter.register_post_accumulate_grad_hook(notes(ranks, name.partition(".")[2]))
    return net


def notes(ranks, word):
    return lambda _: ranks.events.append(word)


@pytest.mark.parametrize("sequence", [False, True])
def test_weight_gradients_run_between_begin_and_end_of_each_sum(sequence):
    ranks = FakeRanks(sequence=sequence)
    net = net_of(ranks)
    stream = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    output = net(stream)
    ranks.events.clear()
    backward_under_sums(ranks, [output], [torch.ones_like(output)], [stream])
    begin = ["gather", "share begins"] if sequence else ["sum begins"]
    weights = {"row.weight", *(f"columns.{i}.weight" for i in range(3))}
    block = len(begin) + len(weights) + 1
    assert len(ranks.events) == 2 * block
    for events in (ranks.events[:block], ranks.events[block:]):
        assert events[: len(begin)] == begin
        assert set(events[len(begin) : -1]) == weights
        assert events[-1] == "ends"
    assert ranks.meanwhile is None


def test_gradients_are_those_of_a_plain_backward():
    ranks = FakeRanks()
    net = net_of(ranks)
    stream = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    net(stream).square().sum().backward()
    expected = [p.grad.clone() for p in net.parameters()] + [stream.grad.clone()]
    net.zero_grad()
    stream.grad = None
    output = net(stream).square().sum()
    backward_under_sums(ranks, [output], [torch.ones_like(output)], [stream])
    found = [p.grad for p in net.parameters()] + [stream.grad]
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, rtol=1e-13, atol=1e-13)


def test_a_shared_weight_gets_all_its_gradients_at_the_end():
    ranks = FakeRanks()
    net = net_of(ranks, blocks=1)
    stream = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    twice = nn.Sequential(net, net)
    twice(stream).sum().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    output = twice(stream).sum()
    ranks.events.clear()
    backward_under_sums(ranks, [output], [torch.ones_like(output)], [stream])
    assert ranks.events[:4] == ["sum begins", "ends", "sum begins", "ends"]
    for one, parameter in zip(expected, net.parameters(), strict=True):
        assert torch.allclose(one, parameter.grad, rtol=1e-13, atol=1e-13)


def test_a_split_backward_sums_in_its_first_half_only():
    ranks = FakeRanks()
    net = net_of(ranks)
    stream = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    output = net(stream)
    ranks.events.clear()
    pending = input_backward([output], [torch.ones_like(output)], [stream])
    # One sum per block: three layers share an entrance.
    assert ranks.events == ["sum begins", "ends"] * 2
    ranks.events.clear()
    pending.run()
    assert len(ranks.events) == 8
    assert not any(word in ("sum", "sum begins", "ends") for word in ranks.events)


def test_nothing_is_summed_where_nobody_needs_a_gradient():
    ranks = FakeRanks()
    net = net_of(ranks, blocks=1)
    with torch.no_grad():
        net(torch.ones(1, 2, 4, dtype=torch.float64))
    assert ranks.events == ["sum"]  # the row layer's
