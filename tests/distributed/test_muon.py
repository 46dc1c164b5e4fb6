"""Muon over a pipeline gives what torch's Muon and AdamW give side by side in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.optim import Optimizer

from tests.ranks.pool import Ranks
from tests.ranks.training import Case, reference, train

pytestmark = pytest.mark.distributed

CASE = Case("zb_v", pp=2, dp=2, clip=0.05, steps=4, optimizer="Muon")
APART = ("net.embedding.", "net.head.")


def two_optimizers(model: nn.Module) -> list[Optimizer]:
    matrices, wide, narrow = [], [], []
    for name, parameter in model.named_parameters():
        outer = name.startswith(APART)
        of = matrices if parameter.dim() == 2 and not outer else wide
        (of if parameter.dim() > 1 else narrow).append(parameter)
    adamw = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(adamw, lr=3e-3, betas=(0.9, 0.95)),
    ]


class Save(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def train_and_save(case: Case, path: str) -> dict[str, Any]:
    return train(case, callbacks=[Save(path)])


@pytest.mark.parametrize(
    "case",
    [CASE, pytest.param(replace(CASE, schedule="1f1b", pp=4, dp=1), marks=pytest.mark.full)],
    ids=["zb_v-dp2", "1f1b-pp4"],
)
def test_muon_equals_a_single_process(case: Case, ranks: Callable[[int], Ranks]) -> None:
    results = ranks(case.pp * case.dp).run(train, case=case)
    losses, parameters = reference(case, two_optimizers)
    for batch, expected in enumerate(losses):
        mean = sum(result["losses"][batch] for result in results) / len(results)
        assert mean == pytest.approx(expected, abs=1e-10)
    for result in results:
        for name, value in result["parameters"].items():
            assert torch.allclose(value, parameters[name], rtol=0, atol=1e-10), name


def test_muons_state_is_cut_anew_with_the_pipeline(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    whole = replace(CASE, pp=2, dp=1, steps=4)
    path = str(tmp_path / "two.ckpt")
    through = ranks(2).run(train_and_save, case=whole, path=path)
    resumed = ranks(1).run(train, case=replace(whole, schedule="1f1b", pp=1), resume=path)[0]
    for result in through:
        for name, value in result["parameters"].items():
            assert torch.allclose(value, resumed["parameters"][name], rtol=0, atol=1e-10), name
