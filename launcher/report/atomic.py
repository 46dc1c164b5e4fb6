"""Files that are either the old or the new version, never half of one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes UTF-8 text to a temporary file beside ``path``, then renames it over ``path``.

    The folder is made if it is missing. A crash at any moment leaves what was there before, and at
    worst a hidden ``.<name>.<random>.tmp`` beside it.

    Raises:
        OSError: The folder cannot be written, or the disk is full; ``path`` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
