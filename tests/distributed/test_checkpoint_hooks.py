"""What hooks of a module that declares its units put into checkpoints and find in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.test_training_details import Units
from tests.ranks.fit import trainer_of

pytestmark = pytest.mark.distributed


class Keeping(Units):
    def __init__(self, kind: str, path: str | None) -> None:
        super().__init__()
        self.kind, self.path, self.found = kind, path, dict[str, Any]()

    def on_train_epoch_end(self) -> None:
        if self.path is not None and self.current_epoch == 0:
            self.trainer.save_checkpoint(self.path)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state: dict[str, Tensor] = checkpoint["state_dict"]
        checkpoint["plain"] = {"name": "units", "rows": torch.arange(3.0, dtype=torch.float64)}
        if self.kind == "copy":
            checkpoint["copy"] = {name: 2 * value for name, value in state.items()}
        if self.kind == "more":
            state["more"] = torch.ones(2)
        if self.kind == "fewer":
            for name in [name for name in state if name.startswith(("units.1.", "units.6."))]:
                del state[name]
        if self.kind == "rank 0" and self.trainer.is_global_zero:
            checkpoint["norm"] = sum(float(value.square().sum()) for value in state.values())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        kept = {key: checkpoint.get(key) for key in ("copy", "norm")}
        self.found = {**kept, **checkpoint["plain"], "state": dict(state)}
        state.pop("more", None)
        for number in (1, 6):
            unit = f"units.{number}.0"
            for name, shape in (("weight", (4, 4)), ("bias", (4,))):
                state.setdefault(f"{unit}.{name}", torch.full(shape, 0.1, dtype=torch.float64))


def run(
    kind: str, layout: dict[str, Any] | None, *, save: str | None = None, resume: str | None = None
) -> dict[str, Any]:
    """What the hook has found in a checkpoint that a fit begins with, and the end's loss."""
    x, y = torch.linspace(-1, 1, 256, dtype=torch.float64).view(2, 32, 4)
    strategy = None if layout is None else {"num_microbatches": 2, **layout}
    trainer = trainer_of(strategy, max_epochs=2)
    module = Keeping(kind, save)
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=8), ckpt_path=resume)
    return module.found | {"loss": float(trainer.callback_metrics["train_loss"])}


def same(one: Any, other: Any) -> None:
    """Numbers up to rounding, whatever they are in."""
    torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("copy", "folder"),
        ("copy", "file"),
        ("more", "folder"),
        ("rank 0", "folder"),
        pytest.param("fewer", "folder", marks=pytest.mark.full),
        pytest.param("more", "file", marks=pytest.mark.full),
        pytest.param("fewer", "file", marks=pytest.mark.full),
        pytest.param("rank 0", "file", marks=pytest.mark.full),
    ],
)
def test_they_find_and_leave_what_they_do_under_stock_lightning(
    ranks: Any, tmp_path: Path, kind: str, form: str
) -> None:
    known, cut = str(tmp_path / "known.ckpt"), str(tmp_path / "cut.ckpt")
    ranks(1).run(run, kind=kind, layout=None, save=known)
    (stock,) = ranks(1).run(run, kind=kind, layout=None, resume=known)
    assert stock.pop("name") == "units"
    loss = stock.pop("loss")
    expected = {key: value for key, value in stock.items() if value is not None}
    assert len(stock["state"]) == {"more": 17, "fewer": 12}.get(kind, 16)
    ranks(2).run(run, kind=kind, layout={"pp": 2, "checkpoints": form}, save=cut)
    for layout in ({"pp": 2}, {"pp": 1}):
        found = ranks(layout["pp"]).run(run, kind=kind, layout=layout, resume=cut)
        for one in found:
            assert one.pop("name") == "units"
            # Stock Lightning rounds weights to 32 bits when it resumes.
            assert one.pop("loss") == pytest.approx(loss, abs=1e-7)
            assert [key for key in one if one[key] is None] == [
                k for k in stock if stock[k] is None
            ]
            same({k: v for k, v in one.items() if v is not None}, expected)
