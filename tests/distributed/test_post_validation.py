"""Updates before their verdict: the same bits as where ranks wait for it, struck or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from launcher.config.workload import OptimizerConfig
from launcher.workloads.optimizer import build_scheduler
from strategies.errors import NotFiniteError
from strategies.runtime.lightning.updating_strategy import why_it_waits
from tests.ranks.fit import trainer_of
from tests.ranks.pool import Ranks
from tests.ranks.training import (
    SEQUENCE,
    VOCAB,
    Case,
    Learner,
    Sentences,
    bare_optimizer,
)

pytestmark = pytest.mark.distributed

CASE = Case("zb_v", pp=2, microbatches=6, rows=6, steps=8, clip=1.0)


class Model(Learner):
    """With rates that change from step to step, and a loss that is NaN where it is told."""

    bad_steps: tuple[int, ...] = ()

    def configure_optimizers(self) -> Any:
        optimizer = bare_optimizer(self._optimizer, self)
        options = OptimizerConfig(warmup_steps=5)
        scheduler = build_scheduler(optimizer, options, total_steps=20)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def pipeline_result(self, tensors: Any, batch: Any, batch_idx: int, mode: Any) -> Any:
        loss = super().pipeline_result(tensors, batch, batch_idx, mode)
        return loss * math.nan if batch_idx in self.bad_steps and mode == "train" else loss


class Counting(nn.Module):
    """Each forward is another one than that before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * (1 + 0.01 * self.calls)


class Plain(pl.LightningModule):
    """Declares nothing, and its first layers keep something of every forward."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCAB, 8)
        layers = [Counting(), nn.Linear(8, 8), nn.BatchNorm1d(SEQUENCE), nn.Dropout(0.2)]
        self.layers = nn.Sequential(*layers, *(nn.Linear(8, 8) for _ in range(4)))
        self.head = nn.Linear(8, VOCAB)
        self.bad_steps: tuple[int, ...] = ()
        self.seen = 0
        self._optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1
        logits = self.head(self.layers(self.embedding(batch["tokens"])))
        loss = functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        if batch_idx in self.bad_steps:
            loss = loss * math.nan
        self.log("train_loss", loss)
        return loss

    configure_optimizers = Model.configure_optimizers


class Clearing(Plain):
    """Writes into its gradients before a validation."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)


class Notes(Callback):
    reads_weights = False

    def __init__(self, path: str | None) -> None:
        self._path = path
        self.losses: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        if self._path is not None and trainer.global_step == 3:
            trainer.save_checkpoint(self._path)


def train(
    case: Case,
    *,
    late: bool,
    bad_steps: tuple[int, ...] = (),
    on_nan: Any = "stop",
    path: str | None = None,
    resume: str | None = None,
    precision: Any = "64-true",
    val: int = 0,
    plain: bool = False,
) -> dict[str, Any]:
    model = Plain(case.optimizer) if plain else Model(case.shape, case.optimizer)
    model.bad_steps = bad_steps
    notes = Notes(path)
    options = case.trainer() | {
        "precision": precision, "val_check_interval": val or 1.0, "num_sanity_val_steps": 0,
        "callbacks": [notes],
    }  # fmt: skip
    del options["losses"]
    trainer: Any = trainer_of(case.strategy(on_nan=on_nan, post_validation=late), **options)
    loader = DataLoader(Sentences(case.count), batch_size=case.rows)
    error = ""
    try:
        trainer.fit(model, loader, loader if val else None, ckpt_path=resume)
    except NotFiniteError as raised:
        error = str(raised)
    strategy = trainer.strategy
    engine = strategy.engine
    engine.complete()
    optimizer = trainer.optimizers[0]
    state = [
        value
        for group in optimizer.param_groups
        for p in group["params"]
        for _, value in sorted(optimizer.state[p].items())
        if isinstance(value, Tensor)
    ]
    found = {
        "losses": notes.losses,
        "rates": notes.rates,
        "weights": {n: p.detach().clone() for n, p in engine.named_parameters().items()},
        "state": [value.clone() for value in state],
        "repairs": strategy.flush_repairs,
        "waits": len(engine.norm_waits_s),
        "skipped": strategy.skipped_steps,
        "step": trainer.global_step,
        "error": error.split(" The last")[0],
        "kept_bytes": engine.late.kept.num_bytes,
        "kept": [[n, b.tolist()] for n, b in model.named_buffers() if not b.is_meta]
        if plain
        else 0,
        "counts": [model.seen, model.layers[0].calls] if plain else [],
        "val": float(trainer.callback_metrics.get("val_loss", 0.0)),
    }
    engine.close()
    return found


ALL = ("losses", "rates", "skipped", "step", "error", "val", "kept", "counts")


def check_same(
    ranks: Ranks, case: Case, compared: tuple[str, ...] = ALL, **options: Any
) -> list[dict[str, Any]]:
    """Both ways on all ranks; what came of the late one."""
    found = ranks.run(train, case=case, late=True, **options)
    for late, waited in zip(found, ranks.run(train, case=case, late=False, **options), strict=True):
        for key in compared:
            assert repr(late[key]) == repr(waited[key]), key
        for name, weight in waited["weights"].items():
            assert torch.equal(late["weights"][name], weight), name
        for mine, other in zip(late["state"], waited["state"], strict=True):
            assert mine.dtype == other.dtype
            assert torch.equal(mine, other)
        assert waited["repairs"] == waited["kept_bytes"] == 0
    assert len({result["repairs"] for result in found}) == 1
    return found


# The norms of these steps lie on both sides of their limits.
STRUCK = [
    pytest.param(replace(CASE, clip=1e9), 0, id="never", marks=pytest.mark.full),
    pytest.param(replace(CASE, clip=15.0, steps=16), 2, id="sometimes", marks=pytest.mark.full),
    pytest.param(replace(CASE, clip=1e-3), 1, id="always", marks=pytest.mark.full),
    pytest.param(
        replace(CASE, schedule="zb_h2", pp=4, clip=1e-3), 1, id="zb_h2-pp4", marks=pytest.mark.full
    ),
    pytest.param(replace(CASE, clip=1e-3, dp=2, overlap="zero1", steps=4), 1, id="zero1"),
    pytest.param(
        replace(CASE, clip=1e-3, backend="strict"), 1, id="in order", marks=pytest.mark.full
    ),
    pytest.param(
        replace(CASE, clip=1e-3, accumulation=2), 1, id="accumulation", marks=pytest.mark.full
    ),
    pytest.param(replace(CASE, clip=1e-3, optimizer="Muon"), 1, id="muon", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("case", "repairs"), STRUCK)
def test_the_bits_are_those_of_waiting(
    case: Case, repairs: int, ranks: Callable[[int], Ranks]
) -> None:
    found = check_same(ranks(case.pp * case.dp), case)
    assert found[0]["repairs"] == repairs
    assert all(result["kept_bytes"] > 0 for result in found)


@pytest.mark.parametrize(
    ("case", "bad_steps", "repairs"),
    [
        pytest.param(replace(CASE, clip=0.05), (), 1, id="clipped"),
        pytest.param(replace(CASE, clip=1e9), (1, 2, 7), 2, id="left out", marks=pytest.mark.full),
        pytest.param(
            # Clipping strikes every step, so ranks wait from the second one on.
            replace(CASE, schedule="zb_h2", pp=4, clip=1e-3), (), 1, id="zb_h2-pp4",
            marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_modules_that_declare_nothing_go_on_too_and_layers_are_put_back(
    case: Case, bad_steps: tuple[int, ...], repairs: int, ranks: Callable[[int], Ranks]
) -> None:
    found = check_same(ranks(case.pp), case, bad_steps=bad_steps, on_nan="skip", plain=True)
    assert found[0]["repairs"] == repairs
    assert all(result["kept_bytes"] > 0 for result in found)


@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.full), 1e9])
def test_a_step_that_is_not_finite_is_left_out_late(
    clip: float | None, ranks: Callable[[int], Ranks]
) -> None:
    case = replace(CASE, clip=clip)
    found = check_same(ranks(2), case, bad_steps=(1, 2, 7), on_nan="skip")
    assert found[0]["skipped"] == [1, 2, 7]
    assert found[0]["repairs"] == 2  # The step behind one that was undone waits.


@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.full), 1e9])
def test_a_stop_is_told_of_the_step_that_it_was(
    clip: float | None, ranks: Callable[[int], Ranks]
) -> None:
    # The hooks behind that batch have run when the word comes; nothing else tells the two apart.
    same = ("skipped", "step", "error")
    found = check_same(ranks(2), replace(CASE, clip=clip), same, bad_steps=(2,))
    assert found[0]["error"].startswith("step 3: the loss of microbatch 0 is nan")
    assert found[0]["step"] == 2


def test_checkpoints_and_validations_see_confirmed_weights(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    case = replace(CASE, clip=1e-3, steps=5)
    paths = {late: str(tmp_path / f"{late}.ckpt") for late in (True, False)}
    runs = {
        late: ranks(2).run(train, case=case, late=late, path=paths[late], val=2)
        for late in (True, False)
    }
    assert runs[True][0]["val"] == runs[False][0]["val"]
    for late, other in ((True, False), (False, True)):
        resumed = ranks(2).run(train, case=case, late=late, resume=paths[other])
        for result, through in zip(resumed, runs[late], strict=True):
            for name, weight in through["weights"].items():
                assert torch.equal(result["weights"][name], weight), name


@pytest.mark.parametrize(
    ("case", "options"),
    [
        pytest.param(replace(CASE, clip=1e-3, steps=3), {}, id="declared"),
        pytest.param(
            replace(CASE, clip=1e-3, steps=3), {"plain": True}, id="plain", marks=pytest.mark.full
        ),
        pytest.param(
            replace(CASE, clip=1e-3, steps=3, dp=2, optimizer="SGD"), {}, id="dp2",
            marks=pytest.mark.full,
        ),
        pytest.param(
            replace(CASE, clip=1e-3, steps=3, dp=2, overlap="zero1"), {}, id="zero1",
            marks=pytest.mark.full,
        ),
        pytest.param(
            replace(CASE, clip=1e-3, steps=3), {"precision": "bf16-true"}, id="bf16",
            marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_an_update_that_is_struck_right_before_a_validation_is_made_again(
    case: Case, options: dict[str, Any], ranks: Callable[[int], Ranks]
) -> None:
    # Lightning takes the gradients away before it validates, and before any callback hears of it.
    found = check_same(ranks(case.pp * case.dp), case, val=1, **options)
    assert found[0]["repairs"] == 1


def test_modules_that_write_into_gradients_before_a_validation_wait() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    model = Plain("SGD")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert why_it_waits(trainer, model, optimizer) == ""
    clearing = Clearing("SGD")
    assert why_it_waits(trainer, clearing, optimizer) == "Clearing.zero_grad is around the update"


def test_a_step_that_is_not_finite_right_before_a_validation_is_told_with_its_cause(
    ranks: Callable[[int], Ranks],
) -> None:
    same = ("skipped", "step", "error")
    found = check_same(ranks(2), replace(CASE, clip=1e9), same, bad_steps=(1,), val=2)
    assert found[0]["error"].startswith("step 2: the loss of microbatch 0 is nan")


def test_16_bit_weights_are_undone_with_their_copies(ranks: Callable[[int], Ranks]) -> None:
    found = check_same(ranks(2), replace(CASE, clip=1e-3), precision="bf16-true")
    assert found[0]["repairs"] == 1
