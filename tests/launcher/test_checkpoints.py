"""Which checkpoints a run keeps, and which one ``auto`` takes."""

from __future__ import annotations

import doctest
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from launcher import checkpoints
from launcher.config import LaunchConfig, check, from_dict
from launcher.rank import checkpoint_callbacks
from launcher.rank.checkpoint_callbacks import surplus
from strategies.errors import PlanError
from tests.forgery import reseal
from tests.launcher.command_line import launch_here
from tests.launcher.conftest import TRAIN
from tests.launcher.runs import MODEL, Finished, launch, read_metrics


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
    again, *behind = read_metrics(tmp_path / "resumed")
    # The validation was due when that checkpoint was written, and so it is when it is read.
    assert (again["step"], again["val_loss"]) == (best, scores[best])
    for row, other in zip(behind, rows[best:], strict=True):
        for name in ("step", "train_loss", "val_loss", "lr", "grad_norm"):
            assert row[name] == other[name], name
    # Another run's checkpoints are not this one's to delete.
    assert sorted(path.name for path in folder.iterdir()) == left
    assert f"continues {folder / left[0]}\n" in resumed.output


@pytest.mark.distributed
def test_a_figure_that_validation_does_not_log_is_named(tmp_path: Path) -> None:
    words = [*MODEL, "trainer.max_steps=4", "trainer.val_check_interval=2"]
    words += ["trainer.limit_val_batches=1", "trainer.keep_best=1", "trainer.monitor=val_acc"]
    words += ["model.experts=2"]  # models with experts log more, so only the ranks know
    done = launch(words, tmp_path)
    assert done.code == 1
    assert "trainer.monitor=val_acc is not logged; these are: " in done.errors
    assert "val_loss" in done.errors


def at_step(path: Path, step: int, *, begun: float | None = None) -> Path:
    """Says that a checkpoint is of another step, or of another run."""

    def change(content: dict[str, Any]) -> None:
        content["metadata"]["step"] = step
        if begun is not None:
            content["metadata"]["begun"] = begun

    return reseal(path, change)


@pytest.mark.distributed
def test_auto_takes_the_newest_that_is_whole_and_says_so(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "monday" / "run" / "checkpoints"

    def copy(step: int) -> Path:
        path = folder / f"step-{step:08d}.ckpt"
        shutil.copytree(checkpoint, path)
        return at_step(path, step)

    good, old = copy(5), copy(4)
    cut = copy(6)
    with (cut / "rank_00000.safetensors").open("r+b") as file:
        file.truncate(100)
    flipped = copy(7)
    data = bytearray((flipped / "rank_00001.safetensors").read_bytes())
    data[-1] ^= 1
    (flipped / "rank_00001.safetensors").write_bytes(data)
    linked = copy(8)
    (linked / "values.json").rename(tmp_path / "values.json")
    (linked / "values.json").symlink_to(tmp_path / "values.json")
    unreadable = copy(9)
    (unreadable / "manifest.json").write_text("{")
    endless = copy(10)
    (endless / "manifest.json").unlink()
    os.mkfifo(endless / "manifest.json")
    deep = copy(11)
    (deep / "manifest.json").write_text("[" * 100_000)
    nothing = reseal(copy(12), lambda content: content.update(files={}))
    strange = reseal(copy(13), lambda content: content.update(metadata=[1]))
    unnamed = copy(14)
    reseal(unnamed, lambda content: content["files"].pop("tensors.json"))
    (folder / "step-00000015.ckpt.tmp").mkdir()
    os.utime(old / "manifest.json")  # neither this nor a copy elsewhere makes it younger
    shutil.copytree(old, tmp_path / "outputs" / "tuesday" / "run" / "checkpoints" / good.name)
    words = [*TRAIN, "mode=validate", "trainer.resume=auto", "trainer.max_steps=30"]
    done = launch_here(words, tmp_path).assert_done()
    for path, reason in (
        (deep, "manifest.json is damaged: its JSON is nested too deeply"),
        (endless, "manifest.json is damaged: it is a pipe, a device or a socket and no regular"),
        (unreadable, "manifest.json is damaged"),
        (nothing, "files does not name tensors.json"),
        (strange, "metadata and files must be objects"),
        (unnamed, "files does not name tensors.json"),
        (linked, "values.json cannot be read: it is a link to a file outside of the checkpoint"),
        (flipped, "rank_00001.safetensors is damaged: expected SHA-256"),
        (cut, "rank_00000.safetensors has 100 bytes, and"),
    ):
        lines = [line for line in done.output.splitlines() if line.startswith(f"skips {path}: ")]
        assert len(lines) == 1, path
        assert reason in lines[0]
    assert f"continues {good}\n" in done.output
    assert (
        "chosen among 6 checkpoints (of 1 run, steps 4 to 8): step 5 of the run that" in done.output
    )


@pytest.mark.distributed
def test_auto_goes_by_the_run_that_began_last(checkpoint: Path, tmp_path: Path) -> None:
    def copy(run: str, name: str, step: int, begun: float) -> Path:
        path = tmp_path / "outputs" / "monday" / run / "checkpoints" / name
        shutil.copytree(checkpoint, path)
        return at_step(path, step, begun=begun)

    last = copy("second", "step-00000007.ckpt", 7, 2e9 - 1e9)
    copy("first", "step-00000019.ckpt", 19, 9e8)
    renamed = copy("second", "step-00000099.ckpt", 5, 1e9)
    words = [*TRAIN, "mode=validate", "trainer.resume=auto", "trainer.max_steps=30"]
    done = launch_here(words, tmp_path).assert_done()
    assert f"continues {last}\n" in done.output
    assert "chosen among 3 checkpoints (of 2 runs, steps 5 to 19): step 7 of the run" in done.output
    # A clock that was ahead does not win, and is told of.
    ahead = copy("third", "step-00000021.ckpt", 21, 5e9)
    done = launch_here(words, tmp_path).assert_done()
    assert f"continues {last}\n" in done.output
    assert f"of {ahead.parents[1]} the clock was ahead, and counts as the oldest" in done.output
    assert "it says that it began 2128-" in done.output
    shutil.rmtree(last)
    done = launch_here(words, tmp_path).assert_done()
    assert f"continues {renamed}\n" in done.output
    assert "step 5 of the run" in done.output
    assert "; its folder is named step-00000099.ckpt\n" in done.output
    shutil.rmtree(tmp_path / "outputs" / "monday" / "first")
    shutil.rmtree(tmp_path / "outputs" / "monday" / "second")
    done = launch_here(words, tmp_path).assert_done()  # the only one
    assert f"continues {ahead}\n" in done.output


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["validate", "eval"])
def test_an_experiment_without_a_checkpoint_is_told_with_the_name_that_is_near(
    mode: str, checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "outputs" / "a" / "checkpoints" / checkpoint.name)
    words = [*TRAIN, "experiment_name=frist", f"mode={mode}"]
    words += ["trainer.resume=auto"] if mode == "validate" else []
    done = launch_here(words, tmp_path)
    assert done.code == (0 if mode == "validate" else 2)
    said = done.output if mode == "validate" else done.errors
    assert "no usable checkpoint of experiment_name=frist lies below outputs/" in said
    assert "Did you mean experiment_name=first?" in said


@pytest.mark.distributed
def test_nothing_left_to_do_and_another_optimizer_are_told_before_a_rank_is_started(
    checkpoint: Path, tmp_path: Path
) -> None:
    words = [*TRAIN, f"trainer.resume={checkpoint}"]
    for mode in ("train", "validate"):
        done = launch_here([*words, f"mode={mode}"], tmp_path)
        assert done.code == 2
        assert (
            "is at step 20, and trainer.max_steps=20. Try trainer.max_steps=40, or" in done.errors
        )
        other = [f"mode={mode}", "trainer.max_steps=30", "optimizer=sgd"]
        done = launch_here([*words, *other], tmp_path)
        assert done.code == 2
        assert f"{checkpoint} was written with optimizer=adamw" in done.errors
        assert "Try optimizer=adamw, or train anew." in done.errors


@pytest.mark.distributed
def test_auto_takes_what_stepped_aside_when_nothing_came_in_its_place(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "outputs" / "monday" / "run" / "checkpoints"
    aside = folder / "last.ckpt.old"
    shutil.copytree(checkpoint, aside)
    words = [*TRAIN, "mode=validate", "trainer.resume=auto", "trainer.max_steps=30"]
    assert f"continues {aside}\n" in launch_here(words, tmp_path).assert_done().output
    shutil.copytree(checkpoint, folder / "last.ckpt")
    assert (
        f"continues {folder / 'last.ckpt'}\n" in launch_here(words, tmp_path).assert_done().output
    )


@pytest.mark.distributed
def test_other_data_than_those_of_the_checkpoint_are_told(checkpoint: Path, tmp_path: Path) -> None:
    words = [*TRAIN, f"trainer.resume={checkpoint}", "trainer.max_steps=30", "mode=validate"]
    other = [*words, "data.max_bytes=90000"]
    done = launch_here(other, tmp_path)
    assert done.code == 2
    assert (
        "was written in a training on other data than data=stdlib is now (bytes was" in done.errors
    )
    assert done.errors.endswith("with trainer.accept_other_data=true.\n")
    launch_here([*other, "trainer.accept_other_data=true"], tmp_path).assert_done()
    launch_here(words, tmp_path).assert_done()


@pytest.mark.distributed
@pytest.mark.usefixtures("checkpoint")
@pytest.mark.full
def test_where_ranks_find_the_newest_damaged_the_one_before_is_taken(
    trained: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_HASHED_BYTES", 0)  # as of checkpoints larger than that
    folder = tmp_path / "outputs" / "monday" / "run" / "checkpoints"
    shutil.copytree(trained.folder / "checkpoints", folder)
    flipped = folder / "step-00000020.ckpt"
    data = bytearray((flipped / "rank_00001.safetensors").read_bytes())
    data[-1] ^= 1
    (flipped / "rank_00001.safetensors").write_bytes(data)
    words = [*TRAIN, "trainer.resume=auto", "trainer.max_steps=22", "hydra.run.dir=again"]
    done = launch_here(words, tmp_path).assert_done()
    assert f"skips {flipped}: {flipped}/rank_00001.safetensors is damaged" in done.output
    assert f"starts from {folder / 'step-00000010.ckpt'}\n" in done.output
    steps = [row["step"] for row in read_metrics(tmp_path / "again")]
    assert steps == list(range(11, 23))
    # One that was asked for by name is not replaced.
    words = [*TRAIN, f"trainer.resume={flipped}", "trainer.max_steps=22", "hydra.run.dir=named"]
    done = launch_here(words, tmp_path)
    assert done.code == 2
    assert "rank_00001.safetensors is damaged" in done.errors


@pytest.mark.distributed
def test_a_validation_that_was_due_is_not_skipped(tmp_path: Path) -> None:
    words = [
        *TRAIN, "trainer.max_steps=6", "trainer.val_check_interval=4",
        "trainer.checkpoint_every_n_steps=4",
    ]  # fmt: skip
    whole = launch([*words, "hydra.run.dir=whole"], tmp_path).assert_done()
    middle = whole.folder / "checkpoints" / "step-00000004.ckpt"
    rows = read_metrics(whole.folder)
    assert [row["step"] for row in rows if row["val_loss"] is not None] == [4]
    resume = [*words, f"trainer.resume={middle}"]
    launch([*resume, "hydra.run.dir=resumed"], tmp_path).assert_done()
    again = read_metrics(tmp_path / "resumed")
    assert [row["step"] for row in again] == [4, 5, 6]
    assert again[0]["val_loss"] == rows[3]["val_loss"]
    for row, other in zip(again[1:], rows[4:], strict=True):
        for name in ("step", "train_loss", "lr", "grad_norm"):
            assert row[name] == other[name], name
