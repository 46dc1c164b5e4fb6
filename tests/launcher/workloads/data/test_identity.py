"""What is the same data, and what is not."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from launcher.workloads.data.identity import data_identity, tell_other_data
from launcher.workloads.data.source import TextSource
from strategies.errors import DataError

LARGE = (1 << 24) + 12345


def text(path: Path, **more: int) -> TextSource:
    return TextSource("text", str(path), **more)


@pytest.mark.parametrize("size", [1, 5000, LARGE])
def test_the_same_file_is_the_same_wherever_it_lies(size: int, tmp_path: Path) -> None:
    # Seeded, and without the byte that changes write.
    data = random.Random(size).randbytes(size).replace(b"?", b".")
    (tmp_path / "a.txt").write_bytes(data)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.txt").write_bytes(data)
    first = data_identity(text(tmp_path / "a.txt"))
    assert first == data_identity(text(tmp_path / "b" / "a.txt"))
    assert first["bytes"] == size
    for change in (data + b"x", data[:-1], data[:-1] + b"?", b"?" + data[1:], data[::-1] + b"."):
        (tmp_path / "a.txt").write_bytes(change)
        assert data_identity(text(tmp_path / "a.txt")) != first


def test_a_folder_is_its_files_as_far_as_they_are_read(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 100)
    whole = data_identity(text(tmp_path))
    begun = data_identity(text(tmp_path, max_bytes=150))
    (tmp_path / "c.txt").write_text("d" * 100)
    assert data_identity(text(tmp_path)) != whole
    assert data_identity(text(tmp_path, max_bytes=150)) == begun
    (tmp_path / "a.txt").rename(tmp_path / "z.txt")
    assert data_identity(text(tmp_path, max_bytes=150)) != begun


def test_a_difference_is_told_with_the_way_on(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("a" * 100)
    written = data_identity(text(file))
    assert tell_other_data(tmp_path, written, text(file)) is None
    assert tell_other_data(tmp_path, None, text(file)) is None  # of an earlier version
    file.write_text("b" * 120)
    message = tell_other_data(tmp_path, written, text(file)) or ""
    assert "(bytes was 100 and is 120)" in message
    assert message.endswith("go on in spite of it with trainer.accept_other_data=true.")
    file.write_text("b" * 100)
    assert "(hash was " in (tell_other_data(tmp_path, written, text(file)) or "")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(DataError, match="is not a regular file"):
        data_identity(text(file))
