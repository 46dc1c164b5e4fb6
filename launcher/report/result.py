"""result.json: the figures of a run, for scripts and dashboards."""

from __future__ import annotations

import json
import math
import os
import platform
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from strategies.analysis.metrics import Metrics
from strategies.errors import readable

REPORT = "report.txt"  # of a training run: its figures, for people
_BESIDE = ("lb1", "lb1_rank", "lb2", "lb2_rank", "recomputed")
_STALE = ("weight_versions", "gradient_sums", "staleness")  # of schedules without a flush
_DISTRIBUTIONS = ("foldpipe-launcher", "torch", "lightning", "hydra-core")


def write_result(path: Path, mapping: Mapping[str, object]) -> None:
    """Writes the mapping as JSON, keys in the order given, all or nothing.

    NaN and infinities become null: JSON has no such numbers, and a run whose loss exploded must
    still leave a result that every parser reads.

    ``mapping``: strings, numbers, booleans, None, paths, and mappings and sequences of them.

    Raises:
        TypeError: A value is something else, a tensor say; the message names its key.
        OSError: The file cannot be written.
    """
    plain = _plain(mapping, where="")
    write_atomically(path, json.dumps(plain, indent=2, allow_nan=False) + "\n")


def metrics_mapping(metrics: Metrics) -> dict[str, object]:
    """The figures of a simulated or predicted step under their names in result.json.

    ``peak_memory_bytes`` is None as a whole where the costs know no bytes.
    """
    mapping: dict[str, object] = {}
    for item in fields(metrics):
        if item.name in _BESIDE or (metrics.synchronous and item.name in _STALE):
            continue
        value = getattr(metrics, item.name)
        mapping[item.name] = list(value) if isinstance(value, tuple) else value
    if all(value is None for value in metrics.peak_memory_bytes):
        mapping["peak_memory_bytes"] = None
    return mapping


def recompute_mapping(metrics: Metrics) -> dict[str, object]:
    """Both bounds with the ranks that they bind on, and how many forwards are run again."""
    return {name: getattr(metrics, name) for name in _BESIDE}


def versions() -> dict[str, str | None]:
    """Versions of Python and of what decides a run's numbers; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _plain(value: object, where: str) -> object:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"result.json: key {key!r} in {where or 'the root'} is no string.")
        return {
            key: _plain(item, f"{where}.{key}" if where else key) for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise TypeError(f"result.json: {where} is a {type(value).__name__}, which JSON cannot say.")


def inert(text: str) -> str:
    r"""A text as a cell of a CSV: a spreadsheet calculates nothing, a terminal obeys nothing.

    >>> inert("=1+1"), inert("-1.5"), inert("a\x1b[2J")
    ("'=1+1", '-1.5', 'a\\x1b[2J')
    """
    shown = readable(text)
    if shown[:1] not in tuple("=+-@\t"):
        return shown
    try:
        float(shown)
    except ValueError:
        return f"'{shown}"
    return shown


# Files that are either the old or the new version, never half of one.


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
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # a write to an open file names none
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
