"""Where gradients lie: the types of their sums, buckets and shares, and those outside a buffer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from strategies.runtime.update.gradient_layout import FlatLayout, Loose, Share, main_dtype


@pytest.mark.parametrize(
    ("weights", "sums"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32"),
     ("float64", "float64")],
)  # fmt: skip
def test_gradients_of_short_types_are_summed_in_32_bits(weights, sums):
    dtype, wanted = getattr(torch, weights), getattr(torch, sums)
    assert main_dtype(dtype) == wanted
    parameter = nn.Parameter(torch.zeros(2, dtype=dtype))
    share = Share(parameter, torch.zeros(2, dtype=wanted), (0,), torch.zeros(1), grouped=False)
    assert share.widened == (weights != sums)


def test_a_loose_gradient_is_that_of_autograd_made_dense():
    parameter = nn.Parameter(torch.zeros(3, 2))
    loose = Loose(parameter)
    loose.take()
    assert loose.sum is None
    parameter.grad = torch.ones(3, 2)
    loose.take()
    assert loose.sum is parameter.grad
    parameter.grad = None
    loose.take()
    assert torch.equal(loose.sum, torch.ones(3, 2))
    nn.functional.embedding(torch.tensor([1, 1]), parameter, sparse=True).sum().backward()
    loose.take()
    assert loose.sum is parameter.grad
    assert loose.sum.layout is torch.strided
    assert loose.sum.tolist() == [[0, 0], [2, 2], [0, 0]]


@pytest.mark.parametrize("sizes", [(5, 2), (1,), (3, 3, 3), (7, 0, 6)])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("shares", [1, 2, 4])
def test_every_element_is_owned_once_and_each_part_lies_in_its_buckets(sizes, count, shares):
    layout = FlatLayout(sizes, count, shares)
    length = layout.bounds[-1]
    assert sum(sizes) <= length < sum(sizes) + shares
    owned = [i for m in range(shares) for low, high in layout.owned(m) for i in range(low, high)]
    assert sorted(owned) == list(range(length))
    for part, (start, size) in enumerate(zip(layout.starts, sizes, strict=True)):
        pieces = [piece for m in range(shares) for piece in layout.pieces(part, m)]
        covered = sorted(i for low, high in pieces for i in range(low, high))
        assert covered == list(range(start, start + size))
        met = {k for i in covered for k in range(count)
               if layout.bounds[k] <= i < layout.bounds[k + 1]}  # fmt: skip
        assert set(layout.buckets_of(start, start + size)) == met


def test_a_tail_is_behind_all_parts_and_moves_no_other_bucket():
    plain, tailed = FlatLayout((4, 4), 2), FlatLayout((4, 4), 2, tail=3)
    assert plain.bounds == (0, 4, 8)
    assert tailed.bounds == (0, 4, 11)
    assert tailed.buckets_of(8, 11) == (1,)
