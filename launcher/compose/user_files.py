"""Checks the option files of a user's ``--config-dir`` that a run would load.

Each file is read through ``yaml_guard`` and held against the schema of its group, so that a message
can name file and line: after composition nobody knows any more where a key came from.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launcher.compose.groups import Groups
from launcher.compose.overrides import HYDRA_KEYS
from launcher.compose.yaml_guard import line_of, read_yaml
from launcher.config.decode import KeyPlaceError, decode
from launcher.config.key import nodes_of, type_hints
from launcher.config.launch import LaunchConfig
from launcher.config.suggest import did_you_mean, nearest
from strategies.errors import PlanError


def check_user_files(chosen: Iterable[tuple[str, str]], groups: Groups) -> None:
    """Checks the user's files among the chosen options, and those their defaults lists name.

    Args:
        chosen: (group, option) pairs.
        groups: Groups with their options.

    Raises:
        PlanError: The first problem, with its file and line.
    """
    waiting = sorted(chosen)
    done: set[tuple[str, str]] = set()
    while waiting:
        group, option = waiting.pop()
        file = groups.added.get(group, {}).get(option)
        if file is None or (group, option) in done:
            continue
        done.add((group, option))
        waiting += _check_file(file, group, groups)


def _check_file(file: Path, group: str, groups: Groups) -> list[tuple[str, str]]:
    values = read_yaml(file)
    package = _package(file)
    if package not in (None, "_global_", group, "_group_"):
        raise PlanError(
            f"{file}: # @package {package} is not supported. Try # @package _global_, or none."
        )
    everywhere = package == "_global_"
    if group == "experiment" and not everywhere:
        raise PlanError(
            f"{file}: an experiment sets keys of all groups. Write `# @package _global_` in its "
            "first line."
        )
    named = _defaults(values.pop("defaults", []), file, group, groups)
    if everywhere and "hydra" in values:
        for path in _paths(values.pop("hydra"), "hydra"):
            if path not in HYDRA_KEYS:
                raise PlanError(
                    f"{file}: {path}: of Hydra's own keys only {', '.join(HYDRA_KEYS)} can be set."
                )
    schema = LaunchConfig if everywhere else nodes_of(LaunchConfig)[group]
    prefix = "" if everywhere else f"{group}."
    if everywhere and values.get("experiment_name", "") is None:
        values.pop("experiment_name")  # null means the experiment's own name
    try:
        decode(_without_interpolations(values, schema), schema, prefix)
    except KeyPlaceError as error:
        line = line_of(file, error.path if everywhere else error.path[1:])
        raise PlanError(f"{file}{f':{line}' if line else ''}: {error}") from error
    return named


def _defaults(entries: object, file: Path, group: str, groups: Groups) -> list[tuple[str, str]]:
    """The (group, option) pairs of a defaults list."""
    if not isinstance(entries, list):
        raise PlanError(f"{file}: defaults must be a list, e.g. `- override /schedule: gpipe`.")
    named = []
    for entry in entries:
        if entry == "_self_":
            continue
        if isinstance(entry, str):
            target, _, option = entry.lstrip("/").rpartition("/")
            pair = (target or group, option)
        elif isinstance(entry, dict) and len(entry) == 1:
            key, option = next(iter(entry.items()))
            words = str(key).split()
            target = words[-1].lstrip("/") if words else ""
            if words[:-1] not in ([], ["override"], ["optional"]) or not words[-1].startswith("/"):
                raise PlanError(
                    f"{file}: defaults: `{key}: {option}`: write `override /{target}: {option}`."
                )
            pair = (target, str(option))
        else:
            raise PlanError(
                f"{file}: defaults: {str(entry)[:60]!r}: write e.g. `override /schedule: gpipe`."
            )
        if pair[0] not in groups.built_in:
            hint = did_you_mean(f"/{name}" for name in nearest(pair[0], groups.built_in))
            raise PlanError(f"{file}: defaults: there is no group {pair[0][:60]}.{hint}")
        try:
            groups.require(*pair)
        except PlanError as error:
            raise PlanError(f"{file}: defaults: {error}") from error
        named.append(pair)
    return named


def _package(file: Path) -> str | None:
    """The ``# @package`` header, found the way Hydra finds it."""
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text and not text.startswith("#"):
            return None
        words = text.lstrip("#").split()
        if words[:1] == ["@package"] and len(words) > 1:
            return words[1]
    return None


def _without_interpolations(values: dict[str, Any], schema: type) -> dict[str, Any]:
    """Leaves ``${...}`` of existing keys out: their values are known after composition only."""
    hints = type_hints(schema)
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and name in nodes_of(schema):
            kept[name] = _without_interpolations(value, hints[name])
        elif name not in hints or not (isinstance(value, str) and "${" in value):
            kept[name] = value
    return kept


def _paths(value: object, prefix: str) -> list[str]:
    if not isinstance(value, dict):
        return [prefix]
    return [path for name in value for path in _paths(value[name], f"{prefix}.{name}")]
