"""Groups of optimizers that are not those of ``configure_optimizers()``: saved, and resumed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, ModelCheckpoint
from torch import Tensor, nn

from strategies.errors import CheckpointError
from strategies.runtime.lightning.checkpoints.stock_file import load_checkpoint
from tests.distributed.foreign.test_checkpoints_as_stock import QUIET, Losses, strategy_of
from tests.ranks.comparison import Net, examples
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


class Filtering(Net):
    """Trains what is not frozen at the time it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.backbone = self.net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Freezing(Filtering):
    """Its hook freezes layers in the first two epochs, behind ``configure_optimizers()``."""

    def on_train_epoch_start(self) -> None:
        self.net[:4].requires_grad_(self.current_epoch >= 2)


class Adding(Filtering):
    """Its hook lets a frozen layer go in the second epoch, into a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)
            group = {"params": list(self.net[0].parameters()), "lr": 0.1}
            self.trainer.optimizers[0].add_param_group(group)


class MadeOnce(Filtering):
    """As LightningCLI does: the optimizer is made once, before ``fit``."""

    def __init__(self) -> None:
        super().__init__()
        self.made = torch.optim.Adam(reversed(list(self.parameters())), lr=0.01)

    def configure_optimizers(self) -> Any:
        return self.made


class Unfreezing(Filtering):
    def configure_callbacks(self) -> list[Callback]:
        return [BackboneFinetuning(1, lambda epoch: 1.5)]


CASES = {each.__name__: each for each in (Freezing, Adding, MadeOnce, Unfreezing)}


def fit(
    case: str, *, layout: str | None, epochs: int, folder: str, kind: str = "file", resume: str = ""
) -> dict[str, Any]:
    options = {} if layout is None else {"checkpoints": kind}
    losses = Losses()
    keeps = ModelCheckpoint(folder, f"{{epoch}}-of-{epochs}", save_top_k=-1)
    trainer = pl.Trainer(
        **QUIET | {"enable_checkpointing": True},
        max_epochs=epochs,
        callbacks=[losses, keeps],
        **strategy_of(layout, **options),
    )
    with warnings.catch_warnings():
        if resume:  # Lightning says that the folder of its checkpoints is another one.
            warnings.simplefilter("ignore", UserWarning)
        trainer.fit(CASES[case](), examples(), ckpt_path=resume or None)
    if layout is not None:
        trainer.strategy.engine.close()  # type: ignore[attr-defined]
    return {
        "losses": losses.losses,
        "path": str(Path(folder) / f"epoch={epochs - 1}-of-{epochs}.ckpt"),
    }


def groups_of(path: str) -> list[list[int]]:
    (optimizer,) = load_checkpoint(path)["optimizer_states"]
    return [group["params"] for group in optimizer["param_groups"]]


@pytest.mark.parametrize(
    "case",
    ["Freezing", *(pytest.param(n, marks=pytest.mark.full) for n in ("MadeOnce", "Unfreezing"))],
)
def test_they_are_saved_as_by_stock_lightning_and_resumed_by_it_and_by_a_pipeline(
    ranks: Callable[[int], Ranks], tmp_path: Path, case: str
) -> None:
    def run(layout: str | None, name: str, **more: Any) -> dict[str, Any]:
        pool, folder = ranks(2 if layout else 1), str(tmp_path / name)
        found: dict[str, Any] = pool.run(fit, case=case, layout=layout, folder=folder, **more)[0]
        return found

    stock = run(None, "stock", epochs=2)
    ours = run("1f1b", "ours", epochs=2)
    assert ours["losses"] == pytest.approx(stock["losses"], abs=1e-10)
    assert groups_of(ours["path"]) == groups_of(stock["path"])
    expected = run(None, "stock again", epochs=3, resume=stock["path"])["losses"]
    for layout, start in ((None, ours), ("1f1b", ours), ("1f1b", stock)):
        found = run(layout, f"again {layout} {start is ours}", epochs=3, resume=start["path"])
        assert found["losses"] == pytest.approx(expected, abs=1e-10)


def test_an_added_group_is_saved(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    stock, ours = (
        ranks(2 if layout else 1).run(
            fit, case="Adding", layout=layout, epochs=2, folder=str(tmp_path / str(layout))
        )[0]
        for layout in (None, "1f1b")
    )
    assert ours["losses"] == pytest.approx(stock["losses"], abs=1e-10)
    assert groups_of(ours["path"]) == groups_of(stock["path"])
    saved, other = (
        load_checkpoint(one["path"])["optimizer_states"][0]["state"] for one in (ours, stock)
    )
    assert saved.keys() == other.keys()
    for position, entry in other.items():
        for key, value in entry.items():
            torch.testing.assert_close(saved[position][key], value, rtol=0, atol=1e-10)


def test_unfreezing_goes_on_from_a_folder(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    given: dict[str, Any] = {"case": "Unfreezing", "layout": "1f1b", "kind": "folder"}
    straight = ranks(2).run(fit, **given, epochs=3, folder=str(tmp_path / "straight"))[0]
    first = str(tmp_path / "straight" / "epoch=1-of-3.ckpt")
    found = ranks(2).run(fit, **given, epochs=3, folder=str(tmp_path / "again"), resume=first)[0]
    assert len(found["losses"]) == 4
    assert straight["losses"][8:9] == pytest.approx(found["losses"][:1], abs=1e-10)


class Stranger(Filtering):
    """Its optimizer updates a parameter that is not the module's."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)


CASES["Stranger"] = Stranger


def refusal(folder: str) -> tuple[str, bool]:
    try:
        fit("Stranger", layout="1f1b", epochs=1, folder=folder)
    except CheckpointError as error:
        return str(error), Path(folder).exists()
    return "", True


def test_what_no_checkpoint_can_hold_is_refused_before_the_first_step(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    for said, trained in ranks(2).run(refusal, folder=str(tmp_path / "none")):
        assert "the optimizer updates a parameter that is no part of the module" in said
        assert not trained
