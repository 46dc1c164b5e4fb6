"""Which checkpoints a run keeps, and which one ``auto`` takes."""

from __future__ import annotations

import doctest
import os
import shutil
import time
from pathlib import Path

import pytest

from launcher.config import LaunchConfig, check, from_dict
from launcher.rank import checkpoint_callbacks
from launcher.rank.checkpoint_callbacks import surplus
from strategies.errors import PlanError
from tests.launcher.command_line import launch_here
from tests.launcher.conftest import TRAIN
from tests.launcher.runs import MODEL, launch, read_metrics


def test_the_newest_and_the_best_stay() -> None:
    scores = {1: 5.0, 2: 1.0, 3: None, 4: 2.0, 5: 2.0, 6: None}
    assert surplus(scores, keep_last=2, keep_best=0, mode="min") == [1, 2, 3, 4]
    assert surplus(scores, keep_last=2, keep_best=2, mode="min") == [1, 3]
    assert surplus(scores, keep_last=1, keep_best=1, mode="max") == [2, 3, 4, 5]
    assert surplus(scores, keep_last=None, keep_best=1, mode="min") == []
    assert surplus({}, keep_last=1, keep_best=1, mode="min") == []


def test_the_example_holds() -> None:
    assert doctest.testmod(checkpoint_callbacks) == (0, 1)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"monitor": "val_acc"}, "Try trainer.keep_best=1."),
        ({"monitor_mode": "max"}, "Try trainer.keep_best=1."),
        ({"keep_best": 1, "limit_val_batches": 0}, "trainer.keep_best=1 goes by validations"),
    ],
    ids=str,
)
def test_a_best_that_nothing_decides_is_refused(trainer: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check(from_dict({"trainer": trainer}))
    check(LaunchConfig())


@pytest.mark.distributed
@pytest.mark.full
def test_a_run_keeps_the_best_and_the_last(tmp_path: Path) -> None:
    kept = (
        "trainer.checkpoint_every_n_steps=4", "trainer.keep_last=1", "trainer.keep_best=1",
        "hydra.run.dir=whole",
    )  # fmt: skip
    whole = launch([*TRAIN, *kept], tmp_path).assert_done()
    rows = read_metrics(whole.folder)
    scores = {int(row["step"]): row["val_loss"] for row in rows if row["val_loss"] is not None}
    assert list(scores) == [8, 16]
    best = min(scores, key=lambda step: scores[step])
    folder = whole.folder / "checkpoints"
    left = sorted(path.name for path in folder.iterdir())
    assert left == [f"step-{best:08d}.ckpt", "step-00000020.ckpt"]

    words = [*TRAIN, f"trainer.resume={folder / left[0]}", "trainer.async_save=false"]
    resumed = launch([*words, "hydra.run.dir=resumed"], tmp_path).assert_done()
    for row, other in zip(read_metrics(tmp_path / "resumed"), rows[best:], strict=True):
        for name in ("step", "train_loss", "val_loss", "lr", "grad_norm"):
            assert row[name] == other[name], name
    # Another run's checkpoints are not this one's to delete.
    assert sorted(path.name for path in folder.iterdir()) == left
    assert f"continues {folder / left[0]}\n" in resumed.output


@pytest.mark.distributed
def test_a_figure_that_validation_does_not_log_is_named(tmp_path: Path) -> None:
    words = [*MODEL, "trainer.max_steps=4", "trainer.val_check_interval=2"]
    words += ["trainer.limit_val_batches=1", "trainer.keep_best=1", "trainer.monitor=val_acc"]
    done = launch(words, tmp_path)
    assert done.code == 1
    assert "trainer.monitor=val_acc is not logged; these are: " in done.errors
    assert "val_loss" in done.errors


@pytest.mark.distributed
def test_auto_takes_the_newest_that_is_whole_and_says_so(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "monday" / "run" / "checkpoints"
    now = time.time()

    def copy(name: str, age_s: float) -> Path:
        path = folder / name
        shutil.copytree(checkpoint, path)
        os.utime(path / "manifest.json", (now - age_s, now - age_s))
        return path

    good = copy("step-00000005.ckpt", 50)
    copy("step-00000004.ckpt", 60)
    cut = copy("step-00000006.ckpt", 40)
    with (cut / "rank_00000.safetensors").open("r+b") as file:
        file.truncate(100)
    flipped = copy("step-00000007.ckpt", 30)
    data = bytearray((flipped / "rank_00001.safetensors").read_bytes())
    data[-1] ^= 1
    (flipped / "rank_00001.safetensors").write_bytes(data)
    unreadable = copy("step-00000008.ckpt", 20)
    (unreadable / "manifest.json").write_text("{")
    copy("step-00000009.ckpt.tmp", 10)
    words = [*TRAIN, "mode=validate", "trainer.resume=auto"]
    done = launch_here(words, tmp_path).assert_done()
    for path, reason in (
        (unreadable, "manifest.json is damaged"),
        (flipped, "rank_00001.safetensors is damaged: expected SHA-256"),
        (cut, "rank_00000.safetensors has 100 bytes, and"),
    ):
        assert any(
            line.startswith(f"skips {path}: ") and reason in line
            for line in done.output.splitlines()
        ), path
    assert f"continues {good}\n" in done.output


@pytest.mark.distributed
def test_auto_takes_what_stepped_aside_when_nothing_came_in_its_place(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "outputs" / "monday" / "run" / "checkpoints"
    aside = folder / "last.ckpt.old"
    shutil.copytree(checkpoint, aside)
    words = [*TRAIN, "mode=validate", "trainer.resume=auto"]
    assert f"continues {aside}\n" in launch_here(words, tmp_path).assert_done().output
    shutil.copytree(checkpoint, folder / "last.ckpt")
    assert (
        f"continues {folder / 'last.ckpt'}\n" in launch_here(words, tmp_path).assert_done().output
    )
