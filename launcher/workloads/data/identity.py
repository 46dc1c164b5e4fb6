"""Which data a training has seen: a few facts that go into checkpoints, compared on resume.

A position in a text means nothing in another text. Hashes are of samples where a file is large, so
that naming it costs milliseconds: what is replaced, cut, extended or shuffled shows; a few bytes
that somebody has edited in the middle of gigabytes may not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.workloads.data.source import TextSource, check_file, source_files
from strategies.errors import DataError
from strategies.small_file import FileRefusedError, opened

_WHOLE_BYTES = 1 << 24
_SAMPLE_BYTES = 1 << 16
_SAMPLES = 64
_MOST_HASHED = 256
ACCEPT = "trainer.accept_other_data=true"


def data_identity(source: TextSource) -> dict[str, Any]:
    """Kind, size and hash of what is used of a source; where it lies does not matter.

    Raises:
        DataError: It cannot be read.
    """
    files = [check_file("data.path", source.path or "")] if source.kind == "tokens" else None
    digest, size, number = hashlib.sha256(), 0, 0
    limit = source.max_bytes
    for number, file in enumerate(source_files(source) if files is None else files, start=1):
        left = None if limit is None else limit - size
        if left is not None and left <= 0:
            break
        try:
            held = file.stat().st_size
            used = held if left is None else min(held, left)
            digest.update(f"{file.name} {used}\n".encode() if files is None else b"")
            if number <= _MOST_HASHED:
                _add_content(digest, file, used)
        except (OSError, FileRefusedError) as error:
            raise DataError(f"{source.label}: {file} cannot be read: {error}.") from None
        size += used
    found: dict[str, Any] = {"kind": source.kind, "bytes": size, "hash": digest.hexdigest()[:32]}
    if source.kind == "tokens":
        found["dtype"] = source.dtype
    if source.tokenizer is not None:
        tokenizer = hashlib.sha256()
        path = check_file("data.tokenizer", source.tokenizer)
        _add_content(tokenizer, path, path.stat().st_size)
        found["tokenizer"] = tokenizer.hexdigest()[:32]
    return found


def tell_other_data(path: Path, written: object, source: TextSource) -> str | None:
    """Why a checkpoint is of a training on other data, in words; None if it is not, or not known.

    ``written``: what the checkpoint's manifest says of its data.
    """
    what = other_data(written, source)
    if what is None:
        return None
    return (
        f"{path} was written in a training on other data than {source.label} is now ({what}): its "
        "position in them means nothing here. Put back what it was trained on, train anew, or go "
        f"on in spite of it with {ACCEPT}."
    )


def other_data(written: object, source: TextSource) -> str | None:
    """In what data differ from those of a manifest; None if in nothing, or if that is not known."""
    if not isinstance(written, Mapping):
        return None
    now = data_identity(source)
    names = [name for name in now.keys() | written.keys() if now.get(name) != written.get(name)]
    if not names:
        return None
    return "; ".join(
        f"{name} was {str(written.get(name))[:40]} and is {now.get(name)}"
        for name in sorted(names)
        if name != "hash" or names == ["hash"]
    )


def _add_content(digest: Any, file: Path, used: int) -> None:
    """Of a large file head, tail and samples in between."""
    places: Sequence[int] = range(0, used, _SAMPLE_BYTES)
    if used > _WHOLE_BYTES:
        last = used - _SAMPLE_BYTES
        places = [*range(0, last, last // _SAMPLES), last]
    with opened(file) as stream:
        for place in places:
            data = os.pread(stream.fileno(), min(_SAMPLE_BYTES, used - place), place)
            digest.update(data)
