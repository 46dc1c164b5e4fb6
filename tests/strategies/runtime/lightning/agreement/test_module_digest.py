"""Which values of a module are in its digest, and what is the same in every process."""

from __future__ import annotations

import functools
import os
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from strategies.runtime.lightning.agreement import module_digest
from strategies.runtime.lightning.agreement.module_digest import ModuleDigest
from strategies.runtime.lightning.agreement.read_names import ReadNames, reads_parameters


class Config:
    def __init__(self, gain: float) -> None:
        self.gain = gain


class Slotted:
    __slots__ = ("gain",)

    def __init__(self, gain: float) -> None:
        self.gain = gain


def _closure(gain: float) -> Any:
    return lambda x: x * gain


def _default(gain: float) -> Any:
    return lambda x, gain=gain: x * gain


def _hidden(gain: float) -> list[nn.Module]:
    layer = nn.Linear(2, 2)
    nn.init.constant_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return [layer]


def _generator(gain: float) -> random.Random:
    return random.Random(gain)


MADE: dict[str, Any] = {
    "a number": float,
    "a text": str,
    "a tensor": lambda v: torch.full((3,), v),
    "of 16 bits": lambda v: torch.full((3,), v, dtype=torch.bfloat16),
    "an array": lambda v: np.full(3, v),
    "a list": lambda v: [1, [v]],
    "a dict": lambda v: {"a": {"b": v}},
    "a set": lambda v: {v, "x"},
    "an object": Config,
    "slots": Slotted,
    "objects in a list": lambda v: [Config(v)],
    "a closure": _closure,
    "a default": _default,
    "a partial": lambda v: functools.partial(max, v),
    "a bound method": lambda v: Config(v).__init__,  # type: ignore[misc]
    "a hidden layer": _hidden,
    "a generator": _generator,
    "numpy's generator": lambda v: np.random.default_rng(int(v * 10)),
}


def _digest(value: Any) -> ModuleDigest:
    module = nn.Module()
    module.value = value
    return ModuleDigest(module)


@pytest.mark.parametrize("kind", MADE)
def test_a_value_that_differs_changes_the_mark_and_an_equal_one_does_not(kind: str) -> None:
    one, same, other = (_digest(MADE[kind](v)) for v in (0.5, 0.5, 0.75))
    assert not one.untaken
    assert one.mark == same.mark
    assert one.mark != other.mark


def test_sets_have_no_order_and_dicts_and_modules_theirs() -> None:
    texts = [str(number) for number in range(50)]
    assert _digest(set(texts)).mark == _digest(set(reversed(texts))).mark
    pairs = {text: 0 for text in texts}
    assert _digest(pairs).mark != _digest(dict(reversed(pairs.items()))).mark
    one, other = (nn.ModuleDict({n: nn.Identity() for n in names}) for names in ("ab", "ba"))
    assert ModuleDigest(one).mark != ModuleDigest(other).mark


class Handle:
    """Without attributes: nothing but an address tells it from others."""

    __slots__ = ()


def test_clocks_process_numbers_and_addresses_do_not_count() -> None:
    kept = [_digest([0]).mark for _ in range(2)]
    assert kept[0] == kept[1]
    for value in (time.time(), time.monotonic(), time.perf_counter(), os.getpid(), os.getpid()):
        assert "value" not in _digest(value).entries or value < 3600
    first, second = _digest(Handle()), _digest(Handle())
    assert first.mark == second.mark
    assert first.untaken == {"value": "Handle"}


def test_an_object_that_cannot_be_looked_at_is_named() -> None:
    class Refuses:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("no")

    assert _digest(Refuses()).untaken == {"value": Refuses.__qualname__}


def test_cycles_end() -> None:
    config = Config(0.5)
    config.self = config  # type: ignore[attr-defined]
    loop: list[Any] = [1]
    loop.append(loop)
    assert _digest(config).entries["value.gain"] == "0.5"
    assert "value" in _digest(loop).entries


def test_beyond_the_limit_there_are_shapes_and_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_digest, "NUM_NUMBERS", 100)
    zeros, one, shorter = torch.zeros(10_000), torch.zeros(10_000), torch.zeros(9_999)
    one[1] = 1.0
    assert _digest(zeros).mark == _digest(one).mark
    one[10_000 // 64 * 3] = 1.0
    assert len({_digest(value).mark for value in (zeros, one, shorter)}) == 3


def test_it_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_digest, "LIMIT_S", -1.0)
    found = _digest(1)
    assert found.cut
    assert not found.entries


def test_a_value_in_whose_midst_it_is_up_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_digest, "LIMIT_S", 0.002)
    module = nn.Module()
    module.first, module.second = 1, list(range(500_000))
    found = ModuleDigest(module)
    assert found.cut
    assert found.entries.keys() <= {"first"}


def test_a_permutation_is_known() -> None:
    one, other = _digest(torch.tensor([1.0, 2.0, 3.0])), _digest(torch.tensor([2.0, 3.0, 1.0]))
    assert one.shuffled("value") == other.shuffled("value")
    assert one.shuffled("value") != _digest(torch.tensor([1.0, 2.0, 4.0])).shuffled("value")


_GAIN = 2.0


class Net(nn.Module):
    limit = 3.0

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: Any) -> Any:
        return self._scaled(x) * getattr(self, "shift", 0)

    def _scaled(self, x: Any) -> Any:
        return x * self.scale * _GAIN

    def on_train_batch_end(self) -> None:
        assert self.momentum

    def on_train_end(self) -> None:
        assert self.folder


def test_what_code_reads_is_known() -> None:
    found = ReadNames.of([Net])
    assert {"scale", "shift"} <= found.steps
    assert "momentum" in found.hooks
    assert "folder" not in found.steps | found.hooks
    assert found.constants["Net.limit"] == 3.0
    assert found.constants[f"{__name__}._GAIN"] == 2.0


def _logs(module: nn.Module) -> None:
    for _ in module.named_parameters():
        pass


class Watches:
    def norms(self, module: nn.Module, *_: Any) -> None:
        self.look(module)

    def look(self, module: nn.Module) -> None:
        _logs(module)


@pytest.mark.parametrize(
    "hook",
    [
        lambda module, *_: _logs(module),
        Watches().norms,
        functools.partial(lambda name, module, *_: _logs(module), "name"),
    ],
)
def test_a_hook_that_reads_parameters_is_known_by_its_code(hook: Any) -> None:
    assert reads_parameters(hook)
    assert not reads_parameters(lambda module, given, result: result.shape)


def test_one_of_an_inner_function_is_known_too() -> None:
    def track(module: nn.Module) -> Any:
        return list(module.parameters())

    assert reads_parameters(lambda module, given, result: track(module))
