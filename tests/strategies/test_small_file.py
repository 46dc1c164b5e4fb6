"""Files that lie about what they are: told at once, without waiting and without filling memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from strategies.small_file import FileRefusedError, parse_json, read_bytes, read_json, read_text


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b'{"a": [1]}')
    assert read_bytes(file, most_bytes=10) == b'{"a": [1]}'
    assert read_json(file, most_bytes=10) == {"a": [1]}
    (tmp_path / "link").symlink_to(file)
    assert read_text(tmp_path / "link", most_bytes=10) == '{"a": [1]}'
    # The kernel's files have no size before they are read.
    assert read_text(Path("/proc/self/status"), most_bytes=1 << 16).startswith("Name:")
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "b", most_bytes=10)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("pipe", "it is a pipe, a device or a socket and no regular file"),
        ("device", "it is a pipe, a device or a socket and no regular file"),
        ("folder", "it is a folder and no regular file"),
        ("socket", "it is a pipe, a device or a socket and no regular file"),
        ("large", "it has more than 10 bytes, which is the most"),
        ("huge", "it has more than 10 bytes, which is the most"),
        ("latin", "it is not UTF-8 at byte 1"),
        ("loop", "Too many levels of symbolic links"),
        ("null", "embedded null byte"),
        ("kernel", "it has more than 10 bytes, which is the most"),
    ],
)
def test_what_is_no_small_regular_text_is_refused(kind: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "a"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "folder":
        file.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(file))
    elif kind == "large":
        file.write_bytes(b"a" * 11)
    elif kind == "huge":
        with file.open("wb") as stream:
            stream.truncate(1 << 40)
    elif kind == "latin":
        file.write_bytes(b"a\xff")
    elif kind == "loop":
        file.symlink_to(file)
    elif kind == "null":
        file = Path("a\0b")
    else:
        file = Path("/proc/self/status")
    with pytest.raises(FileRefusedError) as raised:
        read_text(file, most_bytes=10)
    assert str(raised.value) == reason


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 9000 + "]" * 9000])
def test_json_without_end_is_refused(text: str) -> None:
    with pytest.raises(FileRefusedError, match="its JSON is nested too deeply"):
        parse_json(text)
    assert parse_json("[" * 200 + "]" * 200)


@pytest.mark.parametrize("text", ["", "{", "nul", "9" * 5000, b"\xff\xfe\x00"])
def test_what_is_no_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(FileRefusedError, match="it is no JSON"):
        parse_json(text)
