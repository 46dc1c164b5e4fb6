"""Runs that several files look at; each is made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher.runs import MODEL, Finished, launch

# Real text, two ranks, two validations, a checkpoint half-way and one at the end.
TRAIN = (
    *MODEL, "pp=2", "data.microbatch_size=4", "optimizer.lr=0.01", "seed=3",
    "trainer.precision=64-true", "trainer.max_steps=20", "trainer.val_check_interval=8",
    "trainer.limit_val_batches=2", "trainer.checkpoint_every_n_steps=10",
    "trainer.gradient_clip_val=1.0", "experiment_name=first",
)  # fmt: skip


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A training run, of a process as users start it; nobody writes into its folder."""
    return launch(TRAIN, tmp_path_factory.mktemp("trained"), fresh=True).assert_done()


@pytest.fixture(scope="session")
def checkpoint(trained: Finished) -> Path:
    """Its last checkpoint."""
    return trained.folder / "checkpoints" / "step-00000020.ckpt"


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A simulation by uniform costs."""
    words = ["mode=simulate", "schedule=interleaved_1f1b", "pp=4", "costs=uniform"]
    return launch(words, tmp_path_factory.mktemp("simulated")).assert_done()
