"""Layers that recompute a part of what they save: the same gradients, whole or split backwards."""

from __future__ import annotations

import pytest
import torch

from strategies.models.selective.region import SelectiveLayer
from strategies.models.split_backward.input_step import input_backward
from strategies.plan import FAMILIES
from tests.strategies.models.split_backward.cases import CASES
from tests.strategies.models.split_backward.harness import (
    FIFO,
    SHUFFLED,
    compare,
    flatten,
    full,
    start,
    wants,
)

DEFAULT = frozenset({"attention", "norm", "activation"})
CHOICES = [
    pytest.param(DEFAULT, id="default"),
    pytest.param(frozenset(FAMILIES), id="all"),
    pytest.param(frozenset({"attention"}), id="attention", marks=pytest.mark.full),
    pytest.param(frozenset({"norm"}), id="norm", marks=pytest.mark.full),
]


def forwards(run, case, recomputed):
    layer = SelectiveLayer(run.module, recomputed)
    for microbatch in range(3):
        torch.manual_seed(100 + microbatch)
        data = [tensor.requires_grad_(wants(tensor, case)) for tensor in case.data()]
        run.inputs.append([tensor for tensor in data if tensor.requires_grad])
        outputs = [o for o in flatten(layer.run(run.module, tuple(data), {})) if o.requires_grad]
        torch.manual_seed(200 + microbatch)
        yield outputs, [torch.randn_like(output) for output in outputs]


@pytest.mark.parametrize("recomputed", CHOICES)
@pytest.mark.parametrize("name", CASES)
def test_recomputing_inside_a_layer_gives_the_same_gradients(name, recomputed):
    case = CASES[name]
    ours, theirs = start(case)
    full(theirs, case)
    for outputs, gradients in list(forwards(ours, case, recomputed)):
        if outputs:
            torch.autograd.backward(outputs, gradients)
    compare(ours, theirs)


@pytest.mark.parametrize(
    "order",
    [pytest.param(FIFO, marks=pytest.mark.full, id="fifo"), pytest.param(SHUFFLED, id="shuffled")],
)
@pytest.mark.parametrize("name", CASES)
def test_split_backwards_find_what_was_recomputed(name, order):
    case = CASES[name]
    ours, theirs = start(case)
    full(theirs, case)
    graphs = list(forwards(ours, case, DEFAULT))
    pending = {}
    for step in order:
        index = int(step[1])
        if step[0] == "I":
            outputs, gradients = graphs[index]
            graphs[index] = ([], [])
            pending[index] = input_backward(outputs, gradients, ours.inputs[index])
        else:
            pending.pop(index).run()
    compare(ours, theirs)
