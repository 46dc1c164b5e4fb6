"""Lightning's own callbacks: each leaves what it leaves under stock Lightning on one device."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelPruning,
    RichModelSummary,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import CSVLogger

from strategies.runtime.lightning.last_words import refused_by_lightning
from tests.distributed.test_trainer_flags import Scored, equal, rows
from tests.ranks.comparison import MICROBATCHES, logged_rows
from tests.ranks.fit import trainer_of
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


class Scheduled(Scored):
    flops_per_batch = 1000

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Writer(BasePredictionWriter):
    """Keeps what it is given to write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *rest: Any) -> None:
        indices, _, batch_idx, loader = rest
        self.written.append((prediction.clone(), list(indices or []), batch_idx, loader))

    def write_on_epoch_end(self, trainer: Any, module: Any, found: Any, indices: Any) -> None:
        self.written.append(([rows.clone() for rows in found], [list(each) for each in indices]))


class Shown(TQDMProgressBar):
    """Keeps what a progress bar has shown."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        super().on_train_batch_end(trainer, module, *rest)
        self.texts.append({**self.get_metrics(trainer, module), "of": self.total_train_batches})


class Spikes(SpikeDetection):
    """Keeps the losses that it looks at."""

    def __init__(self) -> None:
        super().__init__(warmup=1, mode="max")
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        super().on_train_batch_end(trainer, module, outputs, *rest)


def _lambda() -> LambdaCallback:
    made = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: seen.append(trainer.global_step),
        on_validation_end=lambda trainer, *_: seen.append(-trainer.current_epoch),
    )
    seen: list[int] = made.__dict__.setdefault("seen", [])
    return made


MADE: dict[str, Callable[[], Callback]] = {
    "LambdaCallback": _lambda,
    "LearningRateMonitor": lambda: LearningRateMonitor("step", log_momentum=True),
    "GradientAccumulationScheduler": lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
    "Timer": Timer,
    "DeviceStatsMonitor": lambda: DeviceStatsMonitor(cpu_stats=True),
    "ThroughputMonitor": lambda: ThroughputMonitor(lambda batch: len(batch[0]), window_size=2),
    "TQDMProgressBar": Shown,
    "RichProgressBar": RichProgressBar,
    "RichModelSummary": RichModelSummary,
    "BasePredictionWriter": Writer,
    "SpikeDetection": Spikes,
}
# What a callback keeps; of the others the numbers that are logged are compared.
KEPT = {
    "LambdaCallback": lambda made: made.seen,
    "BasePredictionWriter": lambda made: made.written,
    "TQDMProgressBar": lambda made: made.texts,
    "SpikeDetection": lambda made: made.losses,
    "Timer": lambda made: [made.time_elapsed(s) > 0 for s in ("train", "validate", "test")],
}
SELDOM = {
    "DeviceStatsMonitor", "LambdaCallback", "RichModelSummary", "RichProgressBar", "SpikeDetection",
    "Timer",
}  # fmt: skip
MEASURED = {"DeviceStatsMonitor", "ThroughputMonitor"}  # Each machine has its own numbers.


def run(name: str, strategy: Mapping[str, Any] | None, size: int = 8) -> dict[str, Any]:
    """What a training, a test and predictions with a callback leave."""
    module, callback = Scheduled(), MADE[name]()
    if strategy is not None:
        strategy = {"num_microbatches": MICROBATCHES, **strategy}
    shown = {"enable_progress_bar": "Progress" in name, "enable_model_summary": "Summary" in name}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger = CSVLogger(folder, name="", version="", flush_logs_every_n_steps=1)
        trainer = trainer_of(
            strategy, max_epochs=2, logger=logger, callbacks=[callback], log_every_n_steps=2,
            default_root_dir=folder, **shown,
        )  # fmt: skip
        trainer.fit(module, rows(32, size), rows(16, size))
        trainer.test(module, rows(16, size), verbose=False)
        trainer.predict(module, rows(24, size))
        found = {
            "steps": trainer.global_step,
            "seen": module.seen,
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "weights": {name: value.clone() for name, value in module.state_dict().items()},
            "kept": KEPT.get(name, lambda made: None)(callback),
        }
        if trainer.global_rank == 0:
            logged = logged_rows(logger)
            found["logged"] = [sorted(row) for row in logged] if name in MEASURED else logged
    if strategy is not None:
        trainer.strategy.engine.close()  # type: ignore[attr-defined]
    return found


@pytest.mark.lightning_feature(
    "callback", "BasePredictionWriter", "Callback", "DeviceStatsMonitor",
    "GradientAccumulationScheduler", "LambdaCallback", "LearningRateMonitor", "ProgressBar",
    "RichModelSummary", "RichProgressBar", "SpikeDetection", "TQDMProgressBar",
    "ThroughputMonitor", "Timer",
)  # fmt: skip
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name in SELDOM else ()) for name in MADE],
)
def test_a_callback_leaves_what_it_leaves_under_stock_lightning(
    ranks: Callable[[int], Ranks], name: str
) -> None:
    (stock,) = ranks(1).run(run, name=name, strategy=None)
    for rank, found in enumerate(ranks(2).run(run, name=name, strategy={"pp": 2})):
        different = [key for key in found if not equal(stock[key], found[key])]
        assert not different, (rank, {key: (stock[key], found[key]) for key in different})


def measured(**strategy: Any) -> list[tuple[float, float]]:
    """Of rank 0: samples of a second as a device's, and as all devices', batch by batch."""
    monitor = ThroughputMonitor(lambda batch: len(batch[0]), window_size=2)
    found: list[tuple[float, float]] = []

    class Reads(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            numbers = monitor._throughputs["train"].compute() if trainer.is_global_zero else {}
            if "device/samples_per_sec" in numbers:
                own = numbers["device/samples_per_sec"]
                found.append((own, numbers.get("samples_per_sec", own)))

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(
            {"num_microbatches": 2, **strategy}, max_epochs=1, callbacks=[monitor, Reads()],
            logger=CSVLogger(folder), log_every_n_steps=1,
        )  # fmt: skip
        trainer.fit(Scheduled(), rows(32, 4), rows(16, 4))
    trainer.strategy.engine.close()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(("layout", "replicas"), [({"pp": 2}, 1), ({"pp": 1, "dp": 2}, 2)])
def test_the_samples_of_a_second_are_counted_once_per_replica(
    ranks: Callable[[int], Ranks], layout: dict[str, int], replicas: int
) -> None:
    first, *_ = ranks(2).run(measured, **layout)
    assert first
    assert all(total == pytest.approx(replicas * own) for own, total in first)


def asked(kind: str) -> None:
    callback = BatchSizeFinder() if kind == "size" else ModelPruning("l1_unstructured", amount=0.5)
    strategy = {"pp": 2, "num_microbatches": 2}
    trainer_of(strategy, max_epochs=1, callbacks=[callback]).fit(Sized(), rows(32), rows(16))


class Sized(Scored):
    batch_size = 8


@pytest.mark.lightning_feature(
    "callback", "BatchSizeFinder",
    refused="The Batch size finder is not supported with distributed strategies.",
    fix="Tune it with a Trainer without PipelineStrategy (pp=1), or try sizes one by one.",
)  # fmt: skip
def test_the_batch_size_finder_is_refused(
    ranks: Callable[[int], Ranks], refusal: Callable[[object], None]
) -> None:
    for error in ranks(2).refusals(asked, kind="size"):
        refusal(refused_by_lightning(error))


@pytest.mark.lightning_feature(
    "callback", "ModelPruning",
    refused="the callback ModelPruning replaces parameters by others during training",
    fix="Prune the module before fit() (torch.nn.utils.prune), or use pp=1 tp=1 ep=1.",
)  # fmt: skip
def test_pruning_is_refused(
    ranks: Callable[[int], Ranks], refusal: Callable[[object], None]
) -> None:
    for error in ranks(2).refusals(asked, kind="pruning"):
        refusal(error)
