"""A small module of one's own with experts, trained on ranks and in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from strategies.errors import DataError, ModelError
from strategies.ir.instruction import exchanges
from strategies.plan import Recompute
from strategies.runtime.step.recorder import StepRecord
from tests.ranks.fit import SaveAt, fit, trainer_of
from tests.ranks.training import VOCAB, Sentences, state_elements

HIDDEN = 8


class Experts(nn.Module):
    """Top-2 of ``num_experts`` small networks, with a residual."""

    expert_parameters = ("stacks.up", "stacks.down")
    expert_slices = {"stacks.up": 2, "stacks.down": 1}  # noqa: RUF012

    def __init__(self, num_experts: int, *, one: bool, alone: bool = False) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.exchange: Any = None
        self.norm = nn.LayerNorm(HIDDEN)
        self.router = nn.Linear(HIDDEN, num_experts, bias=False)
        self.stacks = nn.ParameterDict(
            {
                "up": torch.randn(num_experts, HIDDEN, 2 * HIDDEN) / 4,
                "down": torch.randn(num_experts, 2 * HIDDEN, HIDDEN) / 4,
            }
        )
        self._one, self._alone = one, alone

    def forward(self, stream: Tensor) -> Tensor:
        tokens = self.norm(stream).flatten(0, -2)
        scores = self.router(tokens)
        if self._one:  # everything goes to the last expert
            weights = scores[:, -1:].sigmoid()
            chosen = torch.full_like(weights, self.num_experts - 1, dtype=torch.int64)
        else:
            weights, chosen = scores.softmax(-1).topk(2, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        rows = tokens[order // chosen.shape[1]]
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts)
        around = None if self._alone else self.exchange
        found = (
            self.compute(rows, counts)
            if around is None
            else around.around(self.compute, rows, counts)
        )
        found.mul_(2.0)  # It is the layer's own, wherever it has been computed.
        back = torch.empty_like(found).index_copy(0, order, found)
        mixed = (back.view(*chosen.shape, HIDDEN) * weights.unsqueeze(-1)).sum(1)
        return stream + mixed.view_as(stream)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = torch.split(rows, counts.tolist())
        pairs = zip(parts, self.stacks["up"], self.stacks["down"], strict=not self._alone)
        found = torch.cat([torch.tanh(part @ up) @ down for part, up, down in pairs])
        return functional.pad(found, (0, 0, 0, len(rows) - len(found)))


class ExpertModel(pl.LightningModule):
    """Embedding, blocks with experts, a head that may be tied; by units."""

    def __init__(self, case: ExpertCase) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.embedding = nn.Embedding(VOCAB, HIDDEN)
            self.blocks = nn.ModuleList(
                nn.Sequential(
                    nn.Linear(HIDDEN, HIDDEN), Experts(case.experts, one=case.one, alone=case.alone)
                )
                for _ in range(4)
            )
            self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if case.tied:
            self.head.weight = self.embedding.weight

    def pipeline_units(self) -> list[tuple[str, nn.Module]]:
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        return [("embedding", self.embedding), *blocks, ("head", self.head)]

    def pipeline_inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return (batch["tokens"],)

    def pipeline_result(self, tensors: Any, batch: Any, batch_idx: int, mode: str) -> Tensor:
        loss = functional.cross_entropy(tensors[0].flatten(0, 1), batch["targets"].flatten())
        if mode == "train":
            self.log("train_loss", loss.detach())
        return loss

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {"embedding": "replicated"}

    def forward(self, tokens: Tensor) -> Tensor:
        for _, unit in self.pipeline_units():
            tokens = unit(tokens)
        return tokens

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.pipeline_result((self(batch["tokens"]),), batch, batch_idx, "train")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


@dataclass(frozen=True)
class ExpertCase:
    """One training; ``rows`` are those of a replica's batch."""

    schedule: str = "1f1b"
    pp: int = 1
    dp: int = 1
    tp: int = 1
    ep: int = 1
    expert_tp: bool = False
    experts: int = 4
    one: bool = False  # whether one expert gets all tokens
    alone: bool = False  # whether a layer forgets that others have experts, too
    tied: bool = False
    rows: int = 4
    microbatches: int = 2
    accumulation: int = 1
    steps: int = 10
    clip: float | None = 0.05
    overlap: str = "grad_reduce"
    split_backward: bool = False
    pairs: bool = False
    recompute: Recompute = field(default_factory=Recompute)
    precision: str = "64-true"

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def batches(self) -> int:
        return self.steps * self.accumulation


def train_experts(
    case: ExpertCase, *, save: str | None = None, resume: str | None = None, ahead: int = 0
) -> dict[str, Any]:
    """Trains one case on this rank; there are data ``ahead``, for whoever resumes."""
    count = case.rows * case.dp * (case.steps + ahead) * case.accumulation
    with fit(
        ExpertModel(case),
        DataLoader(Sentences(count), batch_size=case.rows),
        strategy={
            "pp": case.pp, "dp": case.dp, "tp": case.tp, "ep": case.ep,
            "expert_tp": case.expert_tp, "schedule": case.schedule,
            "num_microbatches": case.microbatches, "overlap": case.overlap, "bucket_mb": 0.001,
            "split_backward": case.split_backward, "pairs": case.pairs,
            "recompute": case.recompute, "seed": 0,
        },
        resume=resume,
        losses="train_loss",
        precision=case.precision,
        accumulate_grad_batches=case.accumulation,
        gradient_clip_val=case.clip,
        max_steps=case.steps + (0 if resume is None else ahead),
        callbacks=[] if save is None else [SaveAt(case.steps, save)],
    ) as run:  # fmt: skip
        held = run.engine.named_parameters()
        return {
            "pp_rank": run.where.pp_rank,
            "tp_rank": run.where.tp_rank,
            "losses": run.losses,
            "norm": float(run.engine.gradient_norm()),
            "whole": run.strategy.full_state_dict(everywhere=True),
            "held": {n: tuple(p.shape) for n, p in held.items()},
            "unseen": _unseen(run.engine.recorder.kept[-1], run.where.pp_rank),
            "state_elements": state_elements(run.trainer.optimizers[0]),
        }


def _unseen(record: StepRecord, rank: int) -> list[str]:
    """Exchanges of a rank's last step that were not recorded, or not inside of what has them."""
    row, missed = record.program.ranks[rank], []
    spans = list(zip(record.start, record.end, strict=True))
    travels = iter(spans[len(row) :])
    for item, host in zip(row, spans, strict=False):
        for each in exchanges(item, record.program.exchanges):
            start, end = next(travels)
            if not host[0] <= start <= end <= host[1]:
                missed.append(str(each))
    assert next(travels, None) is None
    return missed


def reference_experts(case: ExpertCase) -> tuple[list[float], dict[str, Tensor]]:
    """The same in plain torch: losses per batch, and the parameters at the end."""
    model = ExpertModel(case).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    size = case.rows * case.dp
    data = Sentences(size * case.batches).tokens
    losses = []
    for batch in range(case.batches):
        rows = data[batch * size : (batch + 1) * size]
        loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        losses.append(float(loss.detach()))
        (loss / case.accumulation).backward()
        if (batch + 1) % case.accumulation == 0:
            if case.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses, dict(model.state_dict())


def train_alone(case: ExpertCase) -> str:
    """What a rank is told whose layer computes with its own experts only."""
    strategy = {"dp": case.dp, "tp": case.tp, "ep": case.ep, "num_microbatches": 2, "seed": 0}
    trainer: Any = trainer_of(strategy, max_steps=1, precision="32-true")
    try:
        trainer.fit(ExpertModel(case), DataLoader(Sentences(case.rows * case.dp), batch_size=4))
    except ModelError as error:
        return str(error)
    finally:
        trainer.strategy.engine.close()
    return ""


class _Endless(IterableDataset[dict[str, Tensor]]):
    """Nobody knows how many there are."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from (Sentences(4)[index] for index in range(4))


def predict_unevenly(case: ExpertCase) -> str:
    """What a replica is told whose data set does not come out even."""
    strategy = {"dp": case.dp, "ep": case.ep, "num_microbatches": 2, "seed": 0}
    trainer: Any = trainer_of(strategy, precision="32-true")
    try:
        trainer.predict(ExpertModel(case), DataLoader(_Endless(), batch_size=2))
    except DataError as error:
        return str(error)
    finally:
        trainer.strategy.engine.close()
    return ""
