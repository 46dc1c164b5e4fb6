"""``ep=`` from the command line: experts over replicas, and back on one process."""

from __future__ import annotations

import pytest

from tests.launcher.runs import launch, read_metrics

pytestmark = pytest.mark.distributed

MODEL = (
    "model.layers=2", "model.hidden=16", "model.heads=2", "model.kv_heads=2", "model.ffn=24",
    "model.sequence=16", "model.vocab=301", "model.experts=4", "data.max_bytes=20000",
    "num_microbatches=2", "data.global_batch_size=4",
)  # fmt: skip


def losses(folder):
    return [row["train_loss"] for row in read_metrics(folder)]


def test_experts_over_replicas_train_as_on_one_process_and_go_on_there(tmp_path):
    words = [*MODEL, "dp=2", "ep=2", "trainer.max_steps=2", "trainer.save_last=true"]
    spread = launch(words, tmp_path / "spread").assert_done()
    assert "2 ranks (pp=1 dp=2 ep=2)" in spread.output
    assert spread.result["ep"] == 2
    checkpoint = spread.result["checkpoint"]
    alone = [*MODEL, "num_microbatches=4", "trainer.max_steps=4"]
    resumed = launch([*alone, f"trainer.resume={checkpoint}"], tmp_path / "on").assert_done()
    whole = launch(alone, tmp_path / "whole").assert_done()
    expected = losses(whole.folder)
    assert losses(spread.folder) == pytest.approx(expected[:2], rel=1e-5)
    assert losses(resumed.folder)[-2:] == pytest.approx(expected[2:], rel=1e-5)
