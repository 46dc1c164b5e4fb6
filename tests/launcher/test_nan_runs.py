"""A training whose gradients are not finite, from the command line; the ranks' part is tested in
``tests/distributed/test_nan_guard.py``.
"""

from __future__ import annotations

import pytest

from strategies.manifest import NOT_FINITE, read_manifest
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


# The first update makes weights infinite.
RUINS = (
    *MODEL, "optimizer=sgd", "optimizer.lr=1e38", "optimizer.weight_decay=1e6",
    "optimizer.warmup_steps=0", "trainer.max_steps=2", "trainer.limit_val_batches=0",
    "trainer.checkpoint_every_n_steps=1", "experiment_name=ruins",
)  # fmt: skip


@pytest.mark.parametrize("on_nan", [pytest.param("stop", marks=pytest.mark.full), "skip"])
def test_weights_that_are_not_finite_are_no_checkpoint(tmp_path, on_nan):
    done = launch([*RUINS, f"trainer.on_nan={on_nan}", "pp=2"], tmp_path)
    assert done.code == 1
    path = done.folder / "checkpoints" / "step-00000001.ckpt"
    assert "NotFiniteError: step 1: the weight " in done.errors
    assert f", so {path} was not written: training cannot go on from it." in done.errors
    assert "No checkpoint has been written. Try a smaller rate." in done.errors
    assert list(path.parent.glob("*")) == []


def test_a_run_that_ignores_them_says_so_and_no_other_goes_on_from_it(tmp_path):
    healthy = [*RUINS, "optimizer.lr=1e-9", "trainer.max_steps=1", "hydra.run.dir=good"]
    launch(healthy, tmp_path).assert_done()
    good, bad = (tmp_path / name / "checkpoints" for name in ("good", "bad"))
    good, bad = good / "step-00000001.ckpt", bad / "step-00000002.ckpt"
    done = launch([*RUINS, "trainer.on_nan=ignore", "hydra.run.dir=bad"], tmp_path).assert_done()
    said = read_manifest(bad)["metadata"][NOT_FINITE]
    assert said.startswith("the weight ")
    assert "go on      not from the last checkpoint, which is not finite\n" in done.output
    assert "trainer.resume=" not in done.output
    log = (tmp_path / "bad" / "logs" / "rank_00000.log").read_text()
    assert f"{bad} is not finite: {said}. It is written because of trainer.on_nan=ignore" in log

    refused = launch([*healthy, "trainer.max_steps=4", f"trainer.resume={bad}"], tmp_path)
    assert refused.code == 2
    assert f"{bad} is not finite: {said}, and so would be every step" in refused.errors
    again = [*healthy, "trainer.max_steps=2", "trainer.resume=auto", "hydra.run.dir=again"]
    found = launch(again, tmp_path).assert_done()
    assert f"skips {bad}: it is not finite: {said}" in found.output + found.errors
    assert str(good) in found.output + found.errors
