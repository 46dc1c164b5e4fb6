"""Text files below a folder, in an order that depends on their names only."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from strategies.errors import DataError

# Not the library itself: what was installed into it, and its tests with their odd encodings.
_SKIPPED = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)
_SNIFFED_BYTES = 4096


def stdlib_files() -> Iterator[Path]:
    """The Python sources of the standard library of the running interpreter.

    Raises:
        DataError: This Python has no library folder with sources (a frozen or zipped one).
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    if not (folder / "os.py").is_file():
        raise DataError(
            f"data=stdlib: this Python has no sources in {folder}. "
            "Try data=text data.path=/path/to/a/text/file."
        )
    return (file for file in _walk(folder, skipped=_SKIPPED) if file.suffix == ".py")


def text_files(folder: Path) -> Iterator[Path]:
    """All files below ``folder`` that are neither hidden nor binary.

    A file counts as binary if its beginning holds a NUL byte. Links to folders are not followed.

    Raises:
        DataError: A folder or file that may not be read.
    """
    return (file for file in _walk(folder, skipped=frozenset()) if not _is_binary(file))


def _walk(folder: Path, *, skipped: frozenset[str]) -> Iterator[Path]:
    try:
        with os.scandir(folder) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(_unreadable(folder, error)) from None
    for entry in entries:
        if entry.name.startswith(".") or entry.name in skipped:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), skipped=skipped)
        elif entry.is_file():
            yield Path(entry.path)


def _is_binary(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return b"\0" in stream.read(_SNIFFED_BYTES)
    except OSError as error:
        raise DataError(_unreadable(file, error)) from None


def _unreadable(path: Path, error: OSError) -> str:
    return (
        f"data.path: {path} cannot be read: {error.strerror}. "
        f"Try `chmod -R u+rX {path}`, or another data.path."
    )
