from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from strategies.runtime.update.grad_sync import StageGradients, clip_
from strategies.runtime.update.gradient_layout import FlatLayout
from strategies.runtime.update.main_weights import MainWeights
from tests.emulated_device import CUDA, emulated_device


def accumulate(parameter, gradient, times):
    for _ in range(times):
        (parameter * gradient).sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_long_sum_of_short_gradients_is_not_lost(dtype):
    parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
    gradients = StageGradients.build(0, [parameter], count=1, group=None)
    gradients.attach(zero=True)
    accumulate(parameter, torch.ones(3, dtype=dtype), 3000)
    assert parameter.grad is None
    assert gradients.buffers[0].flat[:3].tolist() == [3000.0] * 3
    plain = nn.Parameter(torch.zeros(3, dtype=dtype))
    accumulate(plain, torch.ones(3, dtype=dtype), 3000)
    assert plain.grad is not None
    assert plain.grad.tolist() < [3000.0] * 3  # What the wider sum is for.


def test_small_updates_of_short_weights_add_up():
    parameter = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    gradients = StageGradients.build(0, [parameter], count=1, group=None)
    mains = MainWeights.build(gradients)
    assert mains is not None
    (piece,) = mains.pieces[id(parameter)]
    assert (piece.main.dtype, piece.main.shape) == (torch.float32, parameter.shape)
    optimizer = torch.optim.SGD([piece.main], lr=1e-4)
    for _ in range(1000):
        gradients.attach(zero=True)
        accumulate(parameter, torch.ones(2, 3, dtype=torch.bfloat16), 1)
        gradients.end()
        gradients.show()
        assert parameter.grad is None
        optimizer.step()
        mains.updated()
    assert torch.allclose(piece.main.detach(), torch.full((2, 3), 0.9), atol=1e-4)
    assert torch.equal(parameter.detach(), piece.main.detach().bfloat16())
    assert torch.ones(1, dtype=torch.bfloat16) - 1e-4 == 1  # One such update alone is nothing.


def test_wide_weights_have_no_copy():
    parameter = nn.Parameter(torch.ones(3))
    gradients = StageGradients.build(0, [parameter], count=2, group=None)
    assert MainWeights.build(gradients) is None
    gradients.attach(zero=True)
    assert parameter.grad is not None
    assert parameter.grad.data_ptr() == gradients.buffers[0].flat.data_ptr()


def test_weights_that_were_loaded_reach_the_copy_and_others_keep_their_rest():
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    gradients = StageGradients.build(0, [parameter], count=1, group=None)
    mains = MainWeights.build(gradients)
    assert mains is not None
    (piece,) = mains.pieces[id(parameter)]
    piece.main.detach().copy_(torch.tensor([1.0001, 1.0001]))
    parameter.detach()[1] = 3.0
    mains.refresh()
    assert piece.main.tolist() == pytest.approx([1.0001, 3.0])


def test_a_weight_without_a_gradient_keeps_what_others_wrote():
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    gradients = StageGradients.build(0, [parameter], count=1, group=None)
    mains = MainWeights.build(gradients)
    assert mains is not None
    gradients.attach(zero=True)
    gradients.end()
    gradients.show()
    parameter.detach().fill_(5.0)
    mains.updated()
    assert parameter.tolist() == [5.0, 5.0]


def test_a_bucket_goes_with_the_last_gradient_in_it_and_waits_for_no_other():
    weights = [nn.Parameter(torch.zeros(6)) for _ in range(4)]
    started = []
    gradients = StageGradients.build(
        0,
        weights,
        count=2,
        group=None,
        launched=lambda stage, bucket, work: started.append((bucket, len(done))),
    )
    gradients.attach(zero=True)
    gradients.arm()
    done = []
    for weight in reversed(weights):
        done.append(weight)
        weight.sum().backward()
    # Two of the four equal weights fill a bucket.
    assert started == [(0, 2), (1, 4)]


LAYOUTS = st.builds(
    FlatLayout,
    st.lists(st.integers(0, 30), min_size=1, max_size=6).map(tuple),
    count=st.integers(1, 5),
    shares=st.integers(1, 4),
)


@given(LAYOUTS)
def test_buckets_divide_by_the_shares_and_little_is_padded(layout):
    bounds = layout.bounds
    assert len(bounds) == layout.count + 1
    assert all((high - low) % layout.shares == 0 for low, high in itertools.pairwise(bounds))
    assert 0 <= bounds[-1] - sum(layout.sizes) < layout.shares


@given(LAYOUTS)
def test_every_element_of_every_part_is_owned_once(layout):
    for part, size in enumerate(layout.sizes):
        start = layout.starts[part]
        owned = [
            element
            for member in range(layout.shares)
            for low, high in layout.pieces(part, member)
            for element in range(low, high)
        ]
        assert sorted(owned) == list(range(start, start + size))


@given(LAYOUTS)
def test_a_part_lies_in_the_buckets_that_it_meets(layout):
    for part, size in enumerate(layout.sizes):
        start = layout.starts[part]
        met = {
            bucket
            for bucket in range(layout.count)
            for element in range(start, start + size)
            if layout.bounds[bucket] <= element < layout.bounds[bucket + 1]
        }
        assert set(layout.buckets_of(start, start + size)) == met


def test_without_shares_nothing_is_padded():
    layout = FlatLayout((7, 4), count=3)
    assert layout.bounds == (0, 3, 7, 11)
    assert layout.owned(0) == ((0, 3), (3, 7), (7, 11))


def test_a_tail_lengthens_the_last_bucket_and_moves_no_other():
    layout = FlatLayout((4, 4), count=2, tail=2)
    assert layout.bounds == (0, 4, 10)
    assert layout.starts == (0, 4)
    assert layout.buckets_of(8, 10) == (1,)
    assert layout.pieces(1, 0) == ((4, 8),)


def loose(*parameters, **options):
    """Gradients of parameters that nobody reduces, attached."""
    gradients = StageGradients.build(0, parameters, count=0, group=None, loose=True, **options)
    gradients.attach(zero=True)
    return gradients


def test_what_nobody_reduces_is_summed_where_autograd_puts_it():
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    gradients = loose(used, unused)
    assert used.grad is None
    accumulate(used, torch.full((3,), 2.0), 1)
    first = used.grad
    gradients.detach()
    assert used.grad is None
    gradients.attach(zero=False)
    accumulate(used, torch.full((3,), 2.0), 1)
    assert used.grad is first
    gradients.end()
    gradients.show()
    assert used.grad.tolist() == [4.0] * 3
    assert unused.grad is None  # Optimizers skip it, and decay nothing.
    assert {id(p): g.tolist() for p, g in gradients.views()} == {
        id(used): [4.0] * 3, id(unused): [0.0] * 2
    }  # fmt: skip
    assert float(gradients.squared_norm()) == pytest.approx(48.0)
    assert float(gradients.squared_norm(lambda p: p is unused)) == 0.0
    gradients.attach(zero=True)
    assert used.grad is None
    assert float(gradients.squared_norm()) == 0.0


def test_a_loose_sum_outlives_a_zero_grad_between_two_passes_and_takes_what_hooks_put_there():
    weight = nn.Parameter(torch.ones(2))
    gradients = loose(weight)
    accumulate(weight, torch.ones(2), 1)
    gradients.detach()
    weight.grad = None  # as Lightning's zero_grad
    gradients.attach(zero=False)
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0]
    weight.grad = torch.full((2,), 5.0)
    gradients.adopt()
    gradients.detach()
    gradients.attach(zero=False)
    assert weight.grad.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("to_none", [True, False])
def test_a_loose_sum_begins_anew_for_those_that_are_cleared(to_none):
    kept, cleared = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    gradients = loose(kept, cleared)
    accumulate(kept, torch.ones(2), 1)
    accumulate(cleared, torch.ones(2), 1)
    gradients.end()
    torch.optim.SGD([cleared], lr=0.1).zero_grad(set_to_none=to_none)
    gradients.clear({id(cleared)})
    gradients.detach()
    gradients.attach(zero=False)
    assert kept.grad.tolist() == [1.0, 1.0]
    assert cleared.grad is None if to_none else cleared.grad.tolist() == [0.0, 0.0]
    accumulate(cleared, torch.full((2,), 3.0), 1)
    gradients.end()
    assert cleared.grad.tolist() == [3.0, 3.0]


def test_sparse_gradients_that_nobody_reduces_become_dense():
    table = nn.Embedding(4, 2, sparse=True)
    gradients = loose(table.weight)
    for row in (1, 1, 3):
        table(torch.tensor([row])).sum().backward()
    gradients.end()
    assert table.weight.grad.layout is torch.strided
    assert table.weight.grad[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0]


def test_a_loss_that_is_not_finite_is_known_where_nobody_reduces():
    gradients = loose(nn.Parameter(torch.ones(2)))
    assert not gradients.tainted
    gradients.taint(torch.tensor(float("nan"), dtype=torch.float64))
    assert gradients.tainted
    gradients.attach(zero=True)
    assert not gradients.tainted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_gradients_are_summed_in_buffers_wherever_they_may_lie(dtype):
    weight = nn.Parameter(torch.zeros(2, dtype=dtype))
    gradients = loose(weight)
    accumulate(weight, torch.ones(2, dtype=dtype), 3)
    assert weight.grad is None
    assert gradients.buffers[0].flat[:2].tolist() == [3.0, 3.0]


def test_clipping_scales_all_gradients_of_a_type_at_once_and_waits_for_nothing():
    multiply = mock.Mock(side_effect=torch._foreach_mul_)
    with emulated_device() as device, mock.patch.object(torch, "_foreach_mul_", multiply):
        for place, calls in (("cpu", 2), ("cuda", 4)):
            weights = [
                nn.Parameter(torch.ones(2, dtype=dtype).to(CUDA))
                for dtype in (torch.float32, torch.float64, torch.float32)
            ]
            for weight in weights:
                weight.grad = torch.full_like(weight, 8.0)
            norm = torch.tensor(4.0, dtype=torch.float64).to(place)
            waited = device.default.done_by.total()
            clip_([*weights, nn.Parameter(torch.ones(1))], norm, 1.0)  # one has no gradient
            assert device.default.done_by.total() == waited
            assert multiply.call_count == calls
            for weight in weights:
                assert weight.grad.tolist() == pytest.approx([2.0, 2.0])
