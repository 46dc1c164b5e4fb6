"""Lightning's loggers: rank 0 alone writes, and what it writes under stock Lightning."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import (
    CometLogger,
    CSVLogger,
    LitLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
    comet,
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


class Service:
    """Stands in for what a logger hands all to that cannot be had without an account."""

    project_name = name = "tests"

    def __init__(self, *_: Any, **__: Any) -> None:
        self.given: list[Any] = []
        GIVEN.append(self.given)

    def _keep(self, *what: Any) -> None:
        self.given.append(_plain(what))

    def __getitem__(self, key: str) -> Any:
        return SimpleNamespace(append=lambda value, step: self._keep(key, value, step))

    def __setitem__(self, key: str, value: Any) -> None:
        self._keep(key, value)

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: self._keep(name, given, named)


GIVEN: list[list[Any]] = []


def _plain(value: Any) -> Any:
    """Numbers and texts as they are, of a module its class."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return value if isinstance(value, int | float | str | None) else type(value).__name__


def _of_service(folder: Path) -> Any:
    (given,) = GIVEN
    assert given, "nothing has come to it"
    return given


MADE: dict[str, Callable[[Path], Logger]] = {
    "CSVLogger": lambda folder: CSVLogger(folder, name="", version=""),
    "CometLogger": lambda folder: CometLogger(project="tests"),
    "LitLogger": lambda folder: LitLogger(folder, name="tests"),
    "TensorBoardLogger": lambda folder: TensorBoardLogger(folder, log_graph=True),
    "MLFlowLogger": lambda folder: MLFlowLogger("tests", tracking_uri=f"file:{folder}"),
    "WandbLogger": lambda folder: WandbLogger("name", folder, offline=True, project="tests"),
}
READ: dict[str, Callable[[Path], Any]] = {
    "CSVLogger": lambda folder: (
        logged_rows(CSVLogger(folder, name="", version="")),
        (folder / "hparams.yaml").read_text(),
    ),
    "CometLogger": _of_service,
    "LitLogger": _of_service,
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
        GIVEN.clear()
        if name in ("CometLogger", "LitLogger"):
            config = partial(SimpleNamespace, offline_directory=folder)
            service = SimpleNamespace(start=Service, Experiment=Service, ExperimentConfig=config)
            patch.setitem(sys.modules, "comet_ml", service)  # type: ignore[arg-type]
            patch.setitem(sys.modules, "litlogger", service)  # type: ignore[arg-type]
            patch.setattr(comet, "_COMET_AVAILABLE", True)
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
        assert trainer.is_global_zero or not GIVEN
        return READ[name](Path(folder)) if trainer.is_global_zero else None


@pytest.mark.lightning_feature(
    "logger",
    "CometLogger",
    "CSVLogger",
    "LitLogger",
    "Logger",
    "MLFlowLogger",
    "TensorBoardLogger",
    "WandbLogger",
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
