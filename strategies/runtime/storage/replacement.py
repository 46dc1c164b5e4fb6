"""Files and folders of checkpoints take a name, and give it up: what is there is never lost.

A new checkpoint is whole before it gets its name. Where another one has the name, that steps aside
and goes when the new one is in its place.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import torch

from strategies.errors import CheckpointError
from strategies.manifest import MANIFEST, OLD, UNFINISHED
from strategies.runtime.storage.tensor_files import sync_folder

_log = logging.getLogger(__name__)


def require_replaceable(path: Path) -> None:
    """Refuses to replace what is no checkpoint: neither a folder of ours nor a file of torch's.

    Raises:
        CheckpointError: It is something else.
    """
    there = path.exists() or path.is_symlink()
    known = _is_checkpoint(path) or _is_empty_folder(path)
    if there and not known:
        raise CheckpointError(f"{path} exists and is no checkpoint, so it is not replaced")


def _is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file() or (path.is_file() and zipfile.is_zipfile(path))


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def put_in_place(staging: Path, path: Path) -> None:
    """Gives a new checkpoint, a file or a folder, its name; the one that has it steps aside.

    At every moment a whole checkpoint has the name, or the one with ``OLD`` behind it. A file that
    replaces a file needs no step.
    """
    aside = path.with_name(path.name + OLD)
    if path.is_dir() and not path.is_symlink() and _is_empty_folder(path):
        path.rmdir()
    elif _is_checkpoint(path) and (path.is_dir() or staging.is_dir()):
        remove(aside)
        os.rename(path, aside)
    os.replace(staging, path)
    sync_folder(path.parent)
    with suppress(OSError):  # the new one is there, whatever becomes of the old one
        remove(aside)


def remove_old(path: Path) -> str | None:
    """Deletes a checkpoint that is no longer needed; the warning if it cannot be deleted."""
    try:
        remove(path)
    except OSError as error:
        stays = path if path.exists() else path.with_name(path.name + UNFINISHED)
        warning = (
            f"{stays} cannot be deleted: {error.strerror or error}. Training continues; delete it "
            "by hand."
        )
        _log.warning(warning)
        return warning
    return None


def remove(path: Path) -> None:
    """Deletes a checkpoint so that a crash in between leaves no half of it under its name."""
    if path.is_dir() and not path.is_symlink():
        dying = path.with_name(path.name + UNFINISHED)
        shutil.rmtree(dying, ignore_errors=True)
        os.rename(path, dying)
        shutil.rmtree(dying)
    elif path.exists() or path.is_symlink():
        path.unlink()


def tell_unwritten(problem: OSError, path: Path) -> str:
    """Why a file cannot be written, with the bytes that are free there."""
    return f"{said_of(problem, path)} ({free_bytes(path):,} bytes are free there)"


def said_of(problem: OSError, path: Path) -> str:
    """The system's words, with the file that they are about where it is not the checkpoint's."""
    said = problem.strerror or str(problem)
    file = problem.filename
    staging = path.with_name(path.name + UNFINISHED)
    known = not isinstance(file, str | Path) or Path(file).is_relative_to(staging)
    return said if known or Path(file) == path else f"{said}: {file}"


def free_bytes(path: Path) -> int:
    """On the file system where a file is to be."""
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def write_torch(checkpoint: Mapping[str, Any], path: Path) -> None:
    """``torch.save`` into a file, synced.

    Raises:
        OSError: It cannot be written. Torch itself raises a RuntimeError that names no cause.
    """
    with path.open("wb", buffering=0) as stream:
        lasting = _Watched(stream)
        try:
            torch.save(dict(checkpoint), cast(IO[bytes], lasting))
        except Exception as error:
            raise (lasting.problem or error) from None
        os.fsync(stream.fileno())


class _Watched:
    """A file that keeps the first error of a write."""

    def __init__(self, stream: io.FileIO) -> None:
        self._stream = stream
        self.problem: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        written = 0
        try:
            while written < len(view):
                written += self._stream.write(view[written:]) or 0
        except OSError as error:
            self.problem = self.problem or error
            raise
        return written

    def flush(self) -> None:
        """Nothing is kept back."""
