"""What ``mode=eval`` and its like leave open of model and data, as their checkpoint has it.

It is set into the composed tree, beneath what the user has chosen, so that all checks and
interpolations see it. Code that a checkpoint names stays out, see ``launcher.commands.code_check``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from launcher.checkpoints import newest_checkpoint
from launcher.compose.option_groups import conf_dir
from launcher.config import LaunchConfig, dump
from launcher.config.checkpoint_keys import GROUPS, USED_BY, saved_keys
from launcher.config.decode import CLASS
from launcher.config.key import value_at


def use_checkpoint(composed: DictConfig, hydra: DictConfig | HydraConf) -> None:
    """Sets what the checkpoint says of keys that the user has left as they are.

    Raises:
        CheckpointError: The one that is named cannot be read.
    """
    path = _path(composed, hydra) if composed.get("mode") in USED_BY else None
    # A path that leads nowhere is refused where the checkpoint is opened.
    saved = None if path is None or not path.exists() else saved_keys(path)
    if saved is None:
        return
    for group in GROUPS:
        default = value_at(LaunchConfig(), group).name
        if hydra.runtime.choices.get(group) != default or _typed(group, hydra):
            continue  # a model or data of the user's choice, with all their keys
        with read_write(cast(DictConfig, hydra)), open_dict(composed):
            _set(composed, hydra, group, saved[group])
            hydra.runtime.choices[group] = saved[group]["name"]


def _set(
    composed: DictConfig, hydra: DictConfig | HydraConf, group: str, values: dict[str, Any]
) -> None:
    node, code = composed[group], values["name"] == CLASS
    as_ever = {**dump(LaunchConfig())[group], **_option(group)}
    names_it = code and node.get("path") == values["path"] is not None
    for name, value in values.items():
        key = f"{group}.{name}"
        if name == "args":
            own = OmegaConf.to_container(node.args, resolve=False)
            if not code or names_it:  # arguments of code that the user has named
                node.args = {**value, **(own if isinstance(own, dict) else {})}
        # A file that the user has chosen may have given it another value.
        elif not (code and name == "path") and node[name] == as_ever[name]:
            node[name] = node[name] if _typed(key, hydra) else value


def _option(group: str) -> dict[str, Any]:
    """What the file that is chosen by itself says."""
    name = value_at(LaunchConfig(), group).name
    found = OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{name}.yaml"))
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def _typed(key: str, hydra: DictConfig | HydraConf) -> bool:
    return any(str(word).lstrip("+~").split("=")[0] == key for word in hydra.overrides.task)


def _path(composed: DictConfig, hydra: DictConfig | HydraConf) -> Path | None:
    """The checkpoint; None for ``auto`` where there is none, which the command says."""
    asked = composed.get("checkpoint")
    if asked != "auto":
        return Path(asked).expanduser().absolute() if isinstance(asked, str) else None
    name = composed.get("experiment_name") or hydra.runtime.choices.get("experiment") or "default"
    folder = Path(str(hydra.run.dir)).absolute()
    return newest_checkpoint(str(name), folder, optional=True, skipped=lambda _: None)
