"""Training of a Hugging Face model on ranks, and by transformers alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM

from launcher.workloads.hf.hf_model import HfLanguageModel
from strategies.plan import Policy
from tests.ranks.fit import fit
from tests.tiny_models import batch_of, shape_of, tiny_config

STEPS, ROWS = 3, 6


@dataclass(frozen=True)
class HfCase:
    """One training; ``folder`` has the model."""

    folder: str
    schedule: str = "1f1b"
    pp: int = 2
    dp: int = 1
    tp: int = 1
    ep: int = 1
    padded: bool = False
    recompute: Policy = "none"
    pairs: bool = False
    overlap: str = "grad_reduce"
    save: str | None = None  # where all ranks leave a checkpoint


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, case: HfCase) -> None:
        self.batch = batch_of(STEPS * ROWS * case.dp, padded=case.padded)

    def __len__(self) -> int:
        return len(self.batch["tokens"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[index] for name, value in self.batch.items()}


class Learner(HfLanguageModel):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def train_hf(case: HfCase) -> dict[str, Any]:
    """Trains on this rank; the weights are read from the folder."""
    with torch.device("meta"):
        model = Learner(shape_of(Path(case.folder)))
    strategy = {
        "pp": case.pp, "dp": case.dp, "tp": case.tp, "ep": case.ep, "schedule": case.schedule,
        "num_microbatches": 4, "recompute": case.recompute, "pairs": case.pairs,
        "overlap": case.overlap, "seed": 0,
    }  # fmt: skip
    loader = DataLoader(Rows(case), batch_size=ROWS)
    with fit(model, loader, strategy=strategy, max_steps=STEPS, losses="train_loss") as run:
        if case.save is not None:
            run.trainer.save_checkpoint(case.save)
        whole = run.strategy.full_state_dict(everywhere=True) if case.ep > 1 else None
        return {
            "pp_rank": run.where.pp_rank, "losses": run.losses, "parameters": run.weights,
            "shards": run.shards, "whole": whole,
        }  # fmt: skip


class OwnStep(pl.LightningModule):
    """A module of somebody's own around a model of the library, whose loss it returns."""

    def __init__(self, family: str) -> None:
        super().__init__()
        loss = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.model = AutoModelForCausalLM.from_config(tiny_config(family, **loss))
        self.model.set_experts_implementation("eager")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        found = self.model(input_ids=batch["tokens"], labels=batch["tokens"], use_cache=False)
        self.log("train_loss", found.loss)
        if getattr(found, "aux_loss", None) is not None:
            self.log("balance", found.aux_loss)
        loss: Tensor = found.loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def train_own(family: str, schedule: str, pp: int) -> dict[str, Any]:
    """Trains such a module on this rank."""
    strategy = {
        "pp": pp, "schedule": schedule, "num_microbatches": 2, "seed": 0, "whole_after": False,
    }  # fmt: skip
    loader = DataLoader(Rows(HfCase("")), batch_size=ROWS)
    with fit(
        OwnStep(family), loader, strategy=strategy, max_steps=STEPS, losses="train_loss"
    ) as run:
        return {"losses": run.losses, "balance": run.metrics.get("balance")}


def balanced_reference(model: Any, case: HfCase) -> list[float]:
    """The same with the library's balance loss, of each microbatch as the pipeline cuts them."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    rows = batch_of(STEPS * ROWS * case.dp, padded=case.padded)
    cuts = tuple(itertools.product(range(case.dp), pairwise((0, 2, 4, 5, 6))))
    losses = []
    for step in range(STEPS):
        whole = 0.0
        for replica, (start, stop) in cuts:
            own = slice(step * ROWS * case.dp + replica, None, case.dp)
            part = {k: v[own][start:stop] for k, v in rows.items()}
            mask = part.get("attention_mask")
            given = model(part["tokens"], attention_mask=mask, use_cache=False)
            loss = functional.cross_entropy(given.logits.flatten(0, 1), part["targets"].flatten())
            share = (stop - start) / ROWS / case.dp
            whole += loss.item() * share
            if given.get("aux_loss") is not None:
                loss = loss + model.router_aux_loss_coef * given.aux_loss
            (loss * share).backward()
        losses.append(whole)
        optimizer.step()
        optimizer.zero_grad()
    return losses


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
