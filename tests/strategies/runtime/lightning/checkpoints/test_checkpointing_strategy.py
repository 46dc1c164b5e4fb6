"""Which rank's word counts for a buffer, and what a checkpoint may hold."""

from __future__ import annotations

import doctest
import json
import math
from pathlib import Path

import pytest
import torch

from strategies.errors import CheckpointError
from strategies.runtime.lightning.checkpoints import checkpointing_strategy
from strategies.runtime.lightning.checkpoints.rank_folder import random_state, set_random_state
from strategies.runtime.lightning.checkpoints.stock_file import RANDOM
from strategies.runtime.storage.part import flatten, unflatten


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(checkpointing_strategy).failed == 0


def test_a_buffer_follows_the_parameters_of_its_module() -> None:
    state = {
        name: torch.zeros(1)
        for name in ("net.0.weight", "net.0.mean", "net.1.mean", "net.1.inner.count", "steps")
    }
    found = checkpointing_strategy.owned_state(
        state,
        every_parameter=["net.0.weight", "net.1.weight"],
        owned_parameters={"net.0.weight"},
    )
    assert list(found) == ["net.0.weight", "net.0.mean", "steps"]


TREE = {
    "plain": [1, 2.5, None, True, "text"],
    "tuple": (1, (2, 3)),
    "keys": {0: "int", (1, 2): "tuple"},
    "tagged": {"__kind__": "user's own key"},
    "odd": [math.inf, -math.inf],
    "bytes": b"\x00\xff",
    "path": "some/where",
}


def test_nested_state_survives_json() -> None:
    tree, tensors = flatten(TREE)
    assert tensors == {}
    assert unflatten(json.loads(json.dumps(tree)), {}) == TREE


def test_tensors_come_back_by_reference() -> None:
    value = {"state": {3: torch.arange(3.0)}, "nan": math.nan, "path": Path("x/y")}
    tree, tensors = flatten(value)
    found = unflatten(json.loads(json.dumps(tree)), tensors)
    assert torch.equal(found["state"][3], torch.arange(3.0))
    assert math.isnan(found["nan"])
    assert found["path"] == "x/y"


def test_an_object_is_refused_by_its_place() -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\.callbacks\.mine\[1\] is a object"):
        flatten({"callbacks": {"mine": [0, object()]}})


def test_a_gpu_that_a_training_does_not_use_is_left_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("CUDA was started"))
    state = random_state()
    assert "cuda" not in state
    set_random_state({RANDOM: {**state, "cuda": torch.zeros(16, dtype=torch.uint8)}})
