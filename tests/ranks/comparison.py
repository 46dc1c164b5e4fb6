"""Somebody's LightningModule under stock Lightning and in pipelines: what both have come to.

A case is a function of no arguments that makes a module, at the top of a test's file. It is called
on each rank, as a user's script is.

What once differed, and where it is compared now (files of this folder, if no other is named)::

    finding 1, 2, 8      metrics updated, called, computed in hooks      test_metrics
    finding 3, 6, 7, 22  teachers, clipping, backward(), unfreezing      test_parameter_hooks
    finding 4, 9, 27, 28 sums, lists, counters, outputs for hooks        test_step_state
    finding 5, 20, 30    state_dict after fit, summary, second Trainer   test_whole_again
    finding 10           files of stock Lightning, and for it            test_checkpoints_as_stock
    finding 11           import pytorch_lightning  strategies/runtime/lightning/test_ranks_strategy
    finding 12, 13       several loaders, steps without batch_idx        test_loaders
    finding 14, 15, 16   optimizers in steps, compiled parts, containers test_patterns
    finding 16           models of diffusers                             test_diffusers
    finding 17           families that are converted        launcher/workloads/hf/test_conversion
    finding 18, 21, 24   distributions, heads, checkpoint_sequential     test_patterns
    finding 19           all_gather in steps                             test_collectives
    finding 23, 26       recorded values, objects between layers         test_patterns
    finding 25           packed sequences                                test_packed_sequences
    finding 29           predictions that are lists   strategies/runtime/step/test_microbatch
"""

from __future__ import annotations

import csv
import importlib
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks.fit import fit
from tests.ranks.pool import Ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"pp": 2, "schedule": "1f1b"},
    "zb_v": {"pp": 2, "schedule": "zb_v"},
    "1f1b-dp2": {"pp": 2, "dp": 2, "schedule": "1f1b"},
    "zb_v-dp2": {"pp": 2, "dp": 2, "schedule": "zb_v"},
}
SHARED: dict[str, dict[str, Any]] = {
    "tp2": {"pp": 1, "tp": 2},
    "pp2-tp2": {"pp": 2, "tp": 2, "schedule": "1f1b"},
    "dp2-tp2": {"pp": 1, "dp": 2, "tp": 2},
}
MORE = [pytest.param(name, marks=pytest.mark.full) for name in ("1f1b", "zb_v", "1f1b-dp2")]
EVERY_LAYOUT = pytest.mark.parametrize("layout", ["zb_v-dp2", *MORE])
# Four ranks cost three times as much as two: one case in six has them.
_EVERY_DAY = ("1f1b", "zb_v", "zb_v-dp2", "1f1b", "zb_v", "zb_v")


def spread(
    cases: Sequence[Callable[[], pl.LightningModule] | str],
    *,
    name: str = "case",
    seldom: Sequence[Callable[[], pl.LightningModule] | str] = (),
) -> pytest.MarkDecorator:
    """Parameters ``case`` and ``layout``: each case in one layout every day, else in all.

    Those of ``seldom`` are in the full matrix alone.
    """
    every_day = dict(zip(cases, itertools.cycle(_EVERY_DAY), strict=False))
    return pytest.mark.parametrize(
        (name, "layout"),
        [
            pytest.param(
                case,
                layout,
                id=f"{getattr(case, '__name__', case)}-{layout}",
                marks=() if layout == every_day.get(case) else pytest.mark.full,
            )
            for case in (*cases, *seldom)
            for layout in LAYOUTS
        ],
    )


BATCH, CLASSES, WIDTH, MICROBATCHES = 8, 3, 8, 4
TOLERANCE = 1e-10


class Net(pl.LightningModule):
    """Four layers and a head, enough for two stages of a split pipeline on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [m for _ in range(4) for m in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
        self.net = torch.nn.Sequential(*layers)
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def examples(*, rows: int = 32, replicas: int = 1, seed: int = 1) -> DataLoader[Any]:
    """Batches of 8 rows per replica, in a fixed order; a sampler deals them to the replicas."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (rows,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH * replicas)


@dataclass
class Fitted:
    """What a training has come to on one rank.

    Attributes:
        metrics: ``trainer.callback_metrics`` at the end, all that callbacks decide by.
        logged: The rows of the logger.
        weights: All parameters, by name: each rank has them when training has ended.
        buffers: The same of buffers.
        told: What the case's ``told(module, trainer)`` gives, if it has such a function.
    """

    metrics: dict[str, float]
    logged: list[dict[str, float]]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    told: Any = field(default=None)


def train(
    case: str, *, strategy: Mapping[str, Any] | None, told: str | None = None, **trainer: Any
) -> Fitted:
    """Fits a case; runs on a rank of the tests, or on a single one for stock Lightning.

    Args:
        case: ``module:function``, which makes the LightningModule.
        strategy: Keywords of `PipelineStrategy`; None for stock Lightning on one device.
        told: ``module:function`` of module and trainer; its result is the ``told`` of the answer.
        trainer: Keywords of the Trainer. ``callbacks`` is ``module:function``, which makes a list.
    """
    replicas = trainer.pop("replicas", 1)  # of stock Lightning: as many batches in one
    if "callbacks" in trainer:
        trainer["callbacks"] = _find(trainer["callbacks"])()
    module = _find(case)()
    with tempfile.TemporaryDirectory() as folder:
        logger = CSVLogger(folder, name="", version="", flush_logs_every_n_steps=1)
        own, none = type(module), pl.LightningModule
        validates = own.validation_step is not none.validation_step
        validates = validates and own.val_dataloader is none.val_dataloader
        with fit(
            module,
            getattr(module, "loaders", examples)(replicas=replicas),
            examples(seed=2, replicas=replicas) if validates else None,
            strategy=None if strategy is None else {"num_microbatches": MICROBATCHES, **strategy},
            **{
                "max_epochs": 1, "num_sanity_val_steps": 0, "log_every_n_steps": 1,
                "logger": logger, "default_root_dir": folder, **trainer,
            },
        ) as run:  # fmt: skip
            buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
            weights = run.weights
            if strategy is not None and strategy.get("tp", 1) * strategy.get("ep", 1) > 1:
                state = run.strategy.full_state_dict(everywhere=True)
                weights = {n: state[n] for n in run.engine.model.parameter_names}
            return Fitted(
                metrics=run.metrics,
                logged=logged_rows(logger),
                weights=weights,
                buffers=buffers,
                told=None if told is None else _find(told)(module, run.trainer),
            )


def equal_to_stock(
    ranks: Callable[[int], Ranks],
    case: Callable[[], pl.LightningModule],
    layout: str,
    *,
    told: Callable[[Any, Any], Any] | None = None,
    callbacks: Callable[[], Sequence[Any]] | None = None,
    strategy: Mapping[str, Any] | None = None,
    buffers: Sequence[str] = (),
    **trainer: Any,
) -> tuple[Fitted, list[Fitted]]:
    """Fits a case under stock Lightning and in a pipeline, and compares weights and metrics.

    Every rank has all metrics of stock Lightning and all its parameters, and the named ``buffers``
    are compared on all ranks. Returns both for what else is to be compared.
    """
    names = {
        key: f"{value.__module__}:{value.__qualname__}"
        for key, value in {"case": case, "told": told, "callbacks": callbacks}.items()
        if value is not None
    }
    options = (LAYOUTS | SHARED)[layout] | dict(strategy or {})
    replicas = options.get("dp", 1)
    (stock,) = ranks(1).run(train, strategy=None, replicas=replicas, **names, **trainer)
    world = options["pp"] * options.get("tp", 1) * replicas
    piped: list[Fitted] = ranks(world).run(train, strategy=options, **names, **trainer)
    for rank, fitted in enumerate(piped):
        assert fitted.metrics == pytest.approx(stock.metrics, abs=TOLERANCE), f"rank {rank}"
        assert fitted.weights.keys() == stock.weights.keys(), f"rank {rank}"
        for name, value in fitted.weights.items():
            assert torch.allclose(value, stock.weights[name], rtol=0, atol=TOLERANCE), name
        for name in buffers:
            assert torch.allclose(fitted.buffers[name], stock.buffers[name], atol=TOLERANCE), name
    return stock, piped


def _find(place: str) -> Any:
    module, _, name = place.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def logged_rows(logger: CSVLogger) -> list[dict[str, float]]:
    logger.save()
    path = Path(logger.log_dir) / "metrics.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as stream:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(stream)]
