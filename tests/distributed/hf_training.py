"""Training of a Hugging Face model on ranks, and by transformers alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from launcher.workloads.hf.hf_model import HfLanguageModel
from strategies.plan import Policy
from strategies.runtime.lightning.strategy import PipelineStrategy
from tests.tiny_models import batch_of, shape_of

STEPS, ROWS = 5, 6


@dataclass(frozen=True)
class HfCase:
    """One training; ``folder`` has the model."""

    folder: str
    schedule: str = "1f1b"
    pp: int = 2
    tp: int = 1
    padded: bool = False
    recompute: Policy = "none"
    save: str | None = None  # where all ranks leave a checkpoint


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, case: HfCase) -> None:
        self.batch = batch_of(STEPS * ROWS, padded=case.padded)

    def __len__(self) -> int:
        return STEPS * ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[index] for name, value in self.batch.items()}


class Learner(HfLanguageModel):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


class _Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))


def train_hf(case: HfCase) -> dict[str, Any]:
    """Trains on this rank; the weights are read from the folder."""
    with torch.device("meta"):
        model = Learner(shape_of(Path(case.folder)))
    losses = _Losses()
    strategy = PipelineStrategy(
        pp=case.pp,
        tp=case.tp,
        schedule=case.schedule,
        num_microbatches=4,
        recompute=case.recompute,
        timeout_s=60,
        seed=0,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        precision="64-true",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses],
    )
    trainer.fit(model, DataLoader(Rows(case), batch_size=ROWS))
    if case.save is not None:
        trainer.save_checkpoint(case.save)
    result = {
        "losses": losses.losses,
        "parameters": {n: p.detach().clone() for n, p in model.named_parameters()},
    }
    result["shards"] = dict(strategy.engine.model.shards)
    strategy.engine.close()
    return result


def reference(model: Any, case: HfCase) -> list[float]:
    """The same by the library's own forward, backward and torch's Adam; changes ``model``."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batch = batch_of(STEPS * ROWS, padded=case.padded)
    losses = []
    for step in range(STEPS):
        part = {k: v[step * ROWS : (step + 1) * ROWS] for k, v in batch.items()}
        logits = model(
            part["tokens"], attention_mask=part.get("attention_mask"), use_cache=False
        ).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), part["targets"].flatten())
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses
