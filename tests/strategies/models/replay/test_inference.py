"""What is found out about an operation once, and when that is said again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from strategies.models.flops import CostCounter
from strategies.models.replay import inference
from strategies.models.replay.hole import Hole, Spec
from strategies.models.replay.inference import infer_operation
from strategies.models.replay.probing import probe_units
from tests.strategies.models.replay.zoo import build

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(inference, "_known", {})
    yield


def hole(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Hole:
    like = torch.empty(shape, dtype=dtype)
    return Hole(Spec(like.shape, like.stride(), dtype, CPU, grad))


def infer(func: Any, *args: Any, **kwargs: Any) -> inference.Outcome:
    metas: dict[int, Tensor] = {}

    def twin(tensor: Tensor) -> Tensor:
        if isinstance(tensor, Hole):
            return tensor.shape_tensor()
        return metas.setdefault(id(tensor), Spec.of(tensor.detach()).meta())

    outcome, made = infer_operation(func, args, kwargs, twin=twin, device=CPU)
    assert [Spec.of(meta, CPU) for meta in made] == list(outcome.specs)
    return outcome


@pytest.mark.parametrize(
    "name",
    [
        "nanogpt_tied",
        "checkpointed_blocks",
        "moe_aux_on_attribute",
        "vit",
        "spectral_and_weight_norm",
    ],
)
def test_a_second_probe_of_a_process_finds_what_the_first_has_found(name: str) -> None:
    found = []
    for _ in range(2):
        module, batches = build(name)
        found.append(repr(probe_units(module, batches[0], "train", None).path))
    assert inference._known
    assert found[0] == found[1]  # Calls with their costs, random draws, cuts and what crosses.


def test_costs_and_draws_are_counted_again() -> None:
    counted = []
    for _ in range(2):
        with CostCounter() as counter:
            infer(functional.linear, hole(3, 4), hole(5, 4))
            between = counter.cost, counter.random
            infer(torch.dropout, hole(3, 4), 0.5, True)
            counted.append((*between, counter.cost, counter.random))
    assert len(inference._known) == 2
    assert counted[0] == counted[1]
    assert counted[0][1:] == (False, counted[0][2], True)


def test_whatever_shapes_depend_on_is_told_apart() -> None:
    linear = functional.linear
    assert infer(linear, hole(3, 4), hole(5, 4)).specs[0].shape == (3, 5)
    assert infer(linear, hole(2, 4), hole(5, 4)).specs[0].shape == (2, 5)
    plain = infer(linear, hole(3, 4, grad=False), hole(5, 4, grad=False))
    assert not plain.specs[0].requires_grad
    with torch.no_grad():
        assert not infer(linear, hole(3, 4), hole(5, 4)).specs[0].requires_grad
    short = infer(linear, hole(3, 4, dtype=torch.bfloat16), hole(5, 4, dtype=torch.bfloat16))
    assert short.specs[0].dtype is torch.bfloat16
    assert [infer(torch.sum, hole(3, 4), dim).specs[0].shape for dim in (0, 1)] == [(4,), (3,)]
    wide, long = (
        infer(torch.mul, hole(3, 4, dtype=torch.int64, grad=False), by) for by in (2, 2.0)
    )
    assert (wide.specs[0].dtype, long.specs[0].dtype) == (torch.int64, torch.float32)
    formats = (torch.contiguous_format, torch.channels_last)
    strides = [
        infer(torch.clone, hole(2, 3, 4, 4), memory_format=f).specs[0].stride for f in formats
    ]
    assert strides == [(48, 16, 4, 1), (48, 1, 12, 3)]


def test_views_writes_and_what_comes_back_are_found_anew() -> None:
    infer(Tensor.view, hole(3, 4), 12)
    infer(Tensor.expand, hole(1, 4), 3, 4)
    infer(torch.split, hole(3, 4), 2)
    assert infer(Tensor.add_, hole(3, 4), 1).mutated
    infer(torch.dropout, hole(3, 4), 0.5, False)
    assert inference._known == {}


def test_what_others_have_written_runs_each_time() -> None:
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

    class Watches(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    def own(x: Tensor) -> Tensor:
        return x * 2

    infer(Doubles.apply, nn.Parameter(torch.ones(2)))
    infer(own, hole(2))
    with Watches():
        infer(torch.neg, hole(2))
    assert inference._known == {}
    infer(torch.neg, hole(2))
    assert len(inference._known) == 1
