"""Checkpoints that are sealed as they should be, and yet are not what training has written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strategies.manifest import FORMAT, seal

_EMPTY = {"rank_00000.json": "{}", "tensors.json": "{}", "values.json": "{}"}


def write_bare(folder: Path, metadata: dict[str, Any]) -> Path:
    """The least that is a checkpoint: no tensor, one rank."""
    folder.mkdir(parents=True)
    for name, text in _EMPTY.items():
        (folder / name).write_text(text)
    content = {"format": FORMAT, "pp": 1, "dp": 1, "tp": 1, "world_size": 1, "metadata": metadata}
    (folder / "manifest.json").write_text(seal({**content, "files": _entries(folder, _EMPTY)}))
    return folder


def reseal(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda content: None) -> Path:
    """Changes the manifest and seals it again; the files that it names are hashed anew first."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["checksum"]
    content["files"] = _entries(folder, content["files"])
    change(content)
    (folder / "manifest.json").write_text(seal(content))
    return folder


def rewrite(folder: Path, name: str, change: Callable[[Any], Any]) -> Path:
    """Changes one of its JSON files, and seals all of it; the change may return another content."""
    content = json.loads((folder / name).read_text())
    found = change(content)
    (folder / name).write_text(json.dumps(content if found is None else found))
    return reseal(folder)


def _entries(folder: Path, names: Any) -> dict[str, Any]:
    found = {}
    for name in names:
        data = (folder / name).read_bytes()
        found[name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    return found
