"""What each process makes for itself: rank 0's is everybody's, or all ranks refuse it by name."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from strategies.errors import PipelineError
from tests.ranks.fit import fit
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed

WIDTH = 6
NAMES = ["alpha", "beta", "gamma", "delta"]
_SCALE = 1.0


class Config:
    """An object of the user's own."""

    def __init__(self, gain: float) -> None:
        self.gain = gain


def _order(names: list[str]) -> list[str]:
    """Another one in each process, as that of a set of texts."""
    turn = int(os.environ["RANK"])
    return names[turn:] + names[:turn]


class Net(pl.LightningModule):
    """A module with something that each process makes for itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        own, order = random.uniform(0.5, 2), _order(NAMES)
        self.names = order if kind == "ModuleDict" else NAMES
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in self.names})
        self.drop = nn.Dropout(own / 4 if kind == "probability" else 0.0)
        self.scale = own if kind == "number" else 1.0
        self.parts = torch.randperm(WIDTH).tolist() if kind == "permutation" else [*range(WIDTH)]
        self.act = (lambda x: torch.tanh(x * own)) if kind == "closure" else torch.tanh
        self.config = Config(own if kind == "object" else 1.0)
        known = dict(zip(NAMES, (0.25, 0.5, 1.0, 2.0), strict=True))
        self.share = torch.tensor([known[n] for n in (order if kind == "weights" else NAMES)])
        self.hidden = [nn.Linear(WIDTH, WIDTH)] if kind == "teacher" else []
        self.register_buffer("turn", torch.eye(WIDTH))
        self.register_buffer("shift", torch.zeros(WIDTH), persistent=False)
        if kind == "buffer":
            self.turn = torch.randn(WIDTH, WIDTH)
        if kind == "buffer that is not saved":
            self.shift = torch.randn(WIDTH)
        self.save_hyperparameters({"bias": own if kind == "hyper-parameter" else 0.0})
        self.kind, self.folder = kind, f"run-{own}"
        self.rank, self.started = int(os.environ["RANK"]), random.uniform(0, 1)

    def setup(self, stage: str) -> None:
        if self.kind == "drawn in setup":
            self.scale = random.uniform(0.5, 2) + float(np.random.rand()) + float(torch.rand(()))

    def on_fit_start(self) -> None:
        if self.kind == "drawn in on_fit_start":
            self.scale = random.uniform(0.5, 2)

    def loss(self, x: Tensor) -> Tensor:
        y = x
        for name in self.names:
            y = self.act(self.layers[name](y))[:, self.parts] * self.scale * self.config.gain
        for teacher in self.hidden:
            y = y + teacher(x)
        y = self.drop(y @ self.turn + self.shift + self.hparams["bias"]) * _SCALE
        return functional.mse_loss(y * self.share.sum() + self.share[0], x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.log("loss", loss)
        return loss

    def on_train_end(self) -> None:
        assert self.folder and self.started >= 0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Noise(pl.Callback):
    """Adds to weights, by numbers that its process may have drawn for itself."""

    reads_weights = False

    def __init__(self, kind: str) -> None:
        own = random.uniform(0.5, 2)
        self.size = own if kind == "callback's number" else 1.0
        self.law = {"drift": own if kind == "callback's dict" else 1.0}
        self.folder, self.is_main, self.kept = f"run-{own}", os.environ["RANK"] == "0", [own]

    def _write(self) -> str:
        return self.folder if self.is_main else ""

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        assert self.size * self.law["drift"] and self._write() is not None

    def on_train_end(self, *_: Any) -> None:
        assert self.kept


@contextmanager
def _as_a_script(seed: int | None) -> Iterator[None]:
    """Without a seed each process has generators of its own, as processes that were not forked."""
    before = {name: os.environ.pop(name, None) for name in ("PL_GLOBAL_SEED", "PYTHONHASHSEED")}
    try:
        if seed is None:
            torch.seed()
            random.seed()
            np.random.seed()
        else:
            pl.seed_everything(seed, verbose=False)
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def train(
    kind: str, *, seed: int | None = None, by_hand: bool = False, **strategy: Any
) -> tuple[Any, ...]:
    """The loss of the run's last step, that of the module which it leaves, and numbers of it."""
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(5))
    with _as_a_script(seed):
        if by_hand:
            torch.manual_seed(int(os.environ["RANK"]))
        module = Net(kind)
        data = DataLoader(TensorDataset(x), batch_size=8)
        try:
            with fit(
                module, data, strategy={"num_microbatches": 2, **strategy}, losses="loss",
                max_steps=2, precision="32-true", callbacks=[Noise(kind)],
            ) as run:  # fmt: skip
                loss = run.losses[-1]
        except PipelineError as error:
            return str(error), error.fix
    with torch.no_grad():
        again = None if "tp" in strategy else float(module.loss(x))  # Its weights stay cut.
        return loss, again, module.scale, module.turn.sum().item()


SHARED = ["buffer", "buffer that is not saved", "drawn in setup", "drawn in on_fit_start"]


@pytest.mark.parametrize("kind", SHARED)
def test_rank_zeros_draws_and_buffers_are_everybodys(
    kind: str, ranks: Callable[[int], Ranks]
) -> None:
    first, *others = ranks(2).run(train, kind=kind, pp=2)
    assert first[0] == pytest.approx(first[1], rel=1e-5)
    assert all(other == pytest.approx(first) for other in others)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2}])
def test_they_are_at_tp_and_dp(layout: dict[str, int], ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(train, kind="drawn in setup", **layout)
    assert first[2] == second[2]


@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}])
def test_replicas_that_are_seeded_by_hand_draw_each_their_own(
    layout: dict[str, int], ranks: Callable[[int], Ranks]
) -> None:
    kind = "drawn in on_fit_start"
    (*_, first, _), (*_, second, _) = ranks(2).run(train, kind=kind, by_hand=True, **layout)
    assert (first == second) == ("pp" in layout)


REFUSED = {
    "number": "scale",
    "permutation": "parts",
    "probability": "drop.p",
    "closure": "act.own",
    "object": "config.gain",
    "teacher": "hidden",
    "hyper-parameter": "hparams.bias",
    "callback's number": "Noise (callback 1).size",
    "callback's dict": "Noise (callback 1).law.drift",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_else_a_process_draws_for_itself_is_refused_by_name(
    kind: str, ranks: Callable[[int], Ranks]
) -> None:
    first, second = ranks(2).run(train, kind=kind, pp=2)
    assert first == second
    message, fix = first
    assert message.startswith("the ranks do not have the same module, so nothing was trained:\n  ")
    (line,) = [line for line in message.splitlines() if line.startswith("  ")]
    assert line.startswith(f"  {REFUSED[kind]}: ")
    assert " on rank 0, " in line and line.endswith(" on rank 1")
    assert "pl.seed_everything(0)" in fix


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2}])
def test_it_is_at_tp_and_dp(layout: dict[str, int], ranks: Callable[[int], Ranks]) -> None:
    for message, _ in ranks(2).run(train, kind="number", **layout):
        assert "\n  scale: " in message


@pytest.mark.parametrize(
    ("kind", "place"), [("ModuleDict", "parts of layers"), ("weights", "share")]
)
def test_the_order_of_a_set_is_told_from_numbers_that_were_drawn(
    kind: str, place: str, ranks: Callable[[int], Ranks]
) -> None:
    for message, fix in ranks(2).run(train, kind=kind, seed=3, pp=2):
        assert f"\n  {place}: " in message
        assert fix.startswith("Try PYTHONHASHSEED=0 python ")


class Handle:
    """Without attributes and without a form of its own."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        return x


class Held(Net):
    def __init__(self) -> None:
        super().__init__("nothing")
        self.act = Handle()


def warned() -> list[str]:
    """What rank 0 logs of a module with something that cannot be compared."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("strategies.runtime.lightning.agreement.same_module")
    log.addHandler(handler)
    data = DataLoader(TensorDataset(torch.randn(8, WIDTH, generator=torch.Generator())), 8)
    try:
        given = {"pp": 2, "num_microbatches": 2}
        with fit(Held(), data, strategy=given, max_steps=2, precision="32-true"):
            return logged
    finally:
        log.removeHandler(handler)


def test_an_object_that_cannot_be_compared_is_named_once(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(warned)
    assert second == []
    (line,) = first
    assert line.startswith("the ranks cannot compare act (Handle): an object without attributes")


def test_what_no_step_reads_may_differ(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(train, kind="nothing", pp=2)
    assert first == pytest.approx(second)
