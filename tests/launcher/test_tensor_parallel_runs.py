"""``tp=`` from the command line: train, look at the plan, resume without it, predict with it."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.launcher.command_line import launch_here
from tests.launcher.runs import launch, read_metrics

pytestmark = pytest.mark.distributed

MODEL = (
    "model.layers=2", "model.hidden=16", "model.heads=2", "model.kv_heads=2", "model.ffn=24",
    "model.sequence=16", "model.vocab=301", "data.max_bytes=20000", "num_microbatches=2",
)  # fmt: skip
NOTE = "vocabulary padded from 301 to 302 for tp=2"


def losses(folder):
    return [row["train_loss"] for row in read_metrics(folder)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    words = [*MODEL, "pp=2", "tp=2", "trainer.max_steps=3", "trainer.save_last=true"]
    return launch(words, tmp_path_factory.mktemp("tp")).assert_done()


def test_training_on_sharers_gives_the_losses_of_one_process(trained, tmp_path):
    assert "1f1b on 4 ranks (pp=2 dp=1 tp=2)" in trained.output
    assert NOTE in trained.output
    result = trained.result
    assert (result["tp"], result["world_size"], result["steps"]) == (2, 4, 3)
    assert len(result["peak_memory_bytes"]) == 2
    alone = launch([*MODEL, "pp=1", "trainer.max_steps=3"], tmp_path).assert_done()
    assert result["num_parameters"] == alone.result["num_parameters"]
    assert losses(trained.folder) == pytest.approx(losses(alone.folder), rel=1e-5)


@pytest.mark.full
def test_a_checkpoint_of_sharers_predicts_the_same_on_one_process(trained, tmp_path):
    checkpoint = trained.result["checkpoint"]
    found = []
    for degrees in (["tp=2"], ["tp=1"]):
        words = [*MODEL, *degrees, "mode=predict", f"checkpoint={checkpoint}"]
        run = launch(words, tmp_path / degrees[0]).assert_done()
        (path,) = run.result["predictions"]
        found.append(load_file(path)["log_probabilities"])
    assert found[0].shape == found[1].shape
    assert np.abs(found[0] - found[1]).max() < 1e-5


def test_validate_shows_what_a_sharer_holds(tmp_path):
    states = {}
    for tp in (1, 2):
        words = [*MODEL, "mode=validate", f"tp={tp}", "pp=2"]
        run = launch_here(words, tmp_path / str(tp)).assert_done()
        states[tp] = run.result["peak_memory_bytes"]
        assert (NOTE in run.output) == (tp == 2)
        assert ("each of 2 tp ranks" in run.output) == (tp == 2)
    assert all(less < 0.8 * more for less, more in zip(states[2], states[1], strict=True))


def test_generating_needs_the_whole_model(tmp_path):
    refused = launch_here([*MODEL, "mode=generate", "tp=2"], tmp_path)
    assert refused.code == 2
    assert "mode=generate pp=1 dp=1 tp=1" in refused.errors
