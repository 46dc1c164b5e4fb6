"""What one rank alone does to hooks, rates or steps: told, or refused, by all ranks alike."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from strategies.errors import PipelineError
from strategies.runtime.lightning.strategy import PipelineStrategy
from tests.ranks.fit import QUIET
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed

WIDTH = 6
LAYOUTS = [{"pp": 2}, {"pp": 1, "dp": 2}, {"pp": 1, "tp": 2}]


class Net(pl.LightningModule):
    def __init__(self, rates: tuple[float, float] = (0.1, 0.1)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *[m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        )
        self.rates = rates

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch[0]) - batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        groups = [
            {"params": group, "lr": rate}
            for group, rate in zip(([first], others), self.rates, strict=True)
        ]
        return torch.optim.SGD(groups, lr=0.1)


def _is_first() -> bool:
    return os.environ["RANK"] == "0"


def _fit(module: Net, *callbacks: Callback, **strategy: Any) -> tuple[str | None, pl.Trainer]:
    """What the training was refused with, if it was."""
    made = PipelineStrategy(**{"pp": 2, "num_microbatches": 4, "timeout_s": 20} | strategy)
    trainer = pl.Trainer(**QUIET, strategy=made, max_epochs=1, callbacks=list(callbacks))
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    try:
        trainer.fit(module, DataLoader(TensorDataset(x), batch_size=8))
    except PipelineError as error:
        return str(error), trainer
    except RuntimeError as error:
        return repr(error), trainer
    finally:
        if made._engine is not None:
            made.engine.close()
    return None, trainer


SEEN: list[float] = []


def reads_weights(module: nn.Module, *_: Any) -> None:
    SEEN.append(sum(float(p.detach().norm()) for p in module.parameters()))


def hooked(kind: str, **strategy: Any) -> tuple[str | None, list[str]]:
    """With a hook that rank 0 alone has; what all ranks are refused with, and what is logged."""
    module = Net()
    if _is_first() and kind == "reads weights":
        module.register_forward_hook(reads_weights)
    elif _is_first() and kind == "reads outputs":
        module.register_forward_hook(lambda module, given, result: SEEN.append(result.shape[0]))
    elif _is_first():
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: None)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("strategies.runtime.lightning.strategy")
    log.addHandler(handler)
    try:
        return _fit(module, **strategy)[0], logged
    finally:
        log.removeHandler(handler)


@pytest.mark.lightning_feature(
    "logger", "WandbLogger", note="with `watch(log='all')`",
    refused="some ranks alone have a hook that reads parameters of several layers, and each rank "
    "has a part of them",
    fix="Try on_train_batch_start or on_before_optimizer_step of a callback, where every rank has "
    "all parameters (WandbLogger.watch: log='gradients', log_graph=False)",
)  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hook_of_rank_0_that_reads_weights_is_named_or_does_no_harm(
    layout: dict[str, int], ranks: Callable[[int], Ranks], refusal: Callable[[object], None]
) -> None:
    for message, _ in ranks(2).run(hooked, kind="reads weights", **layout):
        if "dp" in layout:  # Each has all parameters.
            assert message is None
            continue
        assert message is not None
        refusal(message)
        assert "hooks of the module: reads_weights on rank 0, nothing on rank 1" in message


def test_one_that_reads_no_weights_runs_where_it_is(ranks: Callable[[int], Ranks]) -> None:
    assert [m for m, _ in ranks(2).run(hooked, kind="reads outputs")] == [None, None]


def test_hooks_of_gradients_on_other_ranks_are_named_once(ranks: Callable[[int], Ranks]) -> None:
    (none, said), (_, others) = ranks(2).run(hooked, kind="gradients")
    assert none is None
    (line,) = [line for line in said if "are called on the rank of their stage" in line]
    assert "not on rank 0 those of layers.4.weight, layers.4.bias, layers.6.weight, " in line
    assert not any("their stage" in line for line in others)


def rated(kind: str, **strategy: Any) -> tuple[str | None, int]:
    """With a rate that rank 0 alone has: in its optimizer, or from its second step on."""

    class Sets(Callback):
        reads_weights = False

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if _is_first() and kind == "later" and trainer.global_step == 2:
                trainer.optimizers[0].param_groups[1]["lr"] = 0.5

    own = (0.1, 0.3) if kind == "first" and _is_first() else (0.1, 0.1)
    message, trainer = _fit(Net(own), Sets(), **strategy)
    return message, trainer.global_step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rate_of_one_rank_is_refused_before_the_first_step(
    layout: dict[str, int], ranks: Callable[[int], Ranks]
) -> None:
    for message, step in ranks(2).run(rated, kind="first", **layout):
        assert message is not None
        assert "lr of group 1 of optimizer 0: 0.3 on rank 0, 0.1 on rank 1" in message
        assert step == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_that_a_callback_sets_is_noticed_before_the_next_update(
    layout: dict[str, int], ranks: Callable[[int], Ranks]
) -> None:
    for message, step in ranks(2).run(rated, kind="later", **layout):
        assert message is not None
        assert message.startswith(
            "the ranks' optimizers differ: lr of group 1 of optimizer 0: 0.5 on rank 0, 0.1 on "
        )
        assert "This step was not applied." in message
        assert step == 2


class Stops(Callback):
    """Ends both ranks one step apart, or in the middle of an update; then all save."""

    def __init__(self, kind: str, folder: str) -> None:
        self._kind, self._path = kind, f"{folder}/last.ckpt"
        self.told: str | None = None

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        if self._kind == "one step apart" and _is_first() and trainer.global_step == 3:
            raise RuntimeError("stop")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self._path)
        if self._kind == "one step apart" and trainer.global_step == 4:
            raise RuntimeError("stop")

    def on_exception(self, trainer: Any, *_: Any) -> None:
        try:
            trainer.save_checkpoint(self._path)
        except PipelineError as error:
            self.told = str(error)


def saved(kind: str, folder: str) -> str | None:
    stops = Stops(kind, folder)
    module = Net()
    if kind == "inside an update":

        class Breaks(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                loss = super().step(closure)
                if stops.told is None and module.trainer.global_step == 3:
                    raise RuntimeError("stop")
                return loss

        module.configure_optimizers = lambda: Breaks(module.parameters(), lr=0.1)  # type: ignore[method-assign]
    _fit(module, stops, on_nan="ignore" if kind == "one step apart" else "stop")
    return stops.told


@pytest.mark.parametrize(
    ("kind", "begin", "shown"),
    [
        (
            "one step apart",
            "no checkpoint was written: ranks 0, 1 have failed, not at the same place",
            "Earlier checkpoints stay.",
        ),
        (
            "inside an update",
            "no checkpoint was written, and the one before stays: ",
            "(ranks 0, 1: step 3, 3 updates applied and one begun)",
        ),
    ],
)
def test_a_checkpoint_of_two_steps_is_refused_and_the_one_before_stays(
    kind: str, begin: str, shown: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    for message in ranks(2).run(saved, kind=kind, folder=str(tmp_path)):
        assert message is not None
        assert message.startswith(begin)
        assert shown in message
    (kept,) = tmp_path.iterdir()
    assert torch.load(kept, weights_only=False)["global_step"] == 2
