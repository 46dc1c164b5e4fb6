"""What the ranks of the tests run: short trainings that return everything worth comparing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from launcher.config.workload import OptimizerConfig
from launcher.workloads.language_model import LanguageModel
from launcher.workloads.optimizer import build_optimizer, embeddings_and_head
from launcher.workloads.transformer_shape import TransformerShape
from strategies.costs.table import Costs
from strategies.ir.text import format_instruction
from strategies.plan import Recompute
from tests.ranks.fit import fit, trainer_of

SEQUENCE = 6
VOCAB = 17


def small_shape(**changes: Any) -> TransformerShape:
    """Ten units, so that eight stages have at least one each."""
    given = {
        "layers": 4,
        "hidden": 8,
        "heads": 2,
        "kv_heads": 1,
        "ffn": 12,
        "vocab": VOCAB,
        "sequence": SEQUENCE,
    }
    return TransformerShape(**{**given, **changes})


class Sentences(Dataset[dict[str, Tensor]]):
    """Fixed random tokens."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(VOCAB, (count, SEQUENCE + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.tokens[index]
        return {"tokens": row[:-1], "targets": row[1:]}


class Learner(LanguageModel):
    """The built-in model with a bare optimizer."""

    def __init__(self, shape: TransformerShape, optimizer: str = "Adam") -> None:
        super().__init__(shape, seed=3)
        self._optimizer = optimizer

    def configure_optimizers(self) -> Any:
        steering = self._steering()
        if steering is not None:
            options = OptimizerConfig(name="adam", lr=3e-3, weight_decay=0.0)
            return build_optimizer(self.parameters(), options, steering=steering)
        return bare_optimizer(self._optimizer, self)


def bare_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """One of torch's, by name, with momentum where that is an option; Muon with AdamW beside it."""
    if name == "Muon":
        options = OptimizerConfig(name="muon", lr=3e-3)
        return build_optimizer(model.parameters(), options, apart=embeddings_and_head(model))
    momentum = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    return getattr(torch.optim, name)(model.parameters(), lr=3e-3, **momentum)


@dataclass(frozen=True)
class Case:
    """One training. ``rows`` are the batch sizes of a replica; they repeat until ``steps``."""

    schedule: str = "1f1b"
    pp: int = 1
    dp: int = 1
    tp: int = 1
    ep: int = 1
    expert_tp: bool = False
    sequence_parallel: bool = False
    accumulation: int = 1
    rows: int = 8
    microbatches: int = 4
    short_last: bool = False
    steps: int = 10
    clip: float | None = None
    backend: str = "auto"
    overlap: str = "grad_reduce"
    buckets_mb: float = 0.001
    accelerator: str = "cpu"
    split_backward: bool = False
    pairs: bool = False
    costs: Costs | None = None
    recompute: Recompute = field(default_factory=Recompute)
    optimizer: str = "Adam"
    compile: bool = False
    whole: bool = True  # again behind the training
    shape: TransformerShape = field(default_factory=small_shape)

    def strategy(self, **changes: Any) -> dict[str, Any]:
        """Keywords of `PipelineStrategy`."""
        return {
            "pp": self.pp, "dp": self.dp, "tp": self.tp, "ep": self.ep,
            "expert_tp": self.expert_tp, "sequence_parallel": self.sequence_parallel,
            "schedule": self.schedule, "num_microbatches": self.microbatches,
            "backend": self.backend, "overlap": self.overlap, "bucket_mb": self.buckets_mb,
            "split_backward": self.split_backward, "pairs": self.pairs, "costs": self.costs,
            "recompute": self.recompute, "seed": 0, "compile": self.compile,
            # From the emulated device no parameter comes back to the host in place.
            "whole_after": "auto" if self.whole and self.backend != "staged" else False,
        } | changes  # fmt: skip

    def trainer(self) -> dict[str, Any]:
        """Keywords of `fit`."""
        return {
            "accelerator": self.accelerator, "accumulate_grad_batches": self.accumulation,
            "gradient_clip_val": self.clip, "max_steps": self.steps, "losses": "train_loss",
        }  # fmt: skip

    @property
    def batches(self) -> int:
        return self.steps * self.accumulation

    @property
    def count(self) -> int:
        """Samples: full batches, and one with fewer rows than microbatches if asked for."""
        count = self.rows * self.dp * self.batches
        return count - (self.rows - 3) * self.dp if self.short_last else count


def train(case: Case, folder: str | None = None, **trainer_options: Any) -> dict[str, Any]:
    """Trains one case on this rank."""
    model = Learner(case.shape, case.optimizer)
    options = {"max_steps": case.steps, "default_root_dir": folder, **trainer_options}
    validation = options.pop("val_dataloaders", None)
    loader = DataLoader(Sentences(case.count), batch_size=case.rows)
    given = case.trainer() | options
    with fit(model, loader, validation, strategy=case.strategy(), **given) as run:
        timeline = run.strategy.measured_timeline()
        last = run.strategy.measured_timeline(median=False)
        rank = run.where.pp_rank
        return {
            "pp_rank": rank,
            "dp_rank": run.where.dp_rank,
            "tp_rank": run.where.tp_rank,
            "ep_rank": run.where.ep_rank,
            "shards": run.shards,
            "experts": dict(run.engine.model.experts),
            "losses": run.losses,
            "parameters": run.weights,
            "program": [format_instruction(item) for item in run.program],
            "start": timeline.start[rank] if timeline else None,
            "end": timeline.end[rank] if timeline else None,
            "last": (last.start[rank], last.end[rank]) if last else None,
            "bytes_sent": run.engine.mailbox.bytes_sent,
            "state_elements": state_elements(run.trainer.optimizers[0]),
        }


def state_elements(optimizer: Any) -> int:
    """Elements of the tensors that an optimizer keeps."""
    return sum(
        value.numel()
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, Tensor) and value.dim()
    )


def reference(
    case: Case, made: Callable[[nn.Module], list[torch.optim.Optimizer]] | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """The same training in plain torch: losses per batch, and the parameters at the end."""
    if made is not None:
        return _reference(case, made)
    # Whatever does not decide what is computed is left out: cases share what they come to.
    alone = Case(
        accumulation=case.accumulation,
        rows=case.rows * case.dp,
        steps=case.steps,
        clip=case.clip,
        optimizer=case.optimizer,
        shape=case.shape,
    )
    losses, parameters = _known_reference(alone, case.count)
    return list(losses), dict(parameters)


@functools.lru_cache(maxsize=32)
def _known_reference(case: Case, count: int) -> tuple[list[float], dict[str, Tensor]]:
    return _reference(case, None, count)


def _reference(
    case: Case,
    made: Callable[[nn.Module], list[torch.optim.Optimizer]] | None,
    count: int | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    model = Learner(case.shape, case.optimizer).double()
    model.log = lambda *_, **__: None  # type: ignore[method-assign]
    optimizers = [model.configure_optimizers()] if made is None else made(model)
    data = Sentences(case.count if count is None else count).tokens
    size = case.rows * case.dp
    losses = []
    for batch in range(case.batches):
        rows = data[batch * size : (batch + 1) * size]
        logits = model(rows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        losses.append(float(loss.detach()))
        if case.shape.moe is not None:  # the whole batch at once, in one process
            batch_of = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
            loss = model.training_step(batch_of, batch)
        (loss / case.accumulation).backward()
        if (batch + 1) % case.accumulation == 0:
            if case.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return losses, dict(model.state_dict())


def evaluate(case: Case) -> dict[str, Any]:
    """Validates and predicts on this rank, without training before; the last batch is short."""
    model = Learner(case.shape)
    trainer = trainer_of(case.strategy())
    loader = DataLoader(Sentences(case.count), batch_size=case.rows)
    (found,) = trainer.validate(model, loader, verbose=False)
    predictions = trainer.predict(model, loader)
    trainer.strategy.engine.close()  # type: ignore[attr-defined]
    return {
        "val_loss": float(found["val_loss"]),
        "predictions": torch.cat([p for p in predictions or [] if isinstance(p, Tensor)]),
    }


def evaluated(case: Case) -> tuple[float, Tensor]:
    """The same in plain torch: the mean loss, and the targets' log-probabilities."""
    model = Learner(case.shape).double()
    data = Sentences(case.count).tokens
    with torch.no_grad():
        logits = model(data[:, :-1])
        chances = logits.log_softmax(-1).gather(-1, data[:, 1:, None])[..., 0]
    return float(-chances.mean()), chances


def checkpoint_names(folder: Path) -> list[str]:
    """Committed checkpoints, oldest first."""
    return sorted(path.name for path in folder.iterdir() if (path / "manifest.json").exists())
