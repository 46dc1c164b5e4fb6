"""Files that this process has not made itself: regular, small, and read at once.

A pipe would be waited for without end, a device read until memory ends. So a file is opened without
waiting, looked at before a byte of it is read, and never read beyond a limit. The error says why a
file is refused, in words that fit behind "cannot be read: ".
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


class FileRefusedError(ValueError):
    """A file that is not read, or not understood; the message is the reason alone."""


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file, open for reading.

    Raises:
        FileNotFoundError: There is none.
        FileRefusedError: It is something else, or must not be read.
    """
    try:
        _require_regular(path.stat().st_mode)  # Opening a device may already do something.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, FileRefusedError):
        raise
    except (OSError, ValueError) as error:  # A name with a null byte is a ValueError.
        raise FileRefusedError(str(getattr(error, "strerror", None) or error)) from None
    with os.fdopen(handle, "rb") as stream:
        _require_regular(os.fstat(handle).st_mode)  # It may have been another one.
        yield stream


def _require_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, a device or a socket"
        raise FileRefusedError(f"it is {kind} and no regular file")


def read_bytes(path: Path, *, most_bytes: int) -> bytes:
    """All of a regular file.

    Raises:
        FileNotFoundError: There is none.
        FileRefusedError: It is something else, larger than ``most_bytes``, or must not be read.
    """
    with opened(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        try:
            data = b"" if size > most_bytes else stream.read(most_bytes + 1)
        except OSError as error:
            raise FileRefusedError(str(error.strerror or error)) from None
    if max(size, len(data)) > most_bytes:
        raise FileRefusedError(f"it has more than {most_bytes:,} bytes, which is the most")
    return data


def read_text(path: Path, *, most_bytes: int) -> str:
    """The same as UTF-8."""
    try:
        return read_bytes(path, most_bytes=most_bytes).decode()
    except UnicodeDecodeError as error:
        raise FileRefusedError(f"it is not UTF-8 at byte {error.start}") from None


def read_json(path: Path, *, most_bytes: int) -> Any:  # noqa: ANN401
    """The same as JSON."""
    return parse_json(read_text(path, most_bytes=most_bytes))


def parse_json(text: str | bytes) -> Any:  # noqa: ANN401
    """What a text says.

    Raises:
        FileRefusedError: It is no JSON, or nested deeper than Python's parser goes.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise FileRefusedError("its JSON is nested too deeply") from None
    except ValueError as error:
        raise FileRefusedError(f"it is no JSON ({str(error)[:80]})") from None
