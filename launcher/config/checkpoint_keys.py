"""``model.*`` and ``data.*`` of a training, as its checkpoints have them.

A folder has them in its manifest. A file of ``mode=export`` has them beside torch's records in the
archive, where this process can read them without torch; files of other programs have none.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.config.decode import CLASS, decode, dump
from launcher.config.key import shorten, typed
from launcher.config.launch import LaunchConfig
from strategies.errors import CheckpointError, PlanError
from strategies.manifest import committed, read_manifest

USED_BY = ("eval", "predict", "generate", "export")
GROUPS = ("model", "data")
RECORD = "foldpipe.json"  # in a file
_FILES = ("path", "tokenizer")
# How a batch is put together: of each run its own.
_BATCHES = ("global_batch_size", "microbatch_size", "num_workers")
_MOST_BYTES = 1 << 22


def kept_keys(config: LaunchConfig) -> dict[str, dict[str, Any]]:
    """Group -> key -> value, JSON-ready; files by their whole paths."""
    whole = dump(config)
    found = {group: {**whole[group]} for group in GROUPS}
    for values in found.values():
        for name in _BATCHES:
            values.pop(name, None)
        for name in _FILES:
            if values.get(name) is not None and values["name"] != CLASS:
                values[name] = str(Path(values[name]).expanduser().absolute())
    return found


def saved_keys(path: Path) -> dict[str, dict[str, Any]] | None:
    """What a checkpoint says; None where it does not.

    Raises:
        CheckpointError: There is no checkpoint, or it says what no key can be.
    """
    if path.is_file():
        found = _in_file(path)
    else:
        found = read_manifest(committed(path))["metadata"].get("config")
    if found is None:
        return None
    try:
        whole = decode(found, LaunchConfig)
    except PlanError as error:
        raise CheckpointError(
            f"{path}: what it says of its model and data is not for this version: {error}"
        ) from None
    return kept_keys(whole)


def _in_file(path: Path) -> dict[str, Any] | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(f"/{RECORD}")]
            if len(names) != 1 or archive.getinfo(names[0]).file_size > _MOST_BYTES:
                return None
            found = json.loads(archive.read(names[0]))
    except (OSError, ValueError, zipfile.BadZipFile, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def compared(config: LaunchConfig, path: Path) -> Iterator[str]:
    """What a run has from a checkpoint, in one line, and a line for each key that differs."""
    saved = saved_keys(path)
    if saved is None:
        if config.mode in USED_BY:
            yield (
                f"note: {path.name} does not say its model and data. Used are "
                f"model={shorten(config.model.name)} data={shorten(config.data.name)} with the "
                "keys of this command"
            )
        return
    now, then = _flat(kept_keys(config)), _flat(saved)
    defaults = _flat(kept_keys(LaunchConfig()))
    same = [typed(key, then[key]) for key in then
            if then[key] == now.get(key) and then[key] != defaults.get(key)]  # fmt: skip
    if same and config.mode in ("eval", "predict"):
        yield f"as in the checkpoint: {' '.join(same)}"
    for key in {**then, **now}:
        here, there = (shorten(each.get(key, "the default")) for each in (now, then))
        if here != there:
            yield f"note: {key}={here} here, {there} in the checkpoint"


def _flat(kept: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Dotted key -> value, each argument of a class by itself."""
    found: dict[str, Any] = {}
    for group, values in kept.items():
        for name, value in values.items():
            key = f"{group}.{name}"
            found |= {f"{key}.{n}": v for n, v in value.items()} if name == "args" else {key: value}
    return found
