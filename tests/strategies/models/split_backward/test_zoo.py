"""Whole models as people write them, on one stage: their gradients are those of a full backward."""

from __future__ import annotations

import copy

import pytest
import torch

from strategies.models.split_backward.input_step import input_backward
from tests.strategies.models.replay.parity import call
from tests.strategies.models.replay.zoo import ZOO, build

# A penalty touches every weight outside of its layer: all of them get their gradients in I.
PENALISED = {"weight_penalty", "weight_penalty_first"}


def gradients(module, batches, *, split):
    module.__dict__["log"] = lambda *_, **__: None
    module.__dict__["log_dict"] = lambda *_, **__: None
    waiting = []
    for batch_idx, batch in enumerate(batches):
        torch.manual_seed(batch_idx)
        loss = call(module, copy.deepcopy(batch), batch_idx)
        loss = loss["loss"] if isinstance(loss, dict) else loss
        if split:
            waiting.append(input_backward([loss], [None], []))
        else:
            loss.backward()
    deferred = {id(p) for pending in waiting for p in pending.parameters}
    for pending in waiting:
        pending.run()
    return {name: p.grad for name, p in module.named_parameters()}, deferred


@pytest.mark.parametrize("name", ZOO)
def test_models_get_the_gradients_of_a_full_backward(name):
    # Built twice: hooks of a copy would still refer to the original.
    theirs, _ = gradients(*build(name), split=False)
    ours, deferred = gradients(*build(name), split=True)
    assert (len(deferred) == 0) == (name in PENALISED)
    for key, expected in theirs.items():
        if expected is None:
            assert ours[key] is None, key
        else:
            torch.testing.assert_close(ours[key], expected, rtol=1e-11, atol=1e-12)
