"""The one way in which files that somebody else may have made are read: regular, small, and soon.

A pipe would be waited for for ever, a device read until memory ends, and JSON of a hundred thousand
brackets ends the interpreter's patience instead of the parser's. So a file is opened without
waiting, looked at before a byte of it is read, and never read beyond a limit. Why it is refused is
in the error, in words that fit behind "cannot be read: ".
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

# Nested deeper than people nest, and far below what recursive functions stand.
MOST_DEPTH = 200
_BLOCK_BYTES = 1 << 20


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
    except OSError as error:
        raise FileRefusedError(str(error.strerror or error)) from None
    except ValueError:
        raise FileRefusedError("its name holds a null byte") from None
    with os.fdopen(handle, "rb", buffering=0) as stream:
        _require_regular(os.fstat(handle).st_mode)  # It may have been another one.
        yield stream


def read_bytes(path: Path, *, most_bytes: int) -> bytes:
    """All of a regular file.

    Raises:
        FileNotFoundError: There is none.
        FileRefusedError: It is something else, larger than ``most_bytes``, or must not be read.
    """
    with opened(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > most_bytes:
            raise FileRefusedError(f"it has {size:,} bytes, and at most {most_bytes:,} are read")
        blocks, left = [], most_bytes + 1
        try:
            while left and (block := stream.read(min(left, _BLOCK_BYTES))):
                blocks.append(block)
                left -= len(block)
        except OSError as error:
            raise FileRefusedError(str(error.strerror or error)) from None
    if not left:
        raise FileRefusedError(f"it has more than {most_bytes:,} bytes, which is the most")
    return b"".join(blocks)


def read_text(path: Path, *, most_bytes: int) -> str:
    """The same as UTF-8."""
    data = read_bytes(path, most_bytes=most_bytes)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FileRefusedError(f"it is not UTF-8 at byte {error.start}") from None


def read_json(path: Path, *, most_bytes: int, most_depth: int = MOST_DEPTH) -> Any:  # noqa: ANN401
    """The same as JSON."""
    return parse_json(read_text(path, most_bytes=most_bytes), most_depth=most_depth)


def parse_json(text: str | bytes, *, most_depth: int = MOST_DEPTH) -> Any:  # noqa: ANN401
    """What a text says.

    Raises:
        FileRefusedError: It is no JSON, or nested deeper than ``most_depth``.
    """
    try:
        found = json.loads(text)
    except RecursionError:
        raise FileRefusedError(f"its JSON is nested deeper than {most_depth} levels") from None
    except ValueError as error:
        raise FileRefusedError(f"it is no JSON ({str(error)[:80]})") from None
    level, depth = [found], 0
    while level := [item for held in level for item in _inside(held)]:
        depth += 1
        if depth > most_depth:
            raise FileRefusedError(f"its JSON is nested deeper than {most_depth} levels")
    return found


def _inside(value: object) -> list[Any]:
    if isinstance(value, dict):
        return [item for item in value.values() if isinstance(item, dict | list)]
    return (
        [item for item in value if isinstance(item, dict | list)] if isinstance(value, list) else []
    )


def _require_regular(mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kinds = (
        (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"), (stat.S_ISSOCK, "a socket"),
    )  # fmt: skip
    kind = next((name for holds, name in kinds if holds(mode)), "something else")
    raise FileRefusedError(f"it is {kind} and no regular file")
