"""State of a module around forwards: taken back, told apart, joined."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.step_places import Slot
from strategies.models.step_state import StepState, join_parts


class Meter:
    def __init__(self) -> None:
        self.total = 0.0
        self.seen: list[float] = []


class Module(LightningModule):
    shared: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.part = nn.Module()
        self.count = 0
        self.rows: list[Any] = []
        self.by_name: dict[str, list[int]] = defaultdict(list)
        self.last: deque[int] = deque(maxlen=2)
        self.meter = Meter()
        self.kept = {"ema": torch.zeros(2)}
        self.register_buffer("seen", torch.zeros(2))


def change(module: Module) -> None:
    module.count += 1
    module.shared.append(1)
    module.rows.append({"x": torch.ones(1)})
    module.by_name["a"].append(3)
    module.last.append(4)
    module.meter.total += 2.0
    module.meter.seen.append(1.0)
    module.kept["ema"].add_(1)
    module.seen += 1
    module.part.calls = 5
    module.new = "text"


def state(module: Module) -> str:
    return repr(
        (
            module.count, module.shared, module.rows, dict(module.by_name), list(module.last),
            vars(module.meter), module.kept, module.seen, vars(module.part).get("calls"),
            getattr(module, "new", None),
        )
    )  # fmt: skip


@pytest.fixture
def module() -> Module:
    made = Module()
    made.shared.clear()
    return made


def test_a_forward_leaves_nothing_behind(module: Module) -> None:
    watched = StepState(module, [module.layer])
    before, objects = state(module), (module.rows, module.meter, module.last)
    for _ in range(2):
        watched.begin()
        for _ in range(3):
            change(module)
            assert watched.take_back()
            assert state(module) == before
            assert not watched.take_back()
    assert all(
        a is b for a, b in zip(objects, (module.rows, module.meter, module.last), strict=True)
    )


def test_what_has_changed_is_known_by_name(module: Module) -> None:
    watched = StepState(module, [module.layer])
    watched.begin()
    assert watched.changed() == set()
    change(module)
    module.layer.calls = 1  # a layer's own business
    assert {slot.name for slot in watched.changed()} == {
        "count", "shared", "rows", "by_name", "last", "meter", "kept", "seen", "part.calls", "new",
    }  # fmt: skip
    assert watched.value(Slot("part", "attribute", "calls")) == 5
    watched.begin()
    assert watched.changed() == set()


def test_a_graph_keeps_the_tensor_that_was_changed_under_it(module: Module) -> None:
    watched = StepState(module, [module.layer])
    watched.begin()
    module.seen += 1
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * module.seen).sum()
    watched.take_back()
    assert module.seen.tolist() == [0, 0]
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1]


def test_changes_in_inference_mode_are_seen(module: Module) -> None:
    with torch.inference_mode():
        module.kept["ema"] = torch.zeros(2)
        watched = StepState(module, [module.layer])
        watched.begin()
        assert not watched.take_back()
        module.kept["ema"].add_(1)
        assert watched.take_back()
        assert module.kept["ema"].tolist() == [0, 0]


def test_marks_stay_while_nothing_changes(module: Module) -> None:
    watched = StepState(module, [module.layer])
    watched.begin()
    marks = watched.marks()
    assert marks == watched.marks()
    module.rows.append(1)
    assert marks != watched.marks()


def rows(*sizes: int) -> list[Tensor]:
    return list(torch.arange(sum(sizes) * 2.0).view(-1, 2).split(list(sizes)))


def test_parts_are_joined_where_they_are_shorter() -> None:
    parts = rows(3, 2)
    assert join_parts(parts, [0.6, 0.4], (5, 2)).tolist() == torch.cat(parts).tolist()
    turned = [part.T for part in parts]
    assert join_parts(turned, [0.6, 0.4], (2, 5)).tolist() == torch.cat(parts).T.tolist()


def test_a_loss_on_the_way_is_a_mean_by_shares() -> None:
    joined = join_parts([torch.tensor(1.0), torch.tensor(2.0)], [0.75, 0.25], ())
    assert float(joined) == 1.25


def test_parts_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ModelError, match=r"\[2, 2\], \[2, 2\].*\[4, 4\]"):
        join_parts(rows(2, 2), [0.5, 0.5], (4, 4))


class Slotted:
    __slots__ = ("later", "number")

    def __init__(self) -> None:
        self.number = 1


def test_nothing_is_changed_until_something_is_another_object(module: Module) -> None:
    module.slotted = Slotted()
    watched = StepState(module, [module.layer])
    watched.begin()
    assert watched.is_as_begun()
    module.slotted.later = 2  # had no value
    assert not watched.is_as_begun()
    watched.take_back()
    assert not hasattr(module.slotted, "later")
    assert watched.is_as_begun()
    module.seen += 1
    assert not watched.is_as_begun()
