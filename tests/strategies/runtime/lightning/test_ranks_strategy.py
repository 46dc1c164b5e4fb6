"""A strategy in the hands of a Trainer that is not its own."""

from __future__ import annotations

import pytest
import pytorch_lightning

from strategies import PipelineStrategy
from strategies.errors import PlanError


def test_the_trainer_of_the_other_distribution_is_told_which_import_to_change():
    with pytest.raises(PlanError, match=r"Write `import lightning\.pytorch as pl` in place of"):
        pytorch_lightning.Trainer(strategy=PipelineStrategy(pp=2), accelerator="cpu", logger=False)


def test_any_other_object_is_still_no_strategy_there():
    with pytest.raises(ValueError, match="invalid strategy name"):
        pytorch_lightning.Trainer(strategy=object(), accelerator="cpu", logger=False)
