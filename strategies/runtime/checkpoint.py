"""Checkpoints: a folder with a file per rank, a manifest with hashes, and a rename at the end.

``<name>.tmp`` is written and synced beside everything that exists; the rename commits it. A
committed folder is never written into: where Lightning saves under the same name again, the old
folder steps aside only when the new one is complete. Names are those of the uncut module and
optimizer state is keyed by them, so a checkpoint of one layout can be read by another.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.errors import CheckpointError
from strategies.runtime.main_optimizer import MAIN_WEIGHT
from strategies.runtime.mesh import Coordinates
from strategies.runtime.tree_io import flatten, unflatten

MANIFEST = "manifest.json"
OLD = ".old"
_HYPER_PARAMETERS = "hyper_parameters"
FORMAT = 1
_RANDOM = "foldpipe_random_state"
_SHARED_BY_REPLICAS = ("state_dict", "optimizer_states")


def save(
    checkpoint: dict[str, Any],
    path: Path,
    *,
    coordinates: Coordinates,
    barrier: Callable[[], None],
    agree: Callable[[bool], bool],
    metadata: Mapping[str, Any],
) -> None:
    """Writes all ranks' parts and commits them together; collective.

    Args:
        checkpoint: This rank's part, as Lightning collects it.
        path: The folder to be.
        coordinates: Where this process stands; the first sharer in
            replica 0 writes weights and optimizer state, whole.
        barrier: Waits for all processes.
        agree: True if all processes say True.
        metadata: Goes into the manifest.

    Raises:
        CheckpointError: Some rank cannot write; nothing is committed then.
    """
    staging = path.with_name(path.name + ".tmp")
    rank = coordinates.global_rank(coordinates.pp_rank, coordinates.dp_rank)
    problem: Exception | None = None
    if rank == 0:
        try:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        except Exception as error:
            problem = error
    _all_or_nobody(problem, path, agree)
    try:
        part = dict(checkpoint)
        if _HYPER_PARAMETERS in part:
            part[_HYPER_PARAMETERS] = _plain_values(part[_HYPER_PARAMETERS])
        if coordinates.dp_rank > 0 or coordinates.tp_rank > 0:
            for key in _SHARED_BY_REPLICAS:
                part.pop(key, None)
        part[_RANDOM] = _random_state()
        _write_part(part, staging / _stem(rank))
    except Exception as error:
        problem = error
    _all_or_nobody(problem, path, agree)
    barrier()
    if rank == 0:
        try:
            _commit(staging, path, coordinates, metadata)
        except Exception as error:
            problem = error
    _all_or_nobody(problem, path, agree)


def _all_or_nobody(problem: Exception | None, path: Path, agree: Callable[[bool], bool]) -> None:
    if agree(problem is None):
        return
    # A full disk must not stay full of what nobody can read.
    shutil.rmtree(path.with_name(path.name + ".tmp"), ignore_errors=True)
    if isinstance(problem, CheckpointError):
        raise problem
    if isinstance(problem, OSError):
        free = shutil.disk_usage(_existing(path)).free
        raise CheckpointError(
            f"checkpoint {path} was not written: {problem.strerror or problem}; {free:,} bytes are "
            "free there. Earlier checkpoints are whole."
        ) from problem
    if problem is not None:
        raise problem
    raise CheckpointError(f"checkpoint {path} was not written: another rank failed; see its log.")


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def _stem(rank: int) -> str:
    return f"rank_{rank:05d}"


def _write_part(part: dict[str, Any], stem: Path) -> None:
    tree, tensors = flatten(part)
    # Views and shared storage (tied weights) are written as what they show.
    plain = {key: tensor.cpu().contiguous().clone() for key, tensor in tensors.items()}
    save_file(plain, stem.with_suffix(".safetensors"))
    stem.with_suffix(".json").write_text(json.dumps(tree))
    for suffix in (".safetensors", ".json"):
        _sync(stem.with_suffix(suffix))


def _commit(
    staging: Path, path: Path, coordinates: Coordinates, metadata: Mapping[str, Any]
) -> None:
    files = {
        file.name: {"sha256": file_hash(file), "bytes": file.stat().st_size}
        for file in sorted(staging.iterdir())
    }
    manifest = {
        "format": FORMAT,
        "pp": coordinates.pp,
        "dp": coordinates.dp,
        "tp": coordinates.tp,
        "metadata": dict(metadata),
        "files": files,
    }
    target = staging / MANIFEST
    target.write_text(json.dumps(manifest, indent=1))
    _sync(target)
    _sync(staging)
    aside = path.with_name(path.name + OLD)
    if path.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)
    os.rename(staging, path)
    _sync(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _committed(path: Path) -> Path:
    """The folder itself, or the one that stepped aside if its successor never came."""
    aside = path.with_name(path.name + OLD)
    return aside if not path.exists() and aside.exists() else path


def _plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters as they can be written: an object goes in as its text, for people."""
    plain = {}
    for key, value in values.items():
        try:
            flatten(value)
            plain[key] = value
        except CheckpointError:
            plain[key] = repr(value)
    return plain


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a committed checkpoint, its files checked.

    Raises:
        CheckpointError: It is missing, unfinished or damaged; the message names the file.
    """
    target = path / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(target.read_text())
        files = manifest["files"]
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is no checkpoint: it has no {MANIFEST}. Name a folder below checkpoints/."
        ) from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"{target} is damaged: {error}.") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')}, this version reads {FORMAT}."
        )
    for name, entry in files.items():
        file = path / name
        found = file_hash(file) if file.is_file() else "no file"
        if found != entry["sha256"]:
            raise CheckpointError(
                f"{file} is damaged: expected SHA-256 {entry['sha256']}, found {found}. Resume "
                "from an earlier checkpoint."
            )
    return manifest


def load(
    path: Path,
    *,
    coordinates: Coordinates,
    wanted: set[str],
    parameters: set[str],
    strict: bool,
) -> dict[str, Any]:
    """What one rank needs of a checkpoint.

    Args:
        path: A committed folder.
        coordinates: Where this process stands, now.
        wanted: Names in this rank's module state.
        parameters: Names of the whole model's parameters.
        strict: Whether the checkpoint may have neither more nor fewer of them.

    Raises:
        CheckpointError: It is damaged, or of another model.
    """
    path = _committed(path)
    manifest = read_manifest(path)
    written = manifest["metadata"].get("parameters")
    if strict and written is not None and not set(written) <= parameters:
        more = sorted(set(written) - parameters)
        raise CheckpointError(
            f"{path} is a checkpoint of another model: it has {len(more)} parameters that this one "
            f"lacks, {more[0]} first. Use the model it was written with."
        )
    then = (manifest["pp"], manifest["dp"], manifest.get("tp", 1))
    same = then == (coordinates.pp, coordinates.dp, coordinates.tp)
    rank = coordinates.global_rank(coordinates.pp_rank, coordinates.dp_rank)
    part = _read_part(path / _stem(rank if same else 0))
    state: dict[str, Tensor] = {}
    optimizers: list[dict[str, Any]] = []
    for pp_rank in range(manifest["pp"]):
        writer = _read_part(path / _stem(pp_rank * manifest["dp"] * manifest.get("tp", 1)))
        for name, value in writer.get("state_dict", {}).items():
            if name in wanted:
                state.setdefault(name, value)  # What several ranks hold is the first one's.
        optimizers = _merge(optimizers, writer.get("optimizer_states", []))
    missing = sorted(wanted - set(state))
    if missing and strict:
        raise CheckpointError(
            f"{path} is a checkpoint of another model: it lacks {len(missing)} of "
            f"{len(wanted)} names, {missing[0]} first. Use the model it was written with."
        )
    part["state_dict"] = state
    part["optimizer_states"] = optimizers
    if not same:
        part.pop(_RANDOM, None)  # Drawn by another grid of processes.
    return part


def load_state_dict(path: Path) -> dict[str, Tensor]:
    """The weights of the whole model, from all ranks' files.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
    """
    path = _committed(path)
    manifest = read_manifest(path)
    state: dict[str, Tensor] = {}
    for pp_rank in range(manifest["pp"]):
        part = _read_part(path / _stem(pp_rank * manifest["dp"] * manifest.get("tp", 1)))
        state = part["state_dict"] | state
    return state


def _read_part(stem: Path) -> dict[str, Any]:
    try:
        tree = json.loads(stem.with_suffix(".json").read_text())
        with safe_open(stem.with_suffix(".safetensors"), framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in list(file.keys())}
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{stem}: cannot be read: {error}.") from None
    part: dict[str, Any] = unflatten(tree, tensors)
    return part


def _merge(into: list[dict[str, Any]], more: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not into:
        return more
    for have, new in zip(into, more, strict=True):
        have["state"].update(new["state"])
    return into


def owned_state(
    state: Mapping[str, Tensor], *, every_parameter: Sequence[str], owned_parameters: set[str]
) -> dict[str, Tensor]:
    """A rank's state without buffers that follow another rank's parameters.

    Such a buffer (a foreign BatchNorm's statistics, say) stays on this rank but goes stale. A
    buffer belongs to the parameters of its module, or of the nearest module around it that has any.

    >>> from torch import zeros
    >>> full = {"a.weight": zeros(1), "a.mean": zeros(1), "b.mean": zeros(1), "scale": zeros(1)}
    >>> list(owned_state(full, every_parameter=["a.weight", "b.weight"],
    ...                  owned_parameters={"a.weight"}))
    ['a.weight', 'a.mean', 'scale']
    """
    parameters = set(every_parameter)

    def stays(name: str) -> bool:
        prefix = name.rpartition(".")[0]
        while prefix:
            around = [known for known in parameters if known.startswith(prefix + ".")]
            if around:
                return any(known in owned_parameters for known in around)
            prefix = prefix.rpartition(".")[0]
        return True

    return {key: value for key, value in state.items() if key in parameters or stays(key)}


def name_optimizer_state(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """An optimizer's state keyed by parameter names.

    Raises:
        CheckpointError: It updates a parameter that is not the module's.
    """
    names = {id(parameter): name for name, parameter in named.items()}
    plain = getattr(optimizer, "optimizer", optimizer)
    groups = []
    for group in plain.param_groups:
        unknown = [p for p in group["params"] if id(p) not in names]
        if unknown:
            raise CheckpointError(
                "the optimizer updates a parameter that is no part of the module, so it has no "
                "name in a checkpoint. Build optimizers from self.parameters()."
            )
        rest = {key: value for key, value in group.items() if key != "params"}
        groups.append({**rest, "params": [names[id(p)] for p in group["params"]]})
    state = {names[id(parameter)]: dict(entry) for parameter, entry in plain.state.items()}
    return {"state": state, "param_groups": groups}


def load_optimizer_state(
    optimizer: Optimizer, saved: Mapping[str, Any], named: Mapping[str, nn.Parameter]
) -> None:
    """Puts saved state where this rank's parameters are.

    Raises:
        CheckpointError: The optimizer has another number of parameter groups.
    """
    names = {id(parameter): name for name, parameter in named.items()}
    plain = getattr(optimizer, "optimizer", optimizer)
    if len(plain.param_groups) != len(saved["param_groups"]):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(saved['param_groups'])} parameter groups, this "
            f"one has {len(plain.param_groups)}. Use the optimizer it was written with."
        )
    positions: dict[int, dict[str, Any]] = {}
    groups = []
    index = 0
    for group, old in zip(plain.param_groups, saved["param_groups"], strict=True):
        members = []
        for parameter in group["params"]:
            entry = dict(saved["state"].get(names[id(parameter)], {}))
            weight = entry.pop(MAIN_WEIGHT, None)
            if weight is not None:
                # Written with 16-bit weights: what they were rounded from.
                parameter.detach().copy_(weight)
            if entry:
                positions[index] = entry
            members.append(index)
            index += 1
        groups.append({**{k: v for k, v in old.items() if k != "params"}, "params": members})
    plain.load_state_dict({"state": positions, "param_groups": groups})


def _random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(checkpoint: Mapping[str, Any]) -> None:
    """Continues the global generators where this rank's stood; nothing after another layout."""
    state = checkpoint.get(_RANDOM)
    if state is None:
        return
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def remove(path: Path) -> None:
    """Deletes a checkpoint so that a crash in between leaves no half of it under its name."""
    if path.is_dir():
        dying = path.with_name(path.name + ".tmp")
        shutil.rmtree(dying, ignore_errors=True)
        os.rename(path, dying)
        shutil.rmtree(dying)
    elif path.exists():
        path.unlink()
