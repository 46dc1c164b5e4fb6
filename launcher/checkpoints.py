"""Checkpoints as the parent sees them: found by name, verified, compared with the model."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.terminal import say
from launcher.workloads.transformer_shape import TransformerShape
from strategies.errors import CheckpointError
from strategies.manifest import (
    MANIFEST,
    OLD,
    UNFINISHED,
    committed,
    find_damage,
    find_misfit,
    read_manifest,
    total_bytes,
)

_ROOTS = ("outputs", "multirun")
_HASHED_BYTES = 4_000_000_000


def manifest_of(path: Path) -> dict[str, Any]:
    """The manifest of a committed checkpoint.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """
    file = path / MANIFEST
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        if not isinstance(found["metadata"], dict) or not isinstance(found["files"], dict):
            raise TypeError("metadata and files must be JSON objects")
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is no checkpoint: {file} does not exist. Name a folder such as "
            "outputs/.../checkpoints/step-00000060.ckpt, or auto."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Use another checkpoint.") from None
    return found


def check_whole(path: Path) -> None:
    """Refuses a checkpoint with a damaged, cut or missing file before anything is started.

    Sizes are always compared, hashes up to 4 GB; the ranks compare all of them.

    Raises:
        CheckpointError: Which file, the expected and the found hash.
    """
    if path.is_file():  # of stock Lightning, which has no hashes
        if not zipfile.is_zipfile(path):
            raise CheckpointError(
                f"{path} is no checkpoint: neither a folder with {MANIFEST} nor a whole file of "
                "Lightning. Use another checkpoint."
            )
        return
    manifest_of(path)
    problem = _damage(committed(path))
    if problem is not None:
        raise CheckpointError(problem)


def check_model(path: Path, shape: TransformerShape) -> None:
    """Refuses a checkpoint of another model."""
    written = manifest_of(path)["metadata"].get("model")
    if written is None:
        return
    if not isinstance(written, dict):
        raise CheckpointError(f"{path} is a checkpoint of model={written}. Try model={written}.")
    if "hf" in written:
        raise CheckpointError(
            f"{path} is a checkpoint of model=hf, not of the built-in transformer. "
            "Try model=hf model.path=FOLDER with the folder that it was trained from."
        )
    now = asdict(shape)
    # What may differ: it changes no weight.
    free = {"dropout"} | ({"sequence"} if shape.position == "rope" else set())
    wrong = [key for key in now if key not in free and written.get(key) != now[key]]
    if wrong:
        asked = ", ".join(f"model.{key}={now[key]}" for key in wrong)
        fix = " ".join(f"model.{key}={written.get(key)}" for key in wrong)
        raise CheckpointError(f"{path} is a checkpoint of another model than {asked}. Try {fix}.")


def check_run_folder(run_dir: Path, resumed: Path | None) -> None:
    """Refuses to train into a folder with checkpoints that the run would take for its own."""
    folder = run_dir / "checkpoints"
    there = sorted(path for path in folder.glob("*.ckpt")) if folder.is_dir() else []
    while resumed is not None and there and there[-1] != resumed and _damage(there[-1]):
        del there[-1]  # what cannot be read is replaced when the run gets there
    if there and (resumed is None or there[-1] != resumed):
        raise CheckpointError(
            f"{folder} has checkpoints of an earlier run up to {there[-1].name}, which are never "
            f"overwritten. Try trainer.resume={there[-1]}, or another hydra.run.dir."
        )


def newest_checkpoint(
    experiment_name: str, run_dir: Path, *, optional: bool, skipped: Callable[[str], None] = say
) -> Path | None:
    """The newest whole checkpoint of an experiment.

    Looked for below outputs/ and multirun/ of the working directory, and in the run folders beside
    ``run_dir`` (of a user's own ``hydra.run.dir``). One that is damaged is skipped: sizes are
    always compared, hashes up to 4 GB (the ranks compare all of them, each a share, before they
    load anything).

    ``experiment_name``: as the checkpoint's manifest has it.
    ``skipped``: told of each newer one that does not serve.

    Raises:
        CheckpointError: There is none, and it is not optional.
    """
    files = [file for root in _ROOTS for file in Path(root).glob(f"**/checkpoints/*/{MANIFEST}")]
    files += run_dir.parent.glob(f"*/checkpoints/*/{MANIFEST}")
    found = {
        file.parent.absolute(): file.stat().st_mtime
        for file in files
        # A run that was killed while it saved may leave one, with its manifest.
        if file.parent.suffix != UNFINISHED
    }
    newest_first = sorted(found, key=lambda path: (found[path], path), reverse=True)
    own = (path for path in newest_first if _name_in(path) in (None, experiment_name))
    whole = _first_whole(own, skipped)
    if whole is not None or optional:
        return whole
    raise CheckpointError(
        f"no checkpoint of experiment_name={experiment_name} lies below outputs/, multirun/ "
        f"or {run_dir.parent}. "
        "Train first, or name one: checkpoint=PATH."
    )


def newest_in(run_dir: Path, *, skipped: Callable[[str], None] = say) -> Path | None:
    """The newest whole checkpoint of one run, which a job goes on with when it is requeued."""
    found = sorted((run_dir / "checkpoints").glob("step-*"), reverse=True)
    whole = _first_whole((path for path in found if path.suffix != UNFINISHED), skipped)
    return None if whole is None else whole.absolute()


def _first_whole(paths: Iterable[Path], skipped: Callable[[str], None]) -> Path | None:
    for path in paths:
        if path.suffix == OLD and committed(path.with_suffix("")) != path:
            continue  # its successor is there
        problem = _damage(path)
        if problem is None:
            return path
        skipped(f"skips {path}: {problem}")
    return None


def _name_in(path: Path) -> str | None:
    """The experiment a checkpoint says to belong to; None where that cannot be read."""
    try:
        name = manifest_of(path)["metadata"].get("experiment_name")
    except CheckpointError:
        return None
    return str(name)


def _damage(path: Path) -> str | None:
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return str(error)
    if total_bytes(manifest) > _HASHED_BYTES:
        return find_misfit(path, manifest)
    return find_misfit(path, manifest) or find_damage(path, manifest)
