"""A checkpoint folder as anybody may look at it: its manifest, its hashes, whether it is committed.

Free of torch, so that the process that starts the ranks can choose a checkpoint. The manifest names
every other file with its SHA-256 and carries one of itself, so no byte of a checkpoint can change
unseen. A hash is no signature, so what a manifest says is held against its types, too, and here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from strategies.errors import CheckpointError
from strategies.keyword_types import MISMATCH, convert, describe
from strategies.small_file import FileRefusedError, opened, parse_json, read_json, read_text

MANIFEST = "manifest.json"
FORMAT = 2
UNFINISHED = ".tmp"  # being written, or being removed
OLD = ".old"  # stepped aside for a new one of its name
_CHECKSUM = "checksum"
NOT_FINITE = "not_finite"  # among the metadata: what is not finite in it, in words
TENSORS = "tensors.json"
VALUES = "values.json"
_BLOCK_BYTES = 1 << 22
_MOST_BYTES = 1 << 26
_MOST_PART_BYTES = 1 << 28
_SIZES = range(1 << 50)
_MOST_RANKS = 1 << 20
_MOST_NAME = 200
_SHOWN = 60
_DIGEST = re.compile(r"[0-9a-f]{64}")


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

    What it returns has the keys, types and file names that this program writes: its hash only says
    that nobody has changed it by accident.

    Raises:
        CheckpointError: It is missing, damaged, of another format, or was made by something else.
    """
    file = path / MANIFEST
    try:
        text = read_text(file, most_bytes=_MOST_BYTES)
        found = parse_json(text)
    except FileNotFoundError:
        lack = f"it has no {MANIFEST}" if path.exists() else "nothing is there"
        raise CheckpointError(
            f"{path} is no checkpoint: {lack}. Try a folder such as "
            "outputs/.../checkpoints/step-00000060.ckpt, or auto."
        ) from None
    except FileRefusedError as error:
        raise CheckpointError(f"{file} is damaged: {error}. Use an earlier checkpoint.") from None
    if not isinstance(found, dict) or "format" not in found:
        raise CheckpointError(f"{file} is damaged: it names no format. Use an earlier checkpoint.")
    version, expected = found["format"], found.get(_CHECKSUM)
    content = {key: value for key, value in found.items() if key != _CHECKSUM}
    if (version == FORMAT or expected is not None) and seal(content) != text:
        digest = hashlib.sha256(_canonical(content).encode()).hexdigest()
        raise CheckpointError(
            f"{file} is damaged: expected SHA-256 {_short(expected)}, found {digest} of its "
            "content. Use an earlier checkpoint."
        )
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has format {_short(version)}, and this version reads {FORMAT}. "
            "Train again, or resume it with the version that wrote it."
        )
    problem = _flaw(content)
    if problem is not None:
        raise CheckpointError(
            f"{file} is whole, but not as this program writes it: {problem}. "
            "Use an earlier checkpoint."
        )
    return content


def file_hash(path: Path) -> str:
    """SHA-256 of a regular file.

    Raises:
        OSError: It cannot be read.
        FileRefusedError: It is a pipe, a device or the like.
    """
    digest = hashlib.sha256()
    with opened(path) as stream:
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
        size = "?"
        try:
            _require_inside(path, file)
            found_bytes = file.stat().st_size
            size = f"{found_bytes:,}"
            # A larger one is another one, and may be without end.
            found = file_hash(file) if found_bytes <= entry["bytes"] else "another file"
        except FileNotFoundError:
            found, size = "no file", "0"
        except (OSError, ValueError) as error:
            found = str(getattr(error, "strerror", None) or error)
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
        try:
            _require_inside(path, file)
        except FileRefusedError as error:
            return f"{file} cannot be read: {error}"
        size = file.stat().st_size if file.is_file() else None
        if size != entry["bytes"]:
            found = "is missing" if size is None else f"has {size:,} bytes"
            return f"{file} {found}, and {entry['bytes']:,} bytes were written"
    return None


def read_part(path: Path, manifest: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401
    """What a JSON file of a checkpoint says; only one that the manifest names is opened.

    Raises:
        CheckpointError: The manifest does not name it, or it is no JSON of the size it has there.
    """
    entry = manifest["files"].get(name)
    if entry is None:
        raise CheckpointError(f"{path / MANIFEST} does not name {name}, so it is not opened.")
    try:
        _require_inside(path, path / name)
        return read_json(path / name, most_bytes=min(entry["bytes"], _MOST_PART_BYTES))
    except (OSError, FileRefusedError) as error:
        raise CheckpointError(f"{path / name} cannot be read: {error}.") from None


def tree_file(rank: int) -> str:
    """Where a rank keeps what is its own."""
    return f"rank_{rank:05d}.json"


def total_bytes(manifest: Mapping[str, Any]) -> int:
    return sum(int(entry["bytes"]) for entry in manifest["files"].values())


def committed(path: Path) -> Path:
    """The folder itself, or the one that stepped aside if its successor never came."""
    aside = path.parent / (path.name + OLD)
    return aside if not path.exists() and aside.exists() else path


def _flaw(content: Mapping[str, Any]) -> str | None:
    """What is not as it is written, in words; None if all is."""
    for name in ("pp", "dp", "tp", "world_size"):
        if not _is_count(content.get(name), range(1, _MOST_RANKS + 1)):
            return f"{name}={_short(content.get(name))} must be a whole number from 1"
    metadata, files = content.get("metadata"), content.get("files")
    if not isinstance(metadata, dict) or not isinstance(files, dict):
        return "metadata and files must be objects"
    for name, hint in _METADATA.items():
        value = metadata.get(name)
        if value is not None and convert(value, hint, exact=True) is MISMATCH:
            return f"metadata.{name}={_short(value)} must be {describe(hint)}"
    if not _is_count(metadata.get("step") or 0, _SIZES):
        return f"metadata.step={_short(metadata['step'])} must be a whole number from 0"
    for name, entry in files.items():
        if not _is_file_name(name):
            return f"files names {_short(name)}, which is no name of a file in it"
        digest = entry.get("sha256") if isinstance(entry, dict) else None
        if not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
            return f"files.{_short(name)} has no SHA-256"
        if not _is_count(entry.get("bytes"), _SIZES):
            size = _short(entry.get("bytes"))
            return f"files.{_short(name)}: bytes={size} must be a whole number"
    needed = [TENSORS, VALUES, *map(tree_file, range(min(content["world_size"], len(files) + 1)))]
    missing = next((name for name in needed if name not in files), None)
    return None if missing is None else f"files does not name {missing}"


def _is_count(value: object, within: range) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value in within


def _is_file_name(name: str) -> bool:
    plain = name.isprintable() and not {"/", "\\", "\0"} & set(name) and name not in ("", ".", "..")
    return plain and len(name) <= _MOST_NAME and name != MANIFEST


_METADATA: dict[str, Any] = {
    "experiment_name": str, "schedule": str, NOT_FINITE: str, "parameters": tuple[str, ...],
    "optimizers": tuple[str, ...], "step": int, "begun": float, "model": str | dict, "data": dict,
    "config": dict,
}  # fmt: skip


def _require_inside(folder: Path, file: Path) -> None:
    """Refuses a link that leads out of the checkpoint: what is there, nobody has hashed."""
    # Unlike Path.resolve, it raises nothing where links go in a circle.
    if file.is_symlink() and os.path.dirname(os.path.realpath(file)) != os.path.realpath(folder):
        raise FileRefusedError("it is a link to a file outside of the checkpoint")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
