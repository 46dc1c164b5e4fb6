"""Lightning's loggers: rank 0 alone writes, and what it writes under stock Lightning."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)

from tests.distributed.test_trainer_flags import Scored, equal, rows
from tests.ranks.comparison import WIDTH, logged_rows
from tests.ranks.fit import trainer_of
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


class Described(Scored):
    """With hyper-parameters, a graph, and numbers of which some are logged in hooks."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(2, WIDTH, dtype=torch.float64)

    def on_train_epoch_end(self) -> None:
        self.log("batches", float(len(self.seen)))


def _of_tensorboard(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (place,) = {path.parent for path in folder.rglob("events.*")}
    found = EventAccumulator(str(place))
    found.Reload()
    tags = found.Tags()
    scalars = {name: [(e.step, e.value) for e in found.Scalars(name)] for name in tags["scalars"]}
    return scalars, tags["graph"], sorted(path.name for path in folder.rglob("hparams.yaml"))


def _of_wandb(folder: Path) -> Any:
    import wandb

    run = wandb.run
    assert run is not None
    numbers = {k: v for k, v in run.summary._as_dict().items() if k[0] != "_"}
    config = dict(run.config)
    run.finish()
    return numbers, config, len(list(folder.glob("wandb/offline-run-*")))


def _of_mlflow(folder: Path) -> Any:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"file:{folder}")
    (experiment,) = client.search_experiments(filter_string="name = 'tests'")
    (run,) = client.search_runs([experiment.experiment_id])
    names, number = run.data.metrics, run.info.run_id
    told = {
        name: [(m.step, m.value) for m in client.get_metric_history(number, name)] for name in names
    }
    return told, run.data.params


MADE: dict[str, Callable[[Path], Logger]] = {
    "CSVLogger": lambda folder: CSVLogger(folder, name="", version=""),
    "TensorBoardLogger": lambda folder: TensorBoardLogger(folder, log_graph=True),
    "MLFlowLogger": lambda folder: MLFlowLogger("tests", tracking_uri=f"file:{folder}"),
    "WandbLogger": lambda folder: WandbLogger("name", folder, offline=True, project="tests"),
}
READ: dict[str, Callable[[Path], Any]] = {
    "CSVLogger": lambda folder: (
        logged_rows(CSVLogger(folder, name="", version="")),
        (folder / "hparams.yaml").read_text(),
    ),
    "TensorBoardLogger": _of_tensorboard,
    "MLFlowLogger": _of_mlflow,
    "WandbLogger": _of_wandb,
}


def run(name: str, strategy: Mapping[str, Any] | None, folder: str) -> Any:
    """What a training, a validation and a test leave in a logger's files; None on other ranks."""
    if strategy is not None:
        strategy = {"num_microbatches": 4, **strategy}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        module, logger = Described(), MADE[name](Path(folder))
        if isinstance(logger, WandbLogger) and os.environ["RANK"] == "0":
            logger.experiment.config.update({"own": 1})
        trainer = trainer_of(strategy, max_epochs=2, logger=logger, log_every_n_steps=1)
        trainer.fit(module, rows(32), rows(16))
        trainer.validate(module, rows(16), verbose=False)
        trainer.test(module, rows(16), verbose=False)
        logger.save()
        if strategy is not None:
            trainer.strategy.engine.close()  # type: ignore[attr-defined]
        return READ[name](Path(folder)) if trainer.is_global_zero else None


@pytest.mark.lightning_feature(
    "logger", "CSVLogger", "Logger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"
)
@pytest.mark.parametrize(
    "name",
    [name if name == "CSVLogger" else pytest.param(name, marks=pytest.mark.full) for name in MADE],
)
def test_a_logger_is_given_what_it_is_given_under_stock_lightning(
    ranks: Callable[[int], Ranks], tmp_path: Path, name: str
) -> None:
    if name == "MLFlowLogger":
        pytest.importorskip("mlflow", reason="needs mlflow-skinny, of no other use here")
    (stock,) = ranks(1).run(run, name=name, strategy=None, folder=str(tmp_path / "stock"))
    first, second = ranks(2).run(
        run, name=name, strategy={"pp": 2}, folder=str(tmp_path / "pipeline")
    )
    assert equal(stock, first), (stock, first)
    assert second is None
