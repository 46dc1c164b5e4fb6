"""Where traces are kept between commands: one small JSON file per model, in the user's cache.

A trace is of one model as its package builds it, so its name comes from everything that may change
that: the keys that a builder reads, the versions of the libraries, and the package's own files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import EntryPoint, PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from launcher.config import LaunchConfig
from launcher.installed import installed_names
from launcher.report.atomic import write_atomically
from launcher.workloads.registry import DATA, MODELS, find
from launcher.workloads.specs import ModelShape, described
from strategies.costs.traced import VERSION, TracedModel, dump_trace, parse_trace
from strategies.errors import ModelError

_LIBRARIES = ("torch", "lightning", "transformers", "foldpipe")
_MOST_FILES = 5000
# Of data.*: what the batches' size is planned by, and does not change a row.
_FREE = ("global_batch_size", "microbatch_size", "num_workers")


def read_cached_trace(config: LaunchConfig, shape: ModelShape) -> TracedModel | None:
    """The trace of a model as it is now; None where there is none, or a damaged one."""
    try:
        return parse_trace(_file(config, shape).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ModelError):
        return None


def write_cached_trace(config: LaunchConfig, shape: ModelShape, trace: TracedModel) -> None:
    """Keeps a trace; a cache that cannot be written to is none."""
    with suppress(OSError):
        write_atomically(_file(config, shape), dump_trace(trace))


def fingerprint(config: LaunchConfig, shape: ModelShape) -> str:
    """A word that differs where anything does that the model may depend on."""
    data = {key: value for key, value in asdict(config.data).items() if key not in _FREE}
    facts = {
        "version": VERSION,
        "model": asdict(config.model),
        "shape": described(shape),
        "data": data,
        "seed": config.seed,
        "precision": config.trainer.precision,
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "files": [list(_files(point)) for point in _points(config)],
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _file(config: LaunchConfig, shape: ModelShape) -> Path:
    given = os.environ.get("XDG_CACHE_HOME")
    root = Path(given) if given and Path(given).is_absolute() else Path.home() / ".cache"
    return root / "foldpipe" / "traces" / f"{fingerprint(config, shape)}.json"


def _points(config: LaunchConfig) -> Iterator[EntryPoint]:
    """Entry points of other packages that a trace would run."""
    if config.model.name in installed_names("model"):
        yield find(MODELS, config.model.name)
    if config.data.name in installed_names("data"):
        yield find(DATA, config.data.name)


def _files(point: EntryPoint) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of every source file of an entry point's package."""
    yield point.value, 0, 0
    try:
        # The outermost package alone: looking for one inside of it would import it.
        spec = find_spec(point.module.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return
    folders = list(spec.submodule_search_locations or ())
    files = [Path(spec.origin)] if spec.origin and not folders else []
    for folder in folders:
        files += sorted(Path(folder).rglob("*.py"))
    for file in files[:_MOST_FILES]:
        with suppress(OSError):
            facts = file.stat()
            yield str(file), facts.st_size, facts.st_mtime_ns


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
