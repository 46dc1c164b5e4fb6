"""Saving in a thread: what is written, what waits for what, and when a failure is told."""

from __future__ import annotations

import errno
import re
import threading
from pathlib import Path

import pytest
import torch

from strategies.errors import CheckpointError
from strategies.runtime.lightning.checkpoints import rank_folder
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.storage import commit, tensor_files
from strategies.runtime.storage.commit import Saver
from tests.strategies.runtime.storage.saving import ALONE, save, state_at, step_in


@pytest.fixture
def saver() -> Saver:
    return Saver(Exchange(None))


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class Gate:
    """Holds every write back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.arrived = threading.Event()
        plain = tensor_files._write

        def gated(handle: int, part: memoryview) -> None:
            self.arrived.set()
            assert self.open.wait(20)
            plain(handle, part)

        monkeypatch.setattr(tensor_files, "_write", gated)


def test_the_state_is_that_of_the_call(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    state = state_at(5, 20)
    rank_folder.save(
        saver,
        state,
        tmp_path / "a.ckpt",
        coordinates=ALONE,
        holders={},
        optimizer_holders={},
        metadata={},
        in_thread=True,
    )
    assert gate.arrived.wait(20)
    assert saver.pending == tmp_path / "a.ckpt"
    assert not (tmp_path / "a.ckpt").exists()
    for tensor in state["state_dict"].values():
        tensor.fill_(9)
    gate.open.set()
    saver.finish()
    assert saver.pending is None
    assert step_in(tmp_path / "a.ckpt", size=20) == 5


def test_two_saves_never_overlap(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    save(saver, tmp_path / "a.ckpt", 1, in_thread=True)
    assert gate.arrived.wait(20)
    second = threading.Thread(
        target=save, args=(saver, tmp_path / "b.ckpt", 2), kwargs={"in_thread": True}
    )
    second.start()
    second.join(0.3)
    assert second.is_alive()  # it waits, with nothing of its own begun
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt.tmp"]
    gate.open.set()
    second.join(20)
    saver.finish()
    assert step_in(tmp_path / "a.ckpt") == 1
    assert step_in(tmp_path / "b.ckpt") == 2


def test_an_old_checkpoint_goes_when_the_new_one_is_there(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(saver, tmp_path / "a.ckpt", 1)
    gate = Gate(monkeypatch)
    save(saver, tmp_path / "b.ckpt", 2, in_thread=True)
    saver.remove(tmp_path / "a.ckpt")
    assert gate.arrived.wait(20)
    assert step_in(tmp_path / "a.ckpt") == 1
    gate.open.set()
    saver.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["b.ckpt"]


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_full_disk_is_told_with_what_is_needed_and_free(
    in_thread: bool, saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(saver, tmp_path / "a.ckpt", 1)
    with monkeypatch.context() as patched:
        patched.setattr(tensor_files, "_write", full_disk)

        def failing() -> None:
            save(saver, tmp_path / "b.ckpt", 2, in_thread=in_thread)
            saver.remove(tmp_path / "a.ckpt")  # as a rotation does
            saver.finish()

        with pytest.raises(CheckpointError) as raised:
            failing()
    message = str(raised.value)
    assert f"checkpoint {tmp_path / 'b.ckpt'} was not written: No space left" in message
    # Twice 50 x (3 float32 + 1 bfloat16) and an int64, and the generators' state.
    assert int(re.search(r"([\d,]+) bytes to write", message)[1].replace(",", "")) > 2 * 708
    assert re.search(r"[\d,]+ bytes are free", message)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
    assert step_in(tmp_path / "a.ckpt") == 1
    save(saver, tmp_path / "b.ckpt", 3, in_thread=in_thread)
    saver.finish()
    assert step_in(tmp_path / "b.ckpt") == 3


def test_a_failure_of_the_thread_is_raised_by_the_next_check(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "seal", lambda _: 1 / 0)
    save(saver, tmp_path / "a.ckpt", 1, in_thread=True)
    assert saver._thread is not None
    saver._thread.join(20)
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        saver.check()
    saver.check()  # told once
    assert not list(tmp_path.iterdir())


def test_an_object_that_cannot_be_written_is_named(saver: Saver, tmp_path: Path) -> None:
    state = {"state_dict": {"w": torch.zeros(1)}, "callbacks": {"mine": {1, 2}}}
    with pytest.raises(CheckpointError, match=r"checkpoint\.callbacks\.mine is a set"):
        rank_folder.save(
            saver,
            state,
            tmp_path / "a.ckpt",
            coordinates=ALONE,
            holders={},
            optimizer_holders={},
            metadata={},
            in_thread=False,
        )
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_no_checkpoint_is_not_replaced(saver: Saver, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("all of it")
    with pytest.raises(CheckpointError, match="exists and is no checkpoint, so it is not replaced"):
        save(saver, tmp_path / "thesis", 1)
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "all of it"


def test_what_all_ranks_leave_to_each_other_is_noticed(saver: Saver, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rank 0 left model:w to another rank, and none"):
        rank_folder.save(
            saver,
            {"state_dict": {"w": torch.zeros(3)}},
            tmp_path / "a.ckpt",
            coordinates=ALONE,
            holders={"w": (5,)},
            optimizer_holders={"w": (5,)},
            metadata={},
            in_thread=False,
        )
    assert not list(tmp_path.iterdir())
