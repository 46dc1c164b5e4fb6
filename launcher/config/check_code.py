"""Rules of keys that name code of the user's own, and of keys that such code makes void.

Nothing is imported here: whether a path leads anywhere, and what a constructor takes, a process
with torch finds out (``launcher/rank/own_parts.py``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from launcher.config.checkpoint_keys import USED_BY
from launcher.config.decode import CLASS, brings_own, did_you_mean, nearest
from launcher.config.key import Args, keys_of, shorten, typed, value_at
from launcher.config.launch import LaunchConfig
from launcher.config.workload import DataConfig, ModelConfig, OptimizerConfig
from strategies.errors import PlanError

# ``my_pkg.nets:LitNet``, ``my_pkg.nets`` with one candidate, ``folder/nets.py:LitNet``.
_PATH = re.compile(r"[\w./~@+ -]+(:\w+(\.\w+)*)?")
_EXAMPLES = {
    "model": "my_pkg.nets:LitNet",
    "data": "my_pkg.data:Images",
    "optimizer": "torch.optim:RAdam",
    "schedule": "my_pkg.orders:mine",
}
_SCHEMAS = {"model": ModelConfig, "data": DataConfig, "optimizer": OptimizerConfig}
# Keys of the group that go on meaning something with code of one's own.
_KEPT = {
    "model": ("name", "path", "args"),
    "data": ("name", "path", "args", "global_batch_size", "microbatch_size", "num_workers"),
    "optimizer": ("name", "path", "args", "lr", "warmup_steps", "min_lr_ratio", "schedule"),
}
# Where names alone are looked for first.
_HOMES = {"callbacks": "lightning.pytorch.callbacks", "optimizer": "torch.optim"}
# Whose processes run it, or check that they could.
CODE_MODES = ("train", "validate", "eval", "predict")


@dataclass(frozen=True, slots=True)
class Code:
    """A class or function of the user's own.

    Attributes:
        key: What its keys begin with: ``model``, ``callbacks.stop``.
    """

    key: str
    path: str
    args: Args


def check_code(config: LaunchConfig) -> None:
    """Raises on the first rule that they break."""
    for group in _SCHEMAS:
        _check_group(config, group)
    if config.schedule.path is not None:
        _check_path("schedule", config.schedule.path, named=True)
    named_callbacks(config)
    open_paths = [g for g in ("model", "data") if value_at(config, g).name == CLASS
                  and value_at(config, g).path is None]  # fmt: skip
    if config.allow_code and (config.mode not in CODE_MODES or not open_paths):
        raise PlanError(
            "allow_code=true takes model.path and data.path from a checkpoint, where model=class "
            f"or data=class leaves them open, in mode={', '.join(CODE_MODES)}. "
            "Try without allow_code."
        )


def named_callbacks(config: LaunchConfig) -> tuple[Code, ...]:
    """``callbacks.*``, in the order in which they were named; those that are null are left out.

    Raises:
        PlanError: An entry without a path, or with other keys than ``path`` and ``args``.
    """
    found = []
    for name, entry in config.callbacks.items():
        key = f"callbacks.{name}"
        if entry is None:
            continue
        if name in ("path", "args"):
            raise PlanError(
                f"{key}={shorten(entry)}: a callback has a name of your choice, and under it "
                f"{name}. Try callbacks.stop.path=lightning.pytorch.callbacks:EarlyStopping."
            )
        if not isinstance(entry, Mapping):
            raise PlanError(
                f"{key}={shorten(entry)}: a callback has a path. Try {typed(f'{key}.path', entry)}."
            )
        for other in entry:
            if other not in ("path", "args"):
                close = did_you_mean(f"{key}.{near}" for near in nearest(other, ("path", "args")))
                raise PlanError(
                    f"{key}.{other} is not a key.{close} A callback has path and args. "
                    f"Try {typed(f'{key}.args.{other}', entry[other])}."
                )
        path, args = entry.get("path"), entry.get("args") or {}
        if not isinstance(path, str):
            raise PlanError(
                f"{key} needs a path. Try {key}.path=lightning.pytorch.callbacks:EarlyStopping."
            )
        if not isinstance(args, Mapping):
            raise PlanError(
                f"{key}.args={shorten(args)}: expected arguments by name. "
                f"Try {typed(f'{key}.args.NAME', args)}."
            )
        _check_path(key, path)
        found.append(Code(key, path, Args(args)))
    return tuple(found)


def own_code(config: LaunchConfig) -> tuple[Code, ...]:
    """All code that a configuration names by its path; of orders the launcher itself knows."""
    groups = [value_at(config, group) for group in _SCHEMAS]
    chosen = [
        Code(group, chosen.path, chosen.args)
        for group, chosen in zip(_SCHEMAS, groups, strict=True)
        if chosen.name == CLASS and chosen.path is not None
    ]
    return (*chosen, *named_callbacks(config))


def model_label(config: LaunchConfig) -> str:
    """The model in a few words: ``tiny``, ``nets:LitNet width=64``."""
    if config.model.name != CLASS or config.model.path is None:
        return config.model.name
    given = (f"{name}={shorten(value, 20)}" for name, value in config.model.args.items())
    return shorten(" ".join((config.model.path, *given)))


def void_keys(config: LaunchConfig, group: str) -> Iterable[str]:
    """Keys of a group that were set, and that a class of the user's own never hears of."""
    kept = _KEPT[group]
    if group == "model" and not brings_own("data", config.data.name):
        kept = (*kept, "sequence", "vocab")  # of the built-in texts
    for entry in keys_of(_SCHEMAS[group], f"{group}."):
        name = entry.path.partition(".")[2]
        if name not in kept and value_at(config, entry.path) != entry.default:
            yield entry.path


def _check_group(config: LaunchConfig, group: str) -> None:
    chosen, example = value_at(config, group), _EXAMPLES[group]
    if chosen.name != CLASS:
        if chosen.args and not (group != "optimizer" and brings_own(group, chosen.name)):
            raise PlanError(
                f"{group}.args={shorten(chosen.args)} is for a class of your own, but "
                f"{group}={shorten(chosen.name)}. Try {group}=class {group}.path={example}."
            )
        if group == "optimizer" and chosen.path is not None:
            raise PlanError(
                f"optimizer.path={shorten(chosen.path)} belongs to optimizer=class, but "
                f"optimizer={chosen.name}. Try optimizer=class "
                f"{typed('optimizer.path', chosen.path)}."
            )
        return
    if chosen.path is not None:
        _check_path(group, chosen.path)
    elif config.mode != "simulate" and not (
        group != "optimizer" and (config.allow_code or config.mode in USED_BY)
    ):
        raise PlanError(
            f"{group}=class needs the path of the class. Try {group}=class {group}.path={example}."
        )
    for path in void_keys(config, group):
        name, value = path.partition(".")[2], value_at(config, path)
        raise PlanError(
            f"{path}={shorten(value)} has no meaning with {group}=class: a class of your own gets "
            f"its arguments under {group}.args. Try {typed(f'{group}.args.{name}', value)}."
        )


def _check_path(key: str, path: str, *, named: bool = False) -> None:
    """``named``: whether a module alone is not enough."""
    home = _HOMES.get(key.partition(".")[0])
    bare = re.fullmatch(r"[A-Z]\w*", path) and not any(map(os.path.exists, (path, f"{path}.py")))
    if home is not None and bare:
        raise PlanError(
            f"{key}.path={shorten(path)}: expected module:Class. Try {key}.path={home}:{path}."
        )
    relative = path.startswith(".") and ".py" not in path  # a file may be ./nets.py
    if relative or not _PATH.fullmatch(path) or (named and ":" not in path):
        example = _EXAMPLES.get(key, "lightning.pytorch.callbacks:EarlyStopping")
        what = "function" if named else "Class"
        raise PlanError(
            f"{key}.path={shorten(path)}: expected module:{what}, or file.py:{what}. "
            f"Try {key}.path={example}."
        )
