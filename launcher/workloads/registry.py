"""Models and data by name: the built-in ones, and those of other installed distributions.

A distribution adds its own through entry points (``foldpipe.models``, ``foldpipe.data``). Names are
looked up without importing anything, so a misspelt one is answered at once; only the chosen object
is loaded. Free of torch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from launcher.config.decode import did_you_mean, nearest
from strategies.errors import DataError, ModelError, PipelineError

Group = Literal["foldpipe.models", "foldpipe.data"]

MODELS: Group = "foldpipe.models"
DATA: Group = "foldpipe.data"

_BUILT_IN: dict[Group, dict[str, str]] = {
    MODELS: {
        "transformer": "launcher.workloads.language_model:LanguageModel",
        "hf": "launcher.workloads.hf.hf_model:build",
    },
    DATA: {"text": "launcher.workloads.data.module:TextDataModule"},
}
_OPTION: dict[Group, str] = {MODELS: "model", DATA: "data"}
_ERROR: dict[Group, type[PipelineError]] = {MODELS: ModelError, DATA: DataError}


def names(group: Group) -> tuple[str, ...]:
    """All names of a group, sorted; nothing is imported."""
    return tuple(sorted({*_BUILT_IN[group], *(point.name for point in entry_points(group=group))}))


def find(group: Group, name: str, *, also: Iterable[str] = ()) -> EntryPoint:
    """The entry point behind ``name``, not loaded.

    Names that are valid elsewhere (``also``: the YAML files of the group) are suggested, too.

    Raises:
        ModelError: No model of that name, or several distributions offer different ones.
        DataError: The same for data.
    """
    error = _ERROR[group]
    if name in _BUILT_IN[group]:
        return EntryPoint(name, _BUILT_IN[group][name], group)
    # Two installations of one distribution list the same object twice.
    found = {point.value: point for point in entry_points(group=group, name=name)}
    if len(found) == 1:
        return next(iter(found.values()))
    option = _OPTION[group]
    if found:
        raise error(
            f"{option}={name} is ambiguous: installed packages offer {' and '.join(sorted(found))} "
            f"under that name (entry points {group}). Try `pip uninstall` of one of them."
        )
    known = sorted({*names(group), *also})
    close = did_you_mean(f"{option}={match}" for match in nearest(name, known))
    raise error(
        f"{option}={name} is unknown.{close} Known: {', '.join(known)}. A package of yours adds "
        f"names through entry points in the group {group}; try `pip install` of that package."
    )


def load(group: Group, name: str, *, also: Iterable[str] = ()) -> Callable[..., Any]:
    """Imports what ``find`` finds: a class or function that builds the model or data module.

    Raises:
        ModelError: It is unknown, cannot be imported, or cannot be called.
        DataError: The same for data.
    """
    point = find(group, name, also=also)
    option, error = _OPTION[group], _ERROR[group]
    try:
        loaded = point.load()
    except Exception as reason:  # whatever a stranger's module does when it is imported
        raise error(
            f"{option}={name} is {point.value} (entry point in {group}), which cannot be loaded: "
            f"{type(reason).__name__}: {reason}. Try `python -c 'import {point.module}'`."
        ) from reason
    if not callable(loaded):
        raise error(
            f"{option}={name} is {point.value} (entry point in {group}), an object of "
            f"type {type(loaded).__name__}, but must be a class or function that builds it. "
            f"Try a function in {point.module}."
        )
    return loaded  # type: ignore[no-any-return]
