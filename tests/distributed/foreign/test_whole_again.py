"""After training a module is what stock Lightning leaves: whole, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelSummary
from torch import Tensor, nn

from strategies import PipelineStrategy
from strategies.errors import ModelError
from tests.ranks.comparison import (
    EVERY_LAYOUT,
    LAYOUTS,
    MICROBATCHES,
    WIDTH,
    Net,
    equal_to_stock,
    examples,
)
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
    "enable_checkpointing": False, "precision": "64-true", "max_epochs": 1,
}  # fmt: skip


class Tied(Net):
    """With a weight that is used twice, in different stages."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again.weight = self.net[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.net(x)))  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("val", loss, sync_dist=True)


class Buffered(Net):
    """With buffers of layers, and one that is nobody's and that the last stage fills."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3] = nn.BatchNorm1d(WIDTH)
        self.register_buffer("centre", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self(batch[0])
        self.centre.mul_(0.9).add_(z.detach().mean(0), alpha=0.1)  # type: ignore[operator]
        return torch.nn.functional.cross_entropy(z, batch[1])


class Seen(Callback):
    """Keeps the whole state as a hook sees it."""

    reads_weights = False

    def __init__(self, everywhere: bool) -> None:
        self.everywhere = everywhere
        self.state: dict[str, Tensor] = {}

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if isinstance(trainer.strategy, PipelineStrategy):
            self.state = trainer.strategy.full_state_dict(everywhere=self.everywhere)
        else:
            self.state = {k: v.clone() for k, v in trainer.lightning_module.state_dict().items()}


def strategy_of(layout: str | None, **more: Any) -> dict[str, Any]:
    if layout is None:
        return {"devices": 1}
    options = {"num_microbatches": MICROBATCHES, "timeout_s": 60, **LAYOUTS[layout], **more}
    return {"strategy": PipelineStrategy(**options)}


def fit_often(layout: str | None, replicas: int = 1) -> dict[str, Any]:
    """A fit, what is done after it, validation, and more fits: in a new Trainer and in the old."""
    module, seen = Tied(), Seen(everywhere=True)
    data = examples(replicas=replicas)
    first = pl.Trainer(**QUIET, callbacks=[seen], **strategy_of(layout))
    first.fit(module, data)
    after = {name: value.clone() for name, value in module.state_dict().items()}
    with torch.no_grad():
        given = module.double()(next(iter(examples()))[0])
    (metrics,) = first.validate(module, data, verbose=False)
    second = pl.Trainer(**QUIET, **strategy_of(layout))
    second.fit(module, data)
    first.fit_loop.max_epochs = 2
    first.fit(module, data)
    close(first, second)
    return {
        "hook": seen.state, "after": after, "given": given, "metrics": metrics,
        "final": {name: value.clone() for name, value in module.state_dict().items()},
    }  # fmt: skip


def close(*trainers: pl.Trainer) -> None:
    for trainer in trainers:
        if isinstance(trainer.strategy, PipelineStrategy):
            trainer.strategy.engine.close()


@EVERY_LAYOUT
def test_a_module_is_whole_after_each_of_several_trainings(
    layout: str, ranks: Callable[[int], Ranks]
) -> None:
    replicas = LAYOUTS[layout].get("dp", 1)
    (stock,) = ranks(1).run(fit_often, layout=None, replicas=replicas)
    for piped in ranks(2 * replicas).run(fit_often, layout=layout):
        assert torch.allclose(piped["given"], stock["given"], atol=1e-10)
        assert piped["metrics"] == pytest.approx(stock["metrics"])
        for kind in ("hook", "after", "final"):
            assert list(piped[kind]) == list(stock[kind])
            for name, value in stock[kind].items():
                assert torch.allclose(piped[kind][name], value, atol=1e-10), (kind, name)


def fit_buffered() -> dict[str, Tensor]:
    module, trainer = Buffered(), pl.Trainer(**QUIET, **strategy_of("1f1b"))
    trainer.fit(module, examples())
    close(trainer)
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_a_buffer_has_the_value_of_the_stage_that_fills_it(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(fit_buffered)
    assert first.keys() == second.keys() == Buffered().state_dict().keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    for name in ("centre", "net.3.running_mean"):
        assert first[name].abs().sum() > 0, name


def fit_and_leave_cut() -> dict[str, Any]:
    module = Net()
    trainer = pl.Trainer(**QUIET, **strategy_of("1f1b", whole_after=False))
    trainer.fit(module, examples())
    said = []
    for use in (
        module.state_dict,
        lambda: pl.Trainer(**QUIET, **strategy_of("1f1b")).fit(module, examples()),
    ):
        with pytest.raises(ModelError) as refused:
            use()
        said.append(str(refused.value))
    full = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, examples())
    again = trainer.strategy.full_state_dict(everywhere=True)  # type: ignore[attr-defined]
    close(trainer)
    return {"said": said, "full": full, "again": again}


def fit_plainly(epochs: int) -> dict[str, Tensor]:
    module = Net()
    pl.Trainer(**{**QUIET, "max_epochs": epochs}, devices=1).fit(module, examples())
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_a_module_that_is_left_cut_says_so_and_gives_its_whole_state(
    ranks: Callable[[int], Ranks],
) -> None:
    first, second = ranks(2).run(fit_and_leave_cut)
    for piped in (first, second):
        state, other = piped["said"]
        assert "full_state_dict()" in state
        assert "cut by an earlier Trainer" in other
    once, twice = (ranks(1).run(fit_plainly, epochs=epochs)[0] for epochs in (1, 2))
    assert second["full"] == {}
    for got, wanted in ((first["full"], once), (first["again"], twice), (second["again"], twice)):
        assert list(got) == list(wanted)
        assert all(torch.allclose(got[name], wanted[name], atol=1e-10) for name in wanted)


def thaw_between_trainings(layout: str | None) -> dict[str, Tensor]:
    """The whole module invites changes: here, what the first training has held fixed."""
    module = Net()
    module.net[:2].requires_grad_(False)
    trainer = pl.Trainer(**QUIET, **strategy_of(layout))
    trainer.fit(module, examples())
    module.net.requires_grad_(True)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, examples())
    close(trainer)
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_what_is_changed_between_two_trainings_counts(ranks: Callable[[int], Ranks]) -> None:
    (stock,) = ranks(1).run(thaw_between_trainings, layout=None)
    for piped in ranks(2).run(thaw_between_trainings, layout="1f1b"):
        for name, value in stock.items():
            assert torch.allclose(piped[name], value, atol=1e-10), name


class Shown(Net):
    """Its summary runs ``forward``, and its inputs are long enough to be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(5, WIDTH, dtype=torch.float64)
        self.net[0].requires_grad_(False)


class Noting(ModelSummary):
    """Keeps what would be printed."""

    said: Any = None

    @staticmethod
    def summarize(*args: Any, **kwargs: Any) -> None:
        Noting.said = (args, kwargs)


def summarise(layout: str | None) -> Any:
    Noting.said = None
    module = Shown()
    trainer = pl.Trainer(**QUIET, callbacks=[Noting(max_depth=2)], **strategy_of(layout))
    trainer.fit(module, examples())
    first, Noting.said = Noting.said, None
    module.net[0].requires_grad_(True)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, examples())
    close(trainer)
    return first, Noting.said


@pytest.mark.lightning_feature("callback", "ModelSummary")
def test_the_summary_is_that_of_the_whole_module(ranks: Callable[[int], Ranks]) -> None:
    (stock,) = ranks(1).run(summarise, layout=None)
    first, second = ranks(2).run(summarise, layout="1f1b")
    assert first == stock
    assert second == (None, None)
    assert stock[0] != stock[1]
    assert "[5, 8]" in str(stock[0])


class NamesItsState(nn.Linear):
    """Writes its part of a state_dict itself, as layers of PyG do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name in ("weight", "bias"):
            value = getattr(self, name)
            destination[prefix + name] = value if keep_vars else value.detach()


class OwnState(Net):
    def __init__(self) -> None:
        super().__init__()
        for place in (0, 6):
            self.net[place] = NamesItsState(WIDTH, WIDTH)


def test_layers_that_name_their_state(ranks: Callable[[int], Ranks]) -> None:
    equal_to_stock(ranks, OwnState, "1f1b", strategy={"timeout_s": 600}, enable_checkpointing=True)
