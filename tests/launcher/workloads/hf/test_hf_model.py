"""Experts of transformers' own layers where ranks share them; here there is one rank."""

from __future__ import annotations

import copy

import pytest
import torch

from launcher.workloads.hf.hf_model import HfLanguageModel, declare_experts
from strategies.errors import ModelError
from strategies.models.expert_parallel import ExpertRanks
from strategies.models.expert_parallel.expert_shares import named_expert_layers
from tests.tiny_models import shape_of, tiny_config, write_model


class Alone(ExpertRanks):
    """A rank with the experts from ``first`` on, that nobody else sends rows to."""

    def __init__(self, first: int) -> None:
        super().__init__(None)
        self.first = first

    def around(self, compute, rows, counts):
        own = counts[self.first :]
        mine = rows[int(counts[: self.first].sum()) :]
        return torch.cat((rows[: len(rows) - len(mine)] * 0.0, compute(mine, own)))


def bank_of(tmp_path, family):
    model = write_model(tmp_path, family)
    whole = next(m for n, m in model.named_modules() if n.endswith(".experts"))
    shared = copy.deepcopy(whole)
    declare_experts(shared, family)
    return whole, shared


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_rank_computes_its_own_experts_as_the_library_does(tmp_path, family):
    whole, shared = bank_of(tmp_path, family)
    ((_, layer),) = named_expert_layers(shared)
    assert type(shared).__name__ == type(whole).__name__
    assert layer.num_experts == 4
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(9, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(9, 2, generator=generator, dtype=torch.float64)
    ids = torch.rand(9, 4, generator=generator).topk(2).indices
    weights = torch.where(ids < 2, 0.0, weights)  # the first two are somewhere else
    expected = whole(tokens, ids, weights)
    wanted = torch.autograd.grad(expected.square().sum(), (tokens, whole.down_proj))
    shared.exchange = Alone(2)
    for name in layer.expert_parameters:
        part = torch.nn.Parameter(getattr(shared, name).detach()[2:].clone())
        setattr(shared, name, part)
    result = shared(tokens, ids, weights)
    found = torch.autograd.grad(result.square().sum(), (tokens, shared.down_proj))
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1][2:])
    assert layer.num_experts == 4


def test_experts_without_a_token_and_tokens_without_an_expert(tmp_path):
    _, shared = bank_of(tmp_path, "mixtral")
    shared.exchange = ExpertRanks(None)
    tokens = torch.ones(3, 32, dtype=torch.float64, requires_grad=True)
    past = torch.full((3, 2), 4)  # beyond the last: the token passes by
    result = shared(tokens, past, torch.ones(3, 2, dtype=torch.float64))
    assert not result.any()
    result.sum().backward()
    assert shared.down_proj.grad is not None
    assert not shared.down_proj.grad.any()


@pytest.mark.parametrize("family", ["dbrx", "llama4_text", "llama"])
def test_experts_of_another_kind_are_refused(tmp_path, family):
    tiny_config(family).save_pretrained(tmp_path)
    with torch.device("meta"):
        module = HfLanguageModel(shape_of(tmp_path, pretrained=False))
    with pytest.raises(ModelError, match="no layer whose experts the transformers library keeps"):
        module.declare_experts()
