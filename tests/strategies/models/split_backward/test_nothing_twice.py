"""I and W together run the heavy operations of a full backward, each once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from strategies.models.split_backward.input_step import input_backward
from tests.strategies.models.split_backward.cases import CASES
from tests.strategies.models.split_backward.counting import Count
from tests.strategies.models.split_backward.harness import forward, start


def backward_counts(name: str) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """The operations of a full backward, of I, and of W."""
    case = CASES[name]
    ours, theirs = start(case)
    for _ in range(2):  # the first time, rules are compared with torch
        outputs, gradients = forward(theirs, case, 0)
        with Count() as full:
            if outputs:
                torch.autograd.backward(outputs, gradients)
        outputs, gradients = forward(ours, case, 0)
        with Count() as first:
            pending = input_backward(outputs, gradients, ours.inputs[-1])
        with Count() as second:
            pending.run()
    return full.calls, first.calls, second.calls


@pytest.mark.parametrize("name", CASES)
def test_no_heavy_operation_runs_twice(name):
    full, i, w = backward_counts(name)
    assert i + w == full


@pytest.mark.parametrize("name", ["mlp", "attention", "conv2d_dilated", "normalised_residual"])
def test_later_stages_leave_half_of_the_products(name):
    full, i, w = backward_counts(name)
    key = "convolution" if "conv" in name else "product"
    weights = sum(parameter.endswith("weight") for parameter in CASES[name].waits)
    assert w[key] == weights
    assert i[key] == full[key] - weights > 0


@pytest.mark.parametrize(
    ("name", "in_i", "in_w"),
    [
        ("mlp_of_the_first_stage", {"product": 2}, {"product": 3}),
        ("tied_embedding_and_head", {"product": 2}, {"product": 2, "embedding": 1}),
        ("conv_net_of_the_first_stage", {"convolution": 1}, {"convolution": 2}),
        ("embedding_sparse", {"product": 1}, {"product": 1}),
        ("normalisation_first_in_the_first_stage", {"product": 1}, {"product": 1}),
        # A user's function computes all of its gradients at once.
        ("custom_function_first_in_the_first_stage", {"product": 3}, {"product": 1}),
    ],
)
def test_the_first_stage_has_input_gradients_of_its_own(name, in_i, in_w):
    _, i, w = backward_counts(name)
    assert dict(i) == in_i
    assert dict(w) == in_w


@pytest.mark.parametrize(
    "name",
    ["checkpoint_around_everything", "checkpoint_in_a_checkpoint", "checkpoint_around_layers"],
)
def test_checkpointed_regions_are_computed_again_once_and_leave_their_weights(name):
    full, i, w = backward_counts(name)
    assert i + w == full
    assert w == {"product": 2}


def test_a_model_on_its_first_stage_splits_evenly():
    layers = [nn.Linear(8, 8) for _ in range(6)]
    net = nn.Sequential(nn.Embedding(9, 8), *layers, nn.LayerNorm(8), nn.Linear(8, 9))
    tokens = torch.randint(0, 9, (2, 5))
    for _ in range(2):
        loss = F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())
        with Count() as first:
            pending = input_backward([loss], [None], [])
        with Count() as second:
            pending.run()
    assert first.calls == {"product": 7}
    assert second.calls == {"product": 7, "embedding": 1}
