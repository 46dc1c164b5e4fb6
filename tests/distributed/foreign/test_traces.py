"""Whatever a step's traces lie in, they are there once per batch, or the step is refused."""

from __future__ import annotations

import copy
import enum
import itertools
import random
from collections import OrderedDict, UserDict, UserList, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from strategies.errors import ModelError
from strategies.models.replay.replay_model import ReplayModel
from tests.ranks.comparison import (
    WIDTH,
    Net,
    equal_to_stock,
    spread,
)
from tests.ranks.pool import Ranks


class Meter:
    __slots__ = ("count", "values")

    def __init__(self) -> None:
        self.count = 0
        self.values: list[float] = []


@dataclass
class Stats:
    seen: dict[str, list[float]] = field(default_factory=lambda: {"losses": []})
    last: Tensor | None = None


class Phase(enum.Enum):
    FIRST = 1
    LATER = 2


class Helper:
    """It knows the module that it belongs to."""

    def __init__(self, module: pl.LightningModule) -> None:
        self.module = module
        self.calls = 0


class Everywhere(Net):
    """Leaves its traces behind the last layer."""

    losses: list[float] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.losses.clear()
        self.save_hyperparameters({"level": 0})
        self.meter = Meter()
        self.stats = Stats()
        self.phase = Phase.FIRST
        self.table = np.zeros((2, 2))
        self.per_class: list[list[float]] = [[] for _ in range(12)]
        self.by_name = {f"name{number}": [0.0] for number in range(100)}
        self.deep: dict[str, Any] = {"a": {"b": {"c": {"d": {"e": {"f": []}}}}}}
        self.pair: tuple[list[float], list[int]] = ([], [])
        self.user = UserDict(n=0)
        self.users: UserList[float] = UserList()
        self.order: OrderedDict[int, float] = OrderedDict()
        self.nested: Any = defaultdict(lambda: defaultdict(list))
        self.space = SimpleNamespace(n=0)
        self.sums = [torch.zeros(1, dtype=torch.float64) for _ in range(12)]
        object.__setattr__(self, "helper", Helper(self))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        number = loss.item()
        self.losses.append(number)
        self.meter.count += len(batch[0])
        self.meter.values.append(number)
        self.stats.seen["losses"].append(number)
        self.stats.last = loss.detach()
        self.phase = Phase.LATER if batch_idx else Phase.FIRST
        self.table[batch_idx % 2] += number
        self.per_class[batch_idx].append(number)
        self.by_name["name7"][0] += number
        self.deep["a"]["b"]["c"]["d"]["e"]["f"].append(number)
        self.pair[0].append(number)
        self.pair[1].append(1)
        self.user["n"] += 1
        self.users.append(number)
        self.order[self.global_step] = number
        self.nested[self.current_epoch]["losses"].append(number)
        self.space.n += 1
        self.sums[batch_idx] += loss.detach()
        self.helper.calls += 1
        self.hparams["level"] += 1
        return loss


class Early(Net):
    """What it counts is a factor in the first layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = np.zeros(1)
        self.meter = Meter()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.table += 1
        self.meter.count += 1
        factor = float(self.table[0]) + 1 / self.meter.count
        return super().training_step([batch[0] * factor, batch[1]], batch_idx)


def told(module: Any, trainer: Any) -> Any:
    traces = [
        list(module.losses), module.meter.count, module.meter.values,
        module.stats.seen["losses"], float(module.stats.last), module.phase.name,
        module.table.tolist(), module.per_class, module.by_name["name7"], module.deep, module.pair,
        module.user["n"], list(module.users), list(module.order.items()),
        {key: dict(value) for key, value in module.nested.items()}, module.space.n,
        [float(value) for value in module.sums], module.helper.calls, module.hparams["level"],
    ]  # fmt: skip
    return flat(traces)


def flat(value: Any) -> list[float | str]:
    if isinstance(value, dict):
        return [item for pair in value.items() for item in flat(list(pair))]
    if isinstance(value, list | tuple):
        return [item for each in value for item in flat(each)]
    return [value if isinstance(value, str) else float(value)]


LAYOUTS = pytest.mark.parametrize("layout", ["1f1b", pytest.param("zb_v", marks=pytest.mark.full)])


@pytest.mark.distributed
@LAYOUTS
def test_traces_are_those_of_one_run_of_the_step(
    layout: str, ranks: Callable[[int], Ranks]
) -> None:
    stock, piped = equal_to_stock(ranks, Everywhere, layout, told=told, max_epochs=2)
    for fitted in piped:
        assert fitted.told == pytest.approx(stock.told, abs=1e-10)


@pytest.mark.distributed
@spread([Early])
def test_counters_that_layers_see_count_batches(
    case: Any, layout: str, ranks: Callable[[int], Ranks]
) -> None:
    equal_to_stock(ranks, case, layout, max_epochs=2)


class Iterated(Net):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: Iterator[int] = itertools.count()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * next(self.numbers)


class DrawsItself(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.generator.random()


class ArrayDrawn(DrawsItself):
    def __init__(self) -> None:
        super().__init__()
        self.generator: Any = np.random.default_rng(0)


class Framed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.rows = pd.DataFrame({"batch": [0]})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows.loc[len(self.rows)] = [batch_idx]
        return super().training_step(batch, batch_idx)


STEPS = 0
LOSSES: list[float] = []


def counter() -> Callable[[], int]:
    number = 0

    def count() -> int:
        nonlocal number
        number += 1
        return number

    return count


def called() -> None:
    called.calls += 1  # type: ignore[attr-defined]


called.calls = 0  # type: ignore[attr-defined]
TICKS = counter()


class Global(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        global STEPS
        STEPS += 1
        return super().training_step(batch, batch_idx)


class Gathered(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        LOSSES.append(loss.item())
        return loss


class OfClass(Net):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        type(self).calls += 1
        return super().training_step(batch, batch_idx)


class OfFunction(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        called()
        return super().training_step(batch, batch_idx)


class Closed(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) / TICKS()


class ClosedHere(Net):
    def __init__(self) -> None:
        super().__init__()
        self.count = counter()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) / self.count()


class Synchronised(Net):
    """As value networks follow each other in reinforcement learning."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.net)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) + self.target(batch[0]).mean()
        if batch_idx % 4 == 0:
            self.target.load_state_dict(self.net.state_dict())
        return loss


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Synchronised, r"^\S+: copy_ changes a parameter inside training_step.*on_train_batch_end"),
        (Iterated, r"takes the next of self.numbers, an iterator.*on_train_batch_start"),
        (DrawsItself, "draws from self.generator, a Random of its own"),
        (ArrayDrawn, "draws from self.generator, a Generator of its own"),
        (Global, "changes the global variable STEPS, which is not on the module"),
        (Gathered, "changes the global variable LOSSES, which is not on the module"),
        (OfClass, r"changes OfClass\.calls, which is not on the module"),
        (OfFunction, r"changes called\.calls, which is not on the module"),
        (Closed, "changes number of count, which is not on the module"),
        (ClosedHere, "changes number of count, which is not on the module"),
        (Framed, "changes self.rows, and an object of type DataFrame cannot be brought"),
    ],
)
def test_what_cannot_be_taken_back_is_refused_before_training(case: type[Net], words: str) -> None:
    module = case().double()
    batch = [torch.zeros(4, WIDTH, dtype=torch.float64), torch.zeros(4, dtype=torch.long)]
    with pytest.raises(ModelError, match=words):
        ReplayModel.probe(module, batch)
    assert (STEPS, LOSSES, OfClass.calls, vars(called)["calls"]) == (0, [], 0, 0)


class Centred(Net):
    """A centre of what layers in the middle give, as of a teacher's features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net(batch[0])
        with torch.no_grad():
            self.centre = 0.9 * self.centre + 0.1 * hidden.mean(0)
        return torch.nn.functional.cross_entropy(self.head(hidden), batch[1])


def test_values_from_between_layers_that_stay_are_refused_before_training() -> None:
    batch = [torch.zeros(4, WIDTH, dtype=torch.float64), torch.zeros(4, dtype=torch.long)]
    model = ReplayModel.probe(Centred().double(), batch)
    stages = [range(2), range(2, len(model.units))]
    with pytest.raises(
        ModelError, match=r"training_step leaves in self\.centre a value from before"
    ):
        model.cut(stages, owned=[1])
    ReplayModel.probe(Centred().double(), batch).cut(stages, owned=[0, 1])


def test_a_probe_leaves_no_traces() -> None:
    class Counts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.meter = Meter()
            self.table = np.zeros(2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.meter.count += 1
            self.table += 1
            return super().training_step(batch, batch_idx)

    module = Counts().double()
    batch = [torch.zeros(4, WIDTH, dtype=torch.float64), torch.zeros(4, dtype=torch.long)]
    ReplayModel.probe(module, batch)
    assert (module.meter.count, module.table.tolist()) == (0, [0, 0])
