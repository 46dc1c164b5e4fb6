"""What a checkpoint replaces, and what is left where it cannot be written or deleted."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from launcher.workloads.hf.export import write_folder
from strategies.errors import CheckpointError, RunError
from strategies.manifest import committed
from strategies.runtime.lightning.checkpoints import stock_file
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.storage.commit import Saver
from tests.strategies.runtime.storage.saving import save, step_in


@pytest.fixture
def saver() -> Saver:
    return Saver(Exchange(None))


def save_file(path: Path, step: int, *, size: int = 50) -> None:
    state = {"state_dict": {"w": torch.full((size,), float(step))}, "global_step": step}
    stock_file.write(state, path, orders=[], names=["w"], first_replica=True, own={})


def step_of_file(path: Path) -> int:
    return int(stock_file.read(path)["global_step"])


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow larger, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_replaces_a_folder_of_its_name_and_a_folder_a_file(
    saver: Saver, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    save(saver, path, 1)
    save_file(path, 2)
    assert step_of_file(path) == 2
    save(saver, path, 3)
    assert step_in(path) == 3
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.mark.parametrize("folder", [False, True])
def test_the_old_one_is_there_until_the_new_one_is(
    folder: bool, saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    save_file(path, 1) if folder else save(saver, path, 1)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
    with pytest.raises(CheckpointError, match=r"last\.ckpt was not written: I/O error"):
        save(saver, path, 2) if folder else save_file(path, 2)
    there = committed(path)
    assert (step_of_file(there) if folder else step_in(there)) == 1
    assert len(os.listdir(tmp_path)) == 1


def test_what_is_no_checkpoint_is_replaced_by_neither(saver: Saver, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("all of it")
    (tmp_path / "notes.txt").write_text("by hand")
    with pytest.raises(CheckpointError, match="thesis exists and is no checkpoint, so it is not"):
        save_file(tmp_path / "thesis", 1)
    with pytest.raises(CheckpointError, match=r"notes\.txt exists and is no checkpoint, so it is"):
        save(saver, tmp_path / "notes.txt", 1)
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "all of it"
    assert (tmp_path / "notes.txt").read_text() == "by hand"


def test_a_file_without_room_is_one_message_and_the_one_before_stays(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save_file(path, 1)
    with room_for(20_000), pytest.raises(CheckpointError) as raised:
        save_file(path, 2, size=50_000)
    assert str(raised.value).startswith(f"checkpoint {path} was not written: File too large (")
    assert str(raised.value).endswith("bytes are free there). Earlier checkpoints are whole.")
    assert "\n" not in str(raised.value)
    assert step_of_file(path) == 1
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.mark.parametrize("kind", ["safetensors", "ckpt", "huggingface"])
def test_an_export_without_room_is_one_message_and_leaves_nothing(
    kind: str, tmp_path: Path
) -> None:
    source, target = tmp_path / "last.ckpt", tmp_path / "out"
    save_file(source, 1, size=50_000)
    with room_for(20_000), pytest.raises(RunError) as raised:
        if kind == "huggingface":
            write_folder(target, {}, {"w": torch.zeros(50_000)})
        else:
            stock_file.export_file(source, target, kind)
    assert str(raised.value).startswith(f"export.path={target} cannot be written: ")
    assert "File too large" in str(raised.value)
    assert "bytes are free there" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.mark.parametrize("in_thread", [False, True])
def test_an_old_one_that_cannot_be_deleted_ends_nothing(
    in_thread: bool,
    saver: Saver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refused(path: Path, **_: object) -> None:
        if path.exists():
            raise PermissionError(1, "Operation not permitted", str(path))

    save(saver, tmp_path / "a.ckpt", 1)
    save(saver, tmp_path / "b.ckpt", 2, in_thread=in_thread)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refused)
        saver.remove(tmp_path / "a.ckpt")
        saver.finish()
    assert step_in(tmp_path / "b.ckpt") == 2
    (said,) = caplog.messages
    assert said.startswith(f"{tmp_path / 'a.ckpt.tmp'} cannot be deleted: Operation not permitted.")
    assert saver.undeleted == [said]
