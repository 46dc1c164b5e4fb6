"""A strategy in the hands of a Trainer that is not its own."""

from __future__ import annotations

from types import SimpleNamespace

import lightning.pytorch as pl
import psutil
import pytest
import pytorch_lightning

from strategies import PipelineStrategy
from strategies.errors import PlanError


def test_the_trainer_of_the_other_distribution_is_told_which_import_to_change():
    with pytest.raises(PlanError, match=r"Write `import lightning\.pytorch as pl` in place of"):
        pytorch_lightning.Trainer(strategy=PipelineStrategy(pp=2), accelerator="cpu", logger=False)


def test_more_processes_than_memory_are_refused_before_one_is_started(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1_500_000_000))
    told = r"20 of them on this machine, need 6.7 GB beside .* 1.5 GB are free. .* tp: 5 at most"
    with pytest.raises(PlanError, match=told):
        pl.Trainer(strategy=PipelineStrategy(pp=10, dp=2), accelerator="cpu", logger=False)
    pl.Trainer(strategy=PipelineStrategy(pp=5), accelerator="cpu", logger=False)
    monkeypatch.setenv("LOCAL_RANK", "0")  # somebody else has started them
    pl.Trainer(strategy=PipelineStrategy(pp=10, dp=2), accelerator="cpu", logger=False)


def test_any_other_object_is_still_no_strategy_there():
    with pytest.raises(ValueError, match="invalid strategy name"):
        pytorch_lightning.Trainer(strategy=object(), accelerator="cpu", logger=False)
