"""Checkpoints as the parent sees them: found by name, compared with the model, never opened."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.workloads.transformer_shape import TransformerShape
from strategies.errors import CheckpointError

MANIFEST = "manifest.json"
_ROOTS = ("outputs", "multirun")
_UNFINISHED = ".tmp"  # a run that was killed while it saved may leave one, with its manifest


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


def check_model(path: Path, shape: TransformerShape) -> None:
    """Refuses a checkpoint of another model.

    Raises:
        CheckpointError: The first sizes that differ, and how to ask for the checkpoint's model.
    """
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
    """Refuses to train into a folder whose checkpoints this run would take for its own.

    Args:
        run_dir: The run's folder, new unless the user has named one.
        resumed: What the run continues; the last checkpoint of the folder itself is fine.

    Raises:
        CheckpointError: There are others.
    """
    folder = run_dir / "checkpoints"
    there = sorted(path for path in folder.glob("*.ckpt")) if folder.is_dir() else []
    if there and (resumed is None or there[-1] != resumed):
        raise CheckpointError(
            f"{folder} has checkpoints of an earlier run up to {there[-1].name}, which are never "
            f"overwritten. Try trainer.resume={there[-1]}, or another hydra.run.dir."
        )


def newest_checkpoint(experiment_name: str, run_dir: Path, *, optional: bool) -> Path | None:
    """The newest committed checkpoint of an experiment.

    Looked for below outputs/ and multirun/ of the working directory, and in the run folders beside
    ``run_dir`` (of a user's own ``hydra.run.dir``).

    Raises:
        CheckpointError: There is none, and it is not optional.
    """
    found: list[tuple[float, Path]] = []
    files = [file for root in _ROOTS for file in Path(root).glob(f"**/checkpoints/*/{MANIFEST}")]
    files += run_dir.parent.glob(f"*/checkpoints/*/{MANIFEST}")
    for file in files:
        if file.parent.suffix == _UNFINISHED:
            continue
        try:
            metadata = manifest_of(file.parent)["metadata"]
        except CheckpointError:
            continue  # Damaged: an older one serves.
        if metadata.get("experiment_name") == experiment_name:
            found.append((file.stat().st_mtime, file.parent.absolute()))
    if found:
        return max(found)[1]
    if optional:
        return None
    raise CheckpointError(
        f"no checkpoint of experiment_name={experiment_name} lies below outputs/, multirun/ "
        f"or {run_dir.parent}. "
        "Train first, or name one: checkpoint=PATH."
    )
