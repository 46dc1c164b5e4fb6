"""Saving and loading without Lightning: a state whose every number is the step it was saved at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strategies.errors import CheckpointError
from strategies.runtime.lightning.checkpoints import rank_folder
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.messages.mesh import Coordinates
from strategies.runtime.storage.commit import Saver

ALONE = Coordinates(pp=1, dp=1, pp_rank=0, dp_rank=0)


def state_at(step: int, size: int) -> dict[str, Any]:
    """What Lightning would collect."""
    parameters: dict[str, Tensor] = {
        "a.weight": torch.full((size, 3), float(step)),
        "a.bias": torch.full((size,), float(step), dtype=torch.bfloat16),
        "b.weight": torch.full((), step, dtype=torch.int64),
    }
    optimizer = {
        "state": {name: {"exp_avg": value.clone()} for name, value in parameters.items()},
        "param_groups": [{"lr": 0.1, "params": list(parameters)}],
    }
    return {"state_dict": parameters, "optimizer_states": [optimizer], "global_step": step}


def save(
    saver: Saver,
    path: Path,
    step: int,
    *,
    size: int = 50,
    in_thread: bool = False,
    where: Coordinates = ALONE,
) -> None:
    state = state_at(step, size)
    everyone = tuple(range(where.world_size))
    rank_folder.save(
        saver,
        state,
        path,
        coordinates=where,
        holders=dict.fromkeys(state["state_dict"], everyone),
        optimizer_holders=dict.fromkeys(state["state_dict"], everyone),
        metadata={"parameters": sorted(state["state_dict"]), "experiment_name": "default"},
        in_thread=in_thread,
    )


def load(path: Path, *, size: int = 50, where: Coordinates = ALONE) -> dict[str, Any]:
    shapes = state_at(0, size)["state_dict"]
    return rank_folder.load(
        path,
        exchange=Exchange(None),
        coordinates=where,
        state=shapes,
        parameters=set(shapes),
        optimized=shapes,
        strict=True,
    )


def step_in(path: Path, *, size: int = 50) -> int:
    """The one step that everything in a checkpoint is of.

    Raises:
        CheckpointError: It cannot be loaded.
        AssertionError: It is a mixture.
    """
    found = load(path, size=size)
    step = int(found["global_step"])
    (optimizer,) = found["optimizer_states"]
    tensors = [*found["state_dict"].values()]
    tensors += [entry["exp_avg"] for entry in optimizer["state"].values()]
    assert len(tensors) == 6
    for tensor in tensors:
        assert bool((tensor == step).all()), (path, step)
    return step


def newest(folder: Path, *, size: int = 50) -> int:
    """The newest step that can be loaded from a folder, 0 if none; what is there must be whole."""
    steps = [0]
    for path in folder.iterdir():
        if path.suffix != ".tmp":
            steps.append(step_in(path, size=size))
    return max(steps)


__all__ = ["ALONE", "CheckpointError", "load", "newest", "save", "state_at", "step_in"]
