"""Checkpoints as Lightning wants them: one nested dict per rank, under names of the uncut module.

Names are those of the uncut module and optimizer state is keyed by them, so a checkpoint of one
layout can be read by another. How the tensors come to be on disk, hashed and committed together, is
``strategies.runtime.storage``'s concern.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.errors import CheckpointError
from strategies.manifest import FORMAT, MANIFEST, committed, find_damage, read_manifest
from strategies.runtime.main_optimizer import MAIN_WEIGHT
from strategies.runtime.mesh import Coordinates
from strategies.runtime.storage.commit import remove
from strategies.runtime.storage.exchange import Exchange
from strategies.runtime.storage.opened import Opened
from strategies.runtime.storage.part import Part, split
from strategies.runtime.storage.piece import Piece
from strategies.runtime.storage.saver import Saver
from strategies.runtime.tree_io import flatten

__all__ = [
    "FORMAT",
    "MANIFEST",
    "layout_of",
    "load",
    "load_optimizer_state",
    "load_state_dict",
    "name_optimizer_state",
    "owned_state",
    "remove",
    "restore_random_state",
    "save",
]

_HYPER_PARAMETERS = "hyper_parameters"
_RANDOM = "foldpipe_random_state"


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

    Args:
        saver: This rank's.
        checkpoint: This rank's part, as Lightning collects it. Tensors of model and optimizer may
            be plain and whole, DTensors, or pieces (``storage.piece.Piece``) of a sharded tensor.
        path: The folder to be.
        coordinates: Where this process stands.
        holders: Per parameter, the global ranks that hold the same of it.
        optimizer_holders: The same for its optimizer state; {} where the first replica has it all.
        metadata: Goes into the manifest.
        in_thread: Return as soon as the state is copied.

    Raises:
        CheckpointError: Some rank cannot write; nothing is committed then.
    """

    def collect() -> Part:
        part = dict(checkpoint)
        if _HYPER_PARAMETERS in part:
            part[_HYPER_PARAMETERS] = _plain_values(part[_HYPER_PARAMETERS])
        part[_RANDOM] = _random_state()
        return split(
            part,
            rank=coordinates.global_rank(coordinates.pp_rank, coordinates.dp_rank),
            holders=holders,
            optimizer_holders=optimizer_holders,
            first_replica=coordinates.dp_rank == coordinates.tp_rank == 0,
        )

    saver.save(path, collect, layout=layout_of(coordinates), metadata=metadata, in_thread=in_thread)


def layout_of(coordinates: Coordinates) -> dict[str, int]:
    """Degrees of parallelism as the manifest has them."""
    return {"pp": coordinates.pp, "dp": coordinates.dp, "tp": coordinates.tp}


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


def load(
    path: Path,
    *,
    exchange: Exchange,
    coordinates: Coordinates,
    state: Mapping[str, Any],
    parameters: set[str],
    optimized: Mapping[str, Tensor | Piece],
    strict: bool,
) -> dict[str, Any]:
    """What one rank needs of a checkpoint, read when all of it is verified; collective.

    Args:
        path: A committed folder.
        exchange: All ranks; each verifies a share of the files.
        coordinates: Where this process stands, now.
        state: This rank's module state: names, and the boxes that it wants.
        parameters: Names of the whole model's parameters.
        optimized: This rank's parameters whose optimizer state it wants.
        strict: Whether the checkpoint may have neither more nor fewer parameters.

    Raises:
        CheckpointError: It is damaged, or of another model. All ranks raise.
    """
    path = committed(path)
    manifest = _verified(path, exchange)
    opened: Opened | None = None
    try:
        opened = Opened.of(path, manifest)
        problem = opened.misfit(state, parameters=parameters, strict=strict)
    except CheckpointError as error:
        problem = str(error)
    problems = [said for said in exchange.everyone(problem) if said is not None]
    if problems or opened is None:
        raise CheckpointError(problems[0])
    now = layout_of(coordinates)
    same = all(manifest[degree] == size for degree, size in now.items())
    # In another layout: the replica's own, if there was one. What is drawn from its generators
    # (its data) continues; what is drawn inside the model does not depend on them.
    source = exchange.rank if same else coordinates.dp_rank % manifest["dp"] * manifest["tp"]
    return opened.read(rank=source, state=state, optimized=optimized)


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
    problems = [said for said in exchange.everyone(problem) if said is not None]
    if problems or manifest is None:
        raise CheckpointError(problems[0])
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
    return Opened.of(path, _verified(path, Exchange(None))).whole_model()


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
    """Continues the global generators where they stood."""
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
