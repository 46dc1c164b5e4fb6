"""A checkpoint folder as anybody may look at it: its manifest, its hashes, whether it is committed.

Free of torch, so that the process that starts the ranks can choose a checkpoint. The manifest names
every other file with its SHA-256 and carries one of itself, so no byte of a checkpoint can change
unseen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from strategies.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 2
UNFINISHED = ".tmp"  # being written, or being removed
OLD = ".old"  # stepped aside for a new one of its name
_CHECKSUM = "checksum"
_BLOCK_BYTES = 1 << 22


def seal(content: Mapping[str, Any]) -> str:
    """The manifest's text, with a hash of itself.

    >>> print(seal({"format": 2})[:28])
    {
     "checksum": "923521140a28
    """
    digest = hashlib.sha256(_canonical(content).encode()).hexdigest()
    return _canonical({**content, _CHECKSUM: digest})


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a committed checkpoint, itself verified; the other files are not opened.

    Raises:
        CheckpointError: It is missing, damaged, or of another format.
    """
    file = path / MANIFEST
    try:
        text = file.read_text()
        found: dict[str, Any] = json.loads(text)
        version = found["format"]
        expected = found.get(_CHECKSUM)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is no checkpoint: it has no {MANIFEST}. Name a folder below checkpoints/."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r}. Use an earlier checkpoint.") from None
    if version != FORMAT and _CHECKSUM not in found:
        raise CheckpointError(
            f"{path} has format {version}, and this version reads {FORMAT}. "
            "Train anew, or resume it with the version that wrote it."
        )
    content = {key: value for key, value in found.items() if key != _CHECKSUM}
    if seal(content) != text:
        digest = hashlib.sha256(_canonical(content).encode()).hexdigest()
        raise CheckpointError(
            f"{file} is damaged: expected SHA-256 {expected}, found {digest} of its content. "
            "Use an earlier checkpoint."
        )
    if version != FORMAT:
        raise CheckpointError(f"{path} has format {version}, and this version reads {FORMAT}.")
    return content


def file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def find_damage(
    path: Path, manifest: Mapping[str, Any], names: Collection[str] | None = None
) -> str | None:
    """The first file (of ``names``) that is not what was written, as a message; None if all are."""
    files: dict[str, dict[str, Any]] = manifest["files"]
    for name, entry in files.items():
        if names is not None and name not in names:
            continue
        file = path / name
        try:
            found, size = file_hash(file), f"{file.stat().st_size:,}"
        except FileNotFoundError:
            found, size = "no file", "0"
        except OSError as error:
            found, size = str(error.strerror or error), "?"
        if found != entry["sha256"]:
            return (
                f"{file} is damaged: expected SHA-256 {entry['sha256']} of {entry['bytes']:,} "
                f"bytes, found {found} of {size} bytes. Resume from an earlier checkpoint."
            )
    return None


def find_misfit(path: Path, manifest: Mapping[str, Any]) -> str | None:
    """A file that is missing or has another size, as a message; nothing is read."""
    for name, entry in manifest["files"].items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != entry["bytes"]:
            found = "is missing" if size is None else f"has {size:,} bytes"
            return f"{file} {found}, and {entry['bytes']:,} bytes were written"
    return None


def total_bytes(manifest: Mapping[str, Any]) -> int:
    return sum(int(entry["bytes"]) for entry in manifest["files"].values())


def committed(path: Path) -> Path:
    """The folder itself, or the one that stepped aside if its successor never came."""
    aside = path.with_name(path.name + OLD)
    return aside if not path.exists() and aside.exists() else path
