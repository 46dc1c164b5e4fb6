"""What a trial run leaves of a module's state: nothing, whatever kind of objects hold it."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from strategies.models.replay.gate import call_step
from strategies.models.snapshot import restoring


class Frozen(OrderedDict[str, Any]):
    """Refuses everything that changes it, as the configurations of libraries do."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("frozen")

    update = pop = clear = __delitem__ = setdefault = copy = _refuse  # type: ignore[assignment]
    items = values = keys = __eq__ = __iter__ = _refuse  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class Guarded:
    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("read only")


@pytest.mark.parametrize(
    "value",
    [
        Frozen(a=1),
        MappingProxyType({"a": 1}),
        Guarded(),
        torch.Size([1]),
        iter([1]),
        UserDict(a=1),
        np.array(1.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_attributes_of_any_kind_are_left_as_they_are(value: Any) -> None:
    module = nn.Linear(2, 2)
    module.held = value
    with restoring(module):
        module.held = None  # type: ignore[assignment]
    assert module.held is value


def fill(held: dict[str, Any]) -> None:
    held["list"].append(2)
    held["dict"]["inner"].append(2)
    held["set"].add(2)
    held["deque"].append(2)
    held["ordered"]["b"] = 2
    held["ordered"].move_to_end("a")
    held["counter"]["a"] += 1
    held["user"]["b"] = 2
    held["default"]["new"].append(2)
    held["tensors"][0] += 1


def contents() -> dict[str, Any]:
    return {
        "list": [1], "dict": {"inner": [1]}, "set": {1}, "deque": deque([1], maxlen=1),
        "ordered": OrderedDict(a=1), "counter": Counter(a=1), "user": UserDict(a=1),
        "default": defaultdict(list, a=[1]), "tensors": [torch.zeros(2)],
    }  # fmt: skip


def test_containers_that_were_filled_hold_what_they_held_before() -> None:
    module = nn.Linear(2, 2)
    module.held = contents()  # type: ignore[assignment]
    for name, value in contents().items():
        setattr(module, name, value)
    with restoring(module):
        fill(module.held)  # type: ignore[arg-type]
        fill({name: getattr(module, name) for name in contents()})
    kept = {name: getattr(module, name) for name in contents()}
    for held in (module.held, kept):
        assert held["tensors"][0].tolist() == [0, 0]  # type: ignore[operator,index]
        assert {k: v for k, v in held.items() if k != "tensors"} == {  # type: ignore[operator,union-attr]
            k: v for k, v in contents().items() if k != "tensors"
        }


def test_empty_containers_and_hooks_of_modules_are_emptied_again() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    held = {"list": [], "dict": {}, "set": set(), "deque": deque(), "ordered": OrderedDict()}
    for name, value in held.items():
        setattr(module, name, value)
    with restoring(module):
        module[0].register_forward_hook(lambda *_: None)
        module.list.append(1)  # type: ignore[union-attr,operator]
        module.set.add(1)  # type: ignore[union-attr,operator]
        module.deque.append(1)  # type: ignore[union-attr,operator]
        for name in ("dict", "ordered"):
            getattr(module, name)["a"] = 1
    assert [len(getattr(module, name)) for name in held] == [0] * 5
    assert all(getattr(module, name) is value for name, value in held.items())
    assert not module[0]._forward_hooks


def test_shapes_without_numbers_stay_as_they_are() -> None:
    with FakeTensorMode():
        module = nn.BatchNorm1d(2)
        with restoring(module):
            module(torch.zeros(3, 2))


class Waiting(LightningModule):
    """Its step stands in the middle until it is let go, as those of manual optimization do."""

    def training_step(self, batch: tuple[threading.Event, threading.Event]) -> list[bool]:
        begun, go = batch
        begun.set()
        go.wait(60)
        with torch.inference_mode():
            return [torch.is_inference_mode_enabled(), torch.is_grad_enabled()]


def test_steps_that_end_in_the_order_they_began_in_leave_inference_mode_as_it_was() -> None:
    before = torch.inference_mode.__enter__
    module = Waiting()
    said: list[list[bool]] = []
    doors = [(threading.Event(), threading.Event()) for _ in range(3)]
    threads = [
        threading.Thread(target=lambda d=door: said.append(call_step(module, "train", d, 0)))
        for door in doors
    ]
    for thread, (begun, _) in zip(threads, doors, strict=True):
        thread.start()
        assert begun.wait(60)
    with torch.inference_mode():  # Outside of steps it is what it says.
        assert torch.is_inference_mode_enabled()
    for thread, (_, go) in zip(threads, doors, strict=True):
        go.set()
        thread.join(60)
    assert said == [[False, False]] * 3
    assert torch.inference_mode.__enter__ is before
