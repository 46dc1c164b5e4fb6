"""Files that are on disk, and hashed, when they are closed; all writing of checkpoints is here."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 1 << 22


def write_durably(path: Path, blocks: Iterable[Any]) -> dict[str, Any]:
    """Writes a new file and syncs it.

    The hash is of what was to be written, taken on the way: the file is not read again, and what a
    faulty disk makes of it is found out.

    Args:
        path: Must not exist.
        blocks: Buffers, which are asked for one at a time.

    Returns:
        ``{"sha256": hex, "bytes": size}``, as the manifest has it.
    """
    digest = hashlib.sha256()
    size = 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for block in blocks:
            view = memoryview(block)
            for start in range(0, len(view), _BLOCK_BYTES):
                part = view[start : start + _BLOCK_BYTES]
                digest.update(part)
                _write(handle, part)
                size += len(part)
        os.fsync(handle)
    finally:
        os.close(handle)
    return {"sha256": digest.hexdigest(), "bytes": size}


def _write(handle: int, part: memoryview) -> None:
    while len(part):
        part = part[os.write(handle, part) :]


def sync_folder(path: Path) -> None:
    """Makes names in a folder last: what was created or renamed there."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
