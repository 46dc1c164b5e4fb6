"""A rank holds its slice of the experts; what cannot be spread is refused."""

import pytest
import torch
from torch import nn

from strategies.errors import ModelError
from strategies.models.expert_parallel import ExpertRanks, ExpertShares


class Layer(nn.Module):
    expert_parameters = ("up",)

    def __init__(self, num_experts):
        super().__init__()
        self.num_experts = num_experts
        self.exchange = None
        self.up = nn.Parameter(torch.arange(num_experts * 2.0).view(num_experts, 2))


class Some(ExpertRanks):
    """Rank 1 of two that never talk."""

    def __init__(self, size=2):
        super().__init__(None)
        self.rank, self.size = 1, size


class Slicers:
    """The second of two ranks that share each expert."""

    rank, size = 1, 2


def test_a_rank_keeps_its_experts_and_who_has_the_others():
    module = nn.Sequential(nn.Linear(2, 2), Layer(4))
    ranks = Some()
    shares = ExpertShares(module, ranks)
    assert {name: (s.dim, s.size, s.parts) for name, s in shares.shards.items()} == {
        "1.up": (0, 4, 2)
    }
    shares.apply(module, "1")
    assert module[1].up.tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert module[1].exchange is ranks


class Wide(Layer):
    expert_slices = {"up": 1}  # noqa: RUF012

    def __init__(self):
        super().__init__(4)
        self.up = nn.Parameter(torch.arange(16.0).view(4, 4))


def test_a_rank_keeps_its_part_of_each_of_its_experts():
    module, ranks = nn.Sequential(Wide()), Some()
    ranks.slicers = Slicers()
    ExpertShares(module, ranks).apply(module, "0")
    assert ranks.place == 3
    assert module[0].up.tolist() == [[10.0, 11.0], [14.0, 15.0]]


class Misnamed(Layer):
    expert_parameters = ("up", "down")


class Flat(Layer):
    def __init__(self, num_experts):
        super().__init__(num_experts)
        self.up = nn.Parameter(torch.zeros(2, num_experts))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(4), Layer(4)
        self.second.up = self.first.up


@pytest.mark.parametrize(
    ("layer", "ep", "message"),
    [
        (Layer(6), 4, "ep=4 does not divide the 6 experts of 1. Try ep=3."),
        (nn.Linear(2, 2), 2, "no layer that declares experts"),
        (Misnamed(4), 2, "of 1 names 'down', and the layer has no such parameter. .*: up."),
        (Flat(4), 2, r"1.up has the shape \(2, 4\), and its layer says num_experts=4"),
        (Twice(), 2, "1.second.up and 1.first.up are one parameter"),
    ],
)
def test_experts_that_cannot_be_spread_are_refused(layer, ep, message):
    with pytest.raises(ModelError, match=message):
        ExpertShares(nn.Sequential(nn.Linear(2, 2), layer), Some(ep))


def test_a_single_rank_computes_its_rows_itself():
    rows, counts = torch.ones(3, 2), torch.tensor([1, 2])
    result = ExpertRanks(None).around(lambda r, c: r * c.sum(), rows, counts)
    assert torch.equal(result, 3 * rows)
