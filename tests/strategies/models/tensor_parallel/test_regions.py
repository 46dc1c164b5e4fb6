"""What runs while input gradients are added up, and how many sums there are."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from strategies.models.selective.region import SelectiveLayer
from strategies.models.split_backward.autograd_graph import walk
from strategies.models.split_backward.input_step import backward_under_sums, input_backward
from strategies.models.tensor_parallel.layer_plan import declared_plan
from strategies.models.tensor_parallel.sharding import Sharding
from strategies.runtime.step.activation_bytes import saved_tensors
from tests.strategies.models.tensor_parallel.fake_ranks import FakeRanks


class Half(nn.Module):
    """Three column layers that read one tensor, a row layer, a residual."""

    def __init__(self, ranks):
        super().__init__()
        torch.manual_seed(0)
        inner = 6 * ranks.size
        self.norm = nn.LayerNorm(4)
        self.columns = nn.ModuleList(nn.Linear(4, inner, bias=False) for _ in range(3))
        self.row = nn.Linear(inner, 4)
        for layer in (*self.columns, self.row):
            nn.init.normal_(layer.weight)
        Sharding(self, declared_plan(self, ranks.size), ranks).apply()

    def tensor_parallel_plan(self):
        return {"columns.*": "colwise", "row": "rowwise"}

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
    begin = ["gather", "gather again", "share begins"] if sequence else ["sum begins"]
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


def kept_bytes(output, shares):
    """What the graph keeps, weights not counted, of blocks of which each rank has a share."""
    weights = {t.untyped_storage().data_ptr() for t in shares}
    kept = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in saved_tensors(walk([output], ()).nodes)
    }
    return sum(size for place, size in kept.items() if place not in weights)


def test_sequence_parallel_layers_keep_their_share_of_what_they_gather():
    ranks = FakeRanks(size=4, sequence=True)
    net = net_of(ranks, blocks=1)
    stream = torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True)
    output = net(stream)
    share, gathered = 8 * stream.numel(), 4 * 8 * stream.numel()
    inner = 6 * gathered // 4
    # Norm: input and two numbers per token. Share. First, its silu, second, product, third: 5 less
    # the third, which nothing asks for, and what the row layer reads.
    expected = share + 2 * 8 * 2 + share + 4 * inner
    assert kept_bytes(output, [*net.parameters()]) == expected


@pytest.mark.parametrize("recomputed", [(), ("attention",), ("norm",), ("norm", "activation")])
def test_a_gathered_input_is_never_kept_whichever_families_are_recomputed(recomputed):
    ranks = FakeRanks(size=4, sequence=True)
    net = net_of(ranks, blocks=1)
    stream = torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True)
    gathered = (1, 8, 4)

    def gradients(output):
        found = torch.autograd.grad(output.sum(), [stream, *net.parameters()])
        return [gradient.clone() for gradient in found]

    expected = gradients(net(stream))
    output = SelectiveLayer(net, frozenset(recomputed)).run(net, (stream,), {})
    kept = [t for t in saved_tensors(walk([output], ()).nodes) if t.shape in (gathered, (8, 4))]
    assert not kept
    for one, other in zip(expected, gradients(output), strict=True):
        assert torch.equal(one, other)


def test_a_split_backward_gathers_again_with_the_weights_once_per_entrance():
    ranks = FakeRanks(sequence=True)
    net = net_of(ranks)
    stream = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    net(stream).square().sum().backward()
    expected = [p.grad.clone() for p in net.parameters()] + [stream.grad.clone()]
    net.zero_grad()
    stream.grad = None
    output = net(stream).square().sum()
    ranks.events.clear()
    pending = input_backward([output], [torch.ones_like(output)], [stream])
    assert "gather again" not in ranks.events
    shares = [t for t in pending.held if t.shape[1:] == (8, 4)]
    assert not shares
    ranks.events.clear()
    pending.run()
    assert ranks.events.count("gather again") == 2
    found = [p.grad for p in net.parameters()] + [stream.grad]
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, rtol=1e-13, atol=1e-13)


def test_mixed_precision_gathers_again_in_the_smaller_type():
    ranks = FakeRanks(sequence=True)
    net = net_of(ranks, blocks=1).float()
    stream = torch.randn(2, 4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = net(stream)
    kept = list(saved_tensors(walk([output], ()).nodes))
    assert not [t for t in kept if t.shape in ((2, 8, 4), (16, 4))]
    output.float().sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_nothing_is_summed_where_nobody_needs_a_gradient():
    ranks = FakeRanks()
    net = net_of(ranks, blocks=1)
    with torch.no_grad():
        net(torch.ones(1, 2, 4, dtype=torch.float64))
    assert ranks.events == ["sum"]  # the row layer's
