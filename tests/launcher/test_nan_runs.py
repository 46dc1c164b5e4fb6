"""A training whose gradients are not finite, from the command line; the ranks' part is tested in
``tests/distributed/test_nan_guard.py``.
"""

from __future__ import annotations

import pytest

from tests.launcher.runs import MODEL, launch, read_metrics

pytestmark = pytest.mark.distributed

# The first update makes every later step overflow.
EXPLODES = (
    *MODEL, "optimizer=sgd", "optimizer.lr=1e30", "optimizer.warmup_steps=0",
    "trainer.max_steps=4", "trainer.limit_val_batches=0", "trainer.checkpoint_every_n_steps=1",
    "experiment_name=explodes",
)  # fmt: skip


def test_a_run_stops_and_names_the_place_and_the_last_checkpoint(tmp_path):
    done = launch(EXPLODES, tmp_path)
    assert done.code == 1
    last = done.folder / "checkpoints" / "step-00000001.ckpt"
    assert "NotFiniteError: step 2: " in done.errors
    assert "stage 0 on rank 0 (pp 0, dp 0, " in done.errors
    assert f"The last checkpoint is {last}: trainer.resume={last} goes on" in done.errors
    assert (last / "manifest.json").is_file()
    assert [path.name for path in last.parent.iterdir()] == [last.name]
    assert done.result["status"] == "failed"
    assert "NotFiniteError" in done.result["error"]
    assert [row["step"] for row in read_metrics(done.folder)] == [1]


@pytest.mark.full
def test_a_run_that_skips_counts_what_it_has_left_out(tmp_path):
    done = launch([*EXPLODES, "trainer.on_nan=skip", "pp=2"], tmp_path).assert_done()
    assert done.result["steps"] == 4
    assert done.result["skipped_steps"] == 3
    assert [row["skipped_steps"] for row in read_metrics(done.folder)] == [0, 1, 2, 3]
    assert done.output.count("  left out: loss or gradient not finite (") == 3
    assert done.output.count("3 steps were left out: loss or gradients not finite") == 1
    log = (done.folder / "logs" / "rank_00000.log").read_text()
    assert "step 2: " in log
    assert "3 skipped so far." in log
