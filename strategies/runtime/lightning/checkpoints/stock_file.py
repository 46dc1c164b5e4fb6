"""One file, as stock Lightning writes and reads it: out of a pipeline, and into one.

In such a file optimizer state goes by the position of a parameter in ``configure_optimizers()`` of
the whole module; in a pipeline it goes by names. What a pipeline needs besides (who drew which
random numbers) stands under a key of its own, which stock Lightning leaves alone. Files are read
with ``weights_only=True``: nothing in them is ever executed.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import importlib.util
import os
import pathlib
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from strategies.errors import CheckpointError, RunError
from strategies.manifest import MANIFEST, UNFINISHED, committed, find_damage, read_manifest
from strategies.models.state import kept_generators
from strategies.runtime.lightning.checkpoints.whole_state import bring_together
from strategies.runtime.lightning.data_order import is_order
from strategies.runtime.messages.exchange import everybody
from strategies.runtime.storage.opened import Opened, strange_key
from strategies.runtime.storage.part import Piece
from strategies.runtime.storage.replacement import (
    free_bytes,
    put_in_place,
    remove,
    require_replaceable,
    tell_unwritten,
    write_torch,
)

OWN = "foldpipe"  # the key of what is ours
RANDOM = "foldpipe_random_state"
TEXTS = "foldpipe_texts"  # names of hyper-parameters of which a folder has the text alone
CONFIGS = "foldpipe_configs"  # places of hyper-parameters that were containers of omegaconf
HYPER_PARAMETERS = "hyper_parameters"
_SEPARATOR = "\1"

Order = Sequence[Sequence[Sequence[str]]]
"""Per group of an optimizer the parameters of the whole module, each with all its names."""


def write(
    checkpoint: Mapping[str, Any],
    path: Path,
    *,
    orders: Sequence[Order],
    names: Sequence[str],
    first_replica: bool,
    own: Mapping[str, Any],
) -> None:
    """Brings all ranks' parts to rank 0, which writes them; collective.

    Args:
        checkpoint: What Lightning has collected on this rank, parameters by names.
        path: The file to be; one that is there is replaced when the new one is complete.
        orders: Of each optimizer.
        names: Of the whole module's state, in order.
        first_replica: Whether this rank has something to add.
        own: This rank's random state, and what else it alone knows; plain data and tensors.

    Raises:
        CheckpointError: It cannot be written. All ranks raise.
    """
    exchange = everybody()
    parts = {f"state{_SEPARATOR}{k}": v for k, v in checkpoint["state_dict"].items()}
    optimizers = checkpoint.get("optimizer_states", ())
    for index, optimizer in enumerate(optimizers):
        for name, entry in optimizer["state"].items():
            parts |= {_SEPARATOR.join((str(index), key, name)): v for key, v in entry.items()}
    mine = {f"own{_SEPARATOR}{exchange.rank}": dict(own)}
    found = bring_together((parts if first_replica else {}) | mine, everywhere=False)
    problem: str | None = None
    if exchange.rank == 0:
        try:
            if path.is_dir():
                require_replaceable(path)
            _write_durably(_joined(checkpoint, found, orders, names), path)
        except CheckpointError as error:
            problem = str(error)
        except OSError as error:
            problem = tell_unwritten(error, path)
        except Exception as error:  # Objects in it may raise anything, and other ranks wait.
            problem = f"something in it cannot be pickled: {error}"
    problem = exchange.first_says(problem)
    if problem is not None:
        raise CheckpointError(
            f"checkpoint {path} was not written: {problem.rstrip('.')}. Earlier checkpoints are "
            "whole."
        )


def _joined(
    checkpoint: Mapping[str, Any],
    found: Mapping[str, Any],
    orders: Sequence[Order],
    names: Sequence[str],
) -> dict[str, Any]:
    state: dict[str, Any] = {}
    entries: list[dict[str, dict[str, Any]]] = [{} for _ in checkpoint.get("optimizer_states", ())]
    random: dict[int, Any] = {}
    for key, value in found.items():
        kind, _, rest = key.partition(_SEPARATOR)
        if kind == "state":
            state[rest] = value
        elif kind == "own":
            random[int(rest)] = value
        else:
            name, _, owner = rest.partition(_SEPARATOR)
            entries[int(kind)].setdefault(owner, {})[name] = value
    ordered = {name: state[name] for name in names if name in state}
    whole = dict(checkpoint) | {"state_dict": collections.OrderedDict(ordered | state)}
    if "optimizer_states" in checkpoint:
        whole["optimizer_states"] = [
            _positions(named, optimizer["param_groups"], order)
            for named, optimizer, order in zip(
                entries, checkpoint["optimizer_states"], orders, strict=True
            )
        ]
    whole, loaders = _without_loaders(whole)
    return whole | {OWN: {"ranks": random, "loaders": loaders}}


def _without_loaders(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Without the states of our loaders, and these: those of stock Lightning have none at all."""
    loops = checkpoint.get("loops", {})
    fit = loops.get("fit_loop", {})
    state = dict(fit.get("state_dict", {}))
    loaders = state.pop("combined_loader", [])
    if any(kept and not is_order(kept) for kept in loaders):
        return checkpoint, []
    return checkpoint | {"loops": {**loops, "fit_loop": {**fit, "state_dict": state}}}, loaders


def with_loaders(checkpoint: dict[str, Any], loaders: list[Any]) -> dict[str, Any]:
    """With the states of our loaders where Lightning keeps those of others."""
    loops = checkpoint.get("loops", {})
    fit = loops.get("fit_loop", {})
    if not loaders or "state_dict" not in fit:
        return checkpoint
    state = {**fit["state_dict"], "combined_loader": loaders}
    return checkpoint | {"loops": {**loops, "fit_loop": {**fit, "state_dict": state}}}


def _positions(
    named: dict[str, dict[str, Any]], groups: Sequence[Mapping[str, Any]], order: Order
) -> dict[str, Any]:
    """State by names as stock Lightning has it, by positions."""
    state: dict[int, Any] = {}
    counted: list[dict[str, Any]] = []
    rest = dict(named)
    position = 0
    for members, group in zip(order, groups, strict=True):
        counted.append({**group, "params": list(range(position, position + len(members)))})
        for aliases in members:
            for name in aliases:
                if name in rest:
                    state[position] = rest.pop(name)
            position += 1
    if rest:
        raise CheckpointError(tell_unordered(next(iter(rest))))
    return {"state": state, "param_groups": counted}


def tell_unordered(name: str) -> str:
    """Why a file cannot hold the state of a parameter."""
    return (
        f"configure_optimizers() of the whole module does not name {name}, which an optimizer "
        "updates: it must give the same groups whenever it is called. Use "
        "PipelineStrategy(checkpoints='folder'), which needs no such order."
    )


def by_names(saved: Mapping[str, Any], order: Order, own: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state by positions as this rank reads it, by names of its ``own`` parameters.

    Raises:
        CheckpointError: It is that of another optimizer.
    """
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    wanted = [len(members) for members in order]
    if sizes != wanted:
        raise CheckpointError(
            f"the checkpoint's optimizer updates groups of {sizes} parameters, this one groups of "
            f"{wanted}. Use the optimizer it was written with."
        )
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for group, members in zip(saved["param_groups"], order, strict=True):
        kept = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({**kept, "params": []})
        for position, aliases in zip(group["params"], members, strict=True):
            for name in aliases:
                if name in own and position in saved["state"]:
                    entry = saved["state"][position]
                    state[name] = {key: boxed(value, own[name]) for key, value in entry.items()}
    return {"state": state, "param_groups": groups}


def boxed(value: Any, wanted: Any) -> Any:
    """Of a whole tensor the box that is wanted."""
    if not isinstance(wanted, Piece) or not isinstance(value, Tensor):
        return value
    if tuple(value.shape) != wanted.global_shape:
        return value
    boxes = []
    for box in wanted.boxes():
        zipped = zip(box.offsets, box.sizes, strict=True)
        boxes.append(value[tuple(slice(start, start + size) for start, size in zipped)])
    return boxes[0] if wanted.strips is None else torch.cat(boxes, wanted.strips[0])


def stock_orders(module: pl.LightningModule) -> list[Order]:
    """The parameters of each optimizer as stock Lightning would have them; the module is whole.

    Asks ``configure_optimizers()`` and leaves everything as it was.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    before = dict(module.__dict__)
    try:
        with kept_generators(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizers, _ = _init_optimizers_and_lr_schedulers(module)
    finally:
        module.__dict__.clear()
        module.__dict__.update(before)
    orders: list[Order] = []
    for optimizer in optimizers:
        plain = getattr(optimizer, "optimizer", optimizer)
        groups: Any = plain.param_groups
        orders.append([[names.get(id(p), []) for p in group["params"]] for group in groups])
    return orders


# ------------------------------------------------------------------------------------------ a file


def _write_durably(checkpoint: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(path.name + UNFINISHED)
    try:
        write_torch(checkpoint, staging)
        put_in_place(staging, path)
    except BaseException:
        with suppress(OSError):
            remove(staging)
        raise


def read(path: Path) -> dict[str, Any]:
    """A file of Lightning's, its tensors mapped and not yet read.

    Raises:
        CheckpointError: It is damaged, holds objects, or is something else.
    """
    try:
        with torch.serialization.safe_globals(_safe()):
            found = _load(path)
    except pickle.UnpicklingError as error:
        raise CheckpointError(_unsafe(path, str(error))) from None
    except Exception as error:  # torch's unpickler trusts the order of what it reads
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint of Lightning: {reason}. Use an earlier one."
        ) from None
    if not isinstance(found, dict) or not isinstance(found.get("state_dict"), Mapping):
        raise CheckpointError(
            f"{path} is no checkpoint of Lightning: it has no state_dict. Weights alone are loaded "
            "by model.load_state_dict(torch.load(path)) before fit()."
        )
    strange = strange_key(found)
    if strange is not None:
        raise CheckpointError(
            f"{path} is not as Lightning writes it: {strange} is a {type(found[strange]).__name__}."
            " Use an earlier one."
        )
    return found


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)


def _safe() -> list[Any]:
    """Types in checkpoints of Lightning that do nothing when they are made."""
    return [
        AttributeDict, argparse.Namespace, collections.defaultdict, dict, list, set, int, float,
        pathlib.Path, pathlib.PosixPath, pathlib.PurePosixPath,
    ]  # fmt: skip


def _unsafe(path: Path, said: str) -> str:
    match = re.search(r"GLOBAL ([\w.]+)", said)
    if match is None:
        return f"{path} cannot be read as a checkpoint of Lightning: {said.splitlines()[0]}"
    name = match.group(1)
    return (
        f"{path} holds an object of {name}, and nothing but tensors and plain data is loaded: a "
        "pickled object can run any code. If you trust the file, call torch.serialization."
        f"add_safe_globals([{name.rpartition('.')[2]}]) before, or write it without such "
        "hyper-parameters or state (save_hyperparameters(ignore=[...]))."
    )


# ------------------------------------------------------------------------------------------ folders


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint as a dict, as ``torch.load`` gives it of stock Lightning's, for one process.

    Of a folder: weights and all that is no optimizer's. Hyper-parameters that were objects are left
    out, with a warning that names them.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    folder = committed(Path(path))
    if folder.is_file():
        return read(folder)
    manifest = read_manifest(folder)
    damage = find_damage(folder, manifest)
    if damage is not None:
        raise CheckpointError(damage)
    opened = Opened.of(folder, manifest)
    found = opened.read(rank=0, state=dict.fromkeys(opened.whole_names()), optimized={})
    found.pop("optimizer_states", None)
    shown = ", ".join(
        f"{name}={found[key].pop(name)}"
        for key in (HYPER_PARAMETERS, f"datamodule_{HYPER_PARAMETERS}")
        for name in found.pop(f"{TEXTS}_{key}", ())
    )
    if shown:
        warnings.warn(
            f"{folder} has these hyper-parameters as text alone: {shown}. Give them to "
            "load_from_checkpoint() as keywords.",
            stacklevel=2,
        )
    return found


def export_file(
    path: Path,
    target: Path,
    kind: Literal["safetensors", "ckpt"],
    *,
    records: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes the weights of any checkpoint as one file, new; for one process.

    ``ckpt`` is what stock Lightning writes with ``save_weights_only=True``: hyper-parameters and
    loops are in it.

    ``records``: further files in the archive of a ``ckpt``, by name.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
        RunError: The file cannot be written; nothing is left behind.
    """
    found = load_checkpoint(path)
    weights = {name: v for name, v in found["state_dict"].items() if isinstance(v, Tensor)}
    if not weights:
        raise CheckpointError(f"{path} has no weights to export. Use another checkpoint.")
    staging = target.with_name(f".{target.name}{UNFINISHED}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if kind == "safetensors":
            # Two names must not share memory there.
            plain = {name: value.contiguous().clone() for name, value in weights.items()}
            save_file(plain, staging, metadata={"format": "pt"})
        else:
            rest = ("callbacks", "lr_schedulers", "optimizer_states", OWN, RANDOM)
            kept = {name: value for name, value in found.items() if name not in rest}
            write_torch(_without_loaders(kept)[0], staging)
            with zipfile.ZipFile(staging, "a") as archive:
                root = archive.namelist()[0].split("/")[0]  # torch looks nowhere else
                for name, text in records.items():
                    archive.writestr(f"{root}/{name}", text)
        os.link(staging, target)  # unlike a rename, this replaces nothing
    except (OSError, SafetensorError) as error:
        raise unwritten_export(error, target) from None
    finally:
        with suppress(OSError):
            staging.unlink(missing_ok=True)


def unwritten_export(error: OSError | SafetensorError, target: Path) -> RunError:
    """What ``mode=export`` says of a target that cannot be written."""
    said = error.strerror if isinstance(error, OSError) else None
    return RunError(
        f"export.path={target} cannot be written: {said or error} ({free_bytes(target):,} bytes "
        "are free there). Try another export.path."
    )


def with_configs(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Makes the containers of omegaconf again that hyper-parameters were, from plain data."""
    places = checkpoint.pop(CONFIGS, None)
    if places and importlib.util.find_spec("omegaconf") is not None:
        create = importlib.import_module("omegaconf").OmegaConf.create
        for key, configs in places.items():
            for place, written in configs:
                owner: Any = checkpoint
                inside = [key, *place]
                for name in inside[:-1]:
                    owner = owner[name]
                owner[inside[-1]] = create(written)
    return checkpoint


def serve_folders() -> None:
    """Lets ``load_from_checkpoint`` of Lightning's modules read folders, too.

    And gives hyper-parameters back as the containers that they were.

    The function that it opens a path with is the only way in that Lightning has. Nothing happens
    where a version has no such function.
    """
    from lightning.pytorch.core import saving

    opens: Callable[..., Any] | None = getattr(saving, "pl_load", None)
    if opens is None or getattr(opens, "serves_folders", False):
        return

    def open_any(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path_or_url, str | Path) and not str(path_or_url).startswith("http"):
            folder = committed(Path(path_or_url))
            if (folder / MANIFEST).is_file():
                return with_configs(load_checkpoint(folder))
        found = opens(path_or_url, *args, **kwargs)
        return with_configs(found) if isinstance(found, dict) else found

    open_any.serves_folders = True  # type: ignore[attr-defined]
    vars(saving)["pl_load"] = open_any
