"""The benchmark of exchanges on links, without the links: what is run, and what is predicted."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import exchange_on_links
from benchmarks.exchange_on_links import FORWARD_S, PP, Layer, Task, predicted


def test_what_is_predicted_is_the_sleeps_and_what_of_the_exchange_shows():
    task = Task(steps=1, microbatches=16, row_elements=1)
    none = predicted("eager_1f1b", task, 0.0, pairs=False)
    assert none == pytest.approx((16 + PP - 1) * 3 * FORWARD_S)
    travel_s = 0.3 * 3 * FORWARD_S / 8
    in_turn = predicted("eager_1f1b", task, travel_s, pairs=False)
    assert in_turn / none == pytest.approx(1.3)
    assert predicted("eager_1f1b", task, travel_s, pairs=True) / none < 1.08


def test_a_layer_has_its_rows_computed_and_gives_them_gradients(monkeypatch):
    slept = []
    # Of this module alone: threads that other tests have left sleep, too.
    monkeypatch.setattr(exchange_on_links, "time", SimpleNamespace(sleep=slept.append))
    layer, stream = Layer(32), torch.ones(8, 16, requires_grad=True)
    layer(stream).sum().backward()
    assert stream.grad is not None
    assert layer.scale.grad is not None
    # Half of it experts', and a backward twice a forward.
    assert slept == [layer._piece_s] * 2 + [2 * layer._piece_s] * 2
