"""One rank's part of a checkpoint folder, written and read.

Names are those of the uncut module and optimizer state is keyed by them, so a checkpoint of one
layout can be read by another.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import AttributeDict
from torch import Tensor

from strategies.errors import CheckpointError, DamagedCheckpointError
from strategies.manifest import committed, find_damage, read_manifest
from strategies.models.state import cuda_is_used
from strategies.runtime.lightning.checkpoints.stock_file import (
    HYPER_PARAMETERS,
    RANDOM,
    TEXTS,
    read,
)
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.messages.mesh import Coordinates
from strategies.runtime.storage.commit import Saver
from strategies.runtime.storage.opened import Opened
from strategies.runtime.storage.part import Part, Piece, flatten, split

DATA_HYPER_PARAMETERS = "datamodule_hyper_parameters"


def save(
    saver: Saver,
    checkpoint: Mapping[str, Any],
    path: Path,
    *,
    coordinates: Coordinates,
    holders: Mapping[str, tuple[int, ...]],
    optimizer_holders: Mapping[str, tuple[int, ...]],
    metadata: Mapping[str, Any],
    in_thread: bool,
) -> None:
    """Writes all ranks' parts and commits them together; collective.

    Tensors in what Lightning has collected may be plain and whole, DTensors, or pieces of a sharded
    tensor. Per parameter ``holders`` are the global ranks that hold the same of it, and
    ``optimizer_holders`` of its optimizer state; {} where the first replica has it all.

    Raises:
        CheckpointError: Some rank cannot write; nothing is committed then.
    """

    def collect() -> Part:
        part = dict(checkpoint)
        for key in (HYPER_PARAMETERS, DATA_HYPER_PARAMETERS):
            if key in part:
                part[key], texts = _plain_values(part[key])
                part[f"{TEXTS}_{key}"] = texts
        part[RANDOM] = random_state()
        return split(
            part,
            rank=coordinates.global_rank(coordinates.pp_rank, coordinates.dp_rank),
            holders=holders,
            optimizer_holders=optimizer_holders,
            first_replica=coordinates.dp_rank == coordinates.tp_rank == 0,
        )

    saver.save(path, collect, layout=layout_of(coordinates), metadata=metadata, in_thread=in_thread)


def layout_of(coordinates: Coordinates) -> dict[str, int]:
    return {"pp": coordinates.pp, "dp": coordinates.dp, "tp": coordinates.tp}


def _plain_values(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Hyper-parameters as they can be written, and the names of those that were objects.

    An object goes in as its text, for people.
    """
    plain, texts = {}, []
    for key, value in values.items():
        try:
            flatten(value)
            plain[key] = value
        except CheckpointError:
            plain[key] = repr(value)
            texts.append(key)
    return plain, texts


def without_configs(value: Any) -> Any:
    """Containers of omegaconf, and Lightning's of hyper-parameters, as dicts and lists.

    Files with others are not loaded without running code. Interpolations are resolved, where they
    can be.
    """
    if type(value) in (dict, AttributeDict):
        return {key: without_configs(item) for key, item in value.items()}
    return _plain_config(value) if _is_config(value) else value


def configs_in(value: Any, place: tuple[Any, ...] = ()) -> list[list[Any]]:
    """Where containers of omegaconf are, and what is in each, interpolations as they are written.

    `stock_file.with_configs` makes them again.
    """
    if type(value) in (dict, AttributeDict):
        return [each for key, item in value.items() for each in configs_in(item, (*place, key))]
    if not _is_config(value):
        return []
    made = sys.modules["omegaconf"].OmegaConf
    written, plain = made.to_container(value, resolve=False), _plain_config(value)
    if _plain_config(made.create(written)) != plain:
        written = plain  # It refers to what is outside.
    return [[list(place), written]] if is_plain(written) else []


def _is_config(value: Any) -> bool:
    return type(value).__module__.startswith("omegaconf.")


def _plain_config(value: Any) -> Any:
    made = sys.modules["omegaconf"].OmegaConf
    for resolve in (True, False):  # What is missing, or refers to what is not there, is no value.
        with contextlib.suppress(Exception):
            return made.to_container(value, resolve=resolve)
    return value


def is_plain(value: Any) -> bool:
    """Whether a file that holds it is read without running anything."""
    if isinstance(value, torch.Size):
        return True
    if isinstance(value, list | tuple | set):
        return type(value) in (list, tuple, set) and all(is_plain(item) for item in value)
    if isinstance(value, dict):
        inside = (*value.keys(), *value.values())
        return type(value) is dict and all(is_plain(item) for item in inside)
    kinds = (bool, int, float, complex, str, bytes, Tensor, torch.dtype, torch.device, PurePath)
    return value is None or isinstance(value, kinds)


def load(
    path: Path,
    *,
    exchange: Exchange,
    coordinates: Coordinates,
    state: Mapping[str, Any],
    parameters: set[str],
    optimized: Mapping[str, Tensor | Piece],
    strict: bool,
    whole: bool = False,
) -> dict[str, Any]:
    """What one rank needs of a checkpoint, read when all of it is verified; collective.

    Of the module's ``state`` and the ``optimized`` parameters this rank wants the boxes given. With
    ``strict`` the checkpoint may have neither more nor fewer ``parameters`` than the whole model.
    With ``whole`` it wants all of the state there is, which nobody compares with the model's.

    Raises:
        CheckpointError: It is damaged, or of another model. All ranks raise.
    """
    path = committed(path)
    manifest = _verified(path, exchange)
    opened: Opened | None = None
    problem: str | None = None
    try:
        opened = Opened.of(path, manifest)
    except CheckpointError as error:
        problem = str(error)
    _agree(problem, exchange, DamagedCheckpointError)
    assert opened is not None
    if whole:
        state = dict.fromkeys(opened.whole_names())
    else:
        misfit = opened.misfit(state, parameters=parameters, strict=strict)
        _agree(misfit, exchange, CheckpointError)
    now = layout_of(coordinates)
    same = all(manifest[degree] == size for degree, size in now.items())
    # In another layout: the replica's own, if there was one. What is drawn from its generators
    # (its data) continues; what is drawn inside the model does not depend on them.
    source = exchange.rank if same else coordinates.dp_rank % manifest["dp"] * manifest["tp"]
    found: dict[str, Any] = {}
    try:
        found = opened.read(rank=source, state=state, optimized=optimized)
        found |= opened.of_first(found)
    except CheckpointError as error:
        problem = str(error)
    _agree(problem, exchange, DamagedCheckpointError)
    return found


def _agree(problem: str | None, exchange: Exchange, kind: type[CheckpointError]) -> None:
    """Raises on all ranks what one of them has found; collective."""
    problems = [said for said in exchange.everyone(problem) if said is not None]
    if problems:
        raise kind(problems[0])


def _verified(path: Path, exchange: Exchange) -> dict[str, Any]:
    """The manifest, when each file's hash has been compared by some rank."""
    manifest: dict[str, Any] | None = None
    problem: str | None
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        problem = str(error)
    else:
        problem = find_damage(path, manifest, _own_files(manifest, exchange))
    _agree(problem, exchange, DamagedCheckpointError)
    assert manifest is not None
    return manifest


def _own_files(manifest: Mapping[str, Any], exchange: Exchange) -> set[str]:
    """A rank's share of the files, about as many bytes as any other's."""
    loads = [0] * exchange.size
    own = set()
    files = manifest["files"]
    for name in sorted(files, key=lambda name: (-files[name]["bytes"], name)):
        rank = loads.index(min(loads))
        loads[rank] += files[name]["bytes"]
        if rank == exchange.rank:
            own.add(name)
    return own


def load_state_dict(path: Path) -> dict[str, Tensor]:
    """The weights of the whole model, for a single process.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
    """
    path = committed(path)
    if path.is_file():
        return dict(read(path)["state_dict"])
    return Opened.of(path, _verified(path, Exchange(None))).whole_model()


def random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }
    # A GPU that the training does not use must not be started, in every rank, by a checkpoint.
    if cuda_is_used():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(checkpoint: Mapping[str, Any]) -> None:
    state = checkpoint.get(RANDOM)
    if state is None:
        return
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "cuda" in state and cuda_is_used():
        torch.cuda.set_rng_state(state["cuda"])
