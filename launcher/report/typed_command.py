"""The command line that does again what a run has done, as it can be pasted.

Hydra keeps a run's overrides in its folder, but not the flags: a folder of option files
(``--config-dir``) is found again in the search path that was made of it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

import yaml  # type: ignore[import-untyped]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def typed_words(run_dir: Path) -> tuple[str, ...]:
    """The overrides of a run as Hydra has kept them; none where it has not."""
    found = _kept(run_dir, "overrides.yaml")
    return tuple(map(str, found)) if isinstance(found, list) else ()


def typed_flags(run_dir: Path) -> list[str]:
    """``--config-dir`` and its folder, relative where that lies below the current folder."""
    found = _kept(run_dir, "hydra.yaml")
    hydra = found.get("hydra") if isinstance(found, dict) else None
    places = hydra.get("searchpath") if isinstance(hydra, dict) else None
    words: list[str] = []
    for place in places if isinstance(places, list) else ():
        scheme, _, path = str(place).partition("://")
        if scheme == "file":
            folder = Path(unquote(path))
            here = Path.cwd()
            shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
            words += ["--config-dir", str(shown)]
    return words


def paste(run_dir: Path, words: Sequence[str]) -> str:
    """``python -m launcher`` with these overrides and the flags of the run in ``run_dir``."""
    return shlex.join(["python", "-m", "launcher", *typed_flags(run_dir), *words])


def _kept(run_dir: Path, name: str) -> object:
    file = run_dir / ".hydra" / name
    if not os.path.isfile(file):
        return None
    return yaml.load(file.read_text(encoding="utf-8"), Loader=_LOADER)
