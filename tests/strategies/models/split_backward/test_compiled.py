"""Compiled regions run wholly in I; what is around them still waits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from strategies.models.split_backward.input_step import input_backward


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_block_between_layers(first):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    last = nn.Linear(4, 2).double()
    others = copy.deepcopy((block, last))
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for microbatch in range(2):
        torch.manual_seed(microbatch)
        data = torch.randn(3, 4, dtype=torch.float64)
        mine, other = (data.clone().requires_grad_(not first) for _ in range(2))
        y = last(compiled(mine))
        pending = input_backward([y], [torch.ones_like(y)], [] if first else [mine])
        assert pending.parameters == (last.weight, last.bias)
        assert all(p.grad is not None for p in block.parameters())
        pending.run()
        others[1](others[0](other)).sum().backward()
        if not first:
            torch.testing.assert_close(mine.grad, other.grad)
    for ours, theirs in zip((block, last), others, strict=True):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-13)
