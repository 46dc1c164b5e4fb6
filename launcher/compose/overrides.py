"""The command line's overrides, checked word by word before Hydra composes anything.

Hydra reports a misspelt key with its own vocabulary and no suggestion; here every override's key
and option is looked up first. Also expands a sweep into its jobs, so that all of them are checked
before the first one starts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from launcher.compose.option_groups import Groups
from launcher.compose.wrong_word import NODES, check_haste, check_word, shell_word, unreadable
from launcher.config.decode import CLASS, did_you_mean, nearest, unknown_key
from launcher.config.foreign_words import meant_key, meant_option
from launcher.config.key import describe, is_free, keys_of, nodes_of, shorten, spell, typed
from launcher.config.launch import LaunchConfig
from strategies.errors import PlanError

MAX_JOBS = 1_000

# Hydra's own configuration can name classes to instantiate (logging, launchers): only these.
HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")

# Groups of which several options go together: ``tracking=[csv,wandb]``.
SEVERAL = ("tracking", "callbacks")


class _Options:
    """Where ``glob()`` looks: among all options, where Hydra's own loader has ours alone."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def get_group_options(self, group: str, *_: object, **__: object) -> list[str]:
        return list(self._groups.options(group)) if group in self._groups.built_in else []


def parse_overrides(words: Sequence[str], groups: Groups) -> list[Override]:
    """Parses and checks ``key=value`` words."""
    for word in words:
        check_word(word)
    for word in words:
        check_haste(word)
    parser = OverridesParser.create(config_loader=cast("Any", _Options(groups)))
    parsed: list[Override] = []
    for word in words:
        try:
            parsed += parser.parse_overrides([word])
        except (HydraException, RecursionError, ValueError) as error:
            raise unreadable(word) from error
    seen: dict[str, Override] = {}
    own = {override.key_or_group for override in parsed if _is_own(override, groups)}
    for override in parsed:
        _refuse_size_of_folder(override, parsed)
        _check_key(override, groups, own)
        name = override.key_or_group
        if name in seen and name in groups.built_in:
            raise PlanError(
                f"{name}= is given twice.", fix=f"Keep one, or try -m {name}=A,B for a sweep."
            )
        if name in seen and seen[name].is_sweep_override():
            raise PlanError(
                f"{shorten(seen[name].input_line)} and {shorten(override.input_line)}: the second "
                "would replace a list of values.",
                fix="Keep one of them.",
            )
        seen[name] = override
    return parsed


def expand(overrides: Iterable[Override]) -> list[list[str]]:
    """The jobs of a sweep: the product of all lists of values, in Hydra's order."""
    values: dict[str, list[str]] = {}
    for override in overrides:
        name = override.get_key_element()
        if not override.is_sweep_override():
            values[name] = [f"{name}={as_typed(override.get_value_element_as_str())}"]
        elif override.is_discrete_sweep():
            try:
                choices = list(itertools.islice(override.sweep_string_iterator(), MAX_JOBS + 1))
            except (HydraException, ValueError, ZeroDivisionError) as error:
                raise unreadable(override.input_line or name) from error
            values[name] = [f"{name}={as_typed(choice)}" for choice in choices]
        else:
            raise PlanError(
                f"{shorten(override.input_line)}: a sweep needs a list of values. "
                f"Try {name}=1,2,3 or '{name}=range(1,4)', or sweep.trials=20 for a search in the "
                "interval."
            )
    jobs = 1
    for choices in values.values():
        jobs *= len(choices)
    if not 1 <= jobs <= MAX_JOBS:
        empty = next((name for name, choices in values.items() if not choices), "")
        fix = f" {empty} has no value that fits. Try {empty}=A,B." if empty else ""
        raise PlanError(f"The sweep has {jobs} jobs; from 1 to {MAX_JOBS} are possible.{fix}")
    return [list(job) for job in itertools.product(*values.values())]


def as_typed(value: str) -> str:
    r"""A value without the backslashes that Hydra puts before colons, which need none.

    >>> as_typed(r"nets\:LitNet")
    'nets:LitNet'
    """
    return value if {"'", '"', "{"} & {*value} else value.replace("\\:", ":")


def require_single(overrides: Iterable[Override]) -> None:
    """Raises where a list of values stands although one run was asked for."""
    for override in overrides:
        if override.is_sweep_override():
            name, value = override.key_or_group, (override.input_line or "").partition("=")[2]
            kinds = {entry.path: describe(entry.hint) for entry in keys_of(LaunchConfig)}
            kind = kinds.get(name, "")
            other = ""
            if re.fullmatch(r"\d{1,3}(,\d{3})+", value) and kind.endswith("whole number"):
                other = f", or {name}={value.replace(',', '')} for one number"
            elif re.fullmatch(r"\d+,\d+", value) and "a number" in kind and "list" not in kind:
                other = f", or {name}={value.replace(',', '.')} for one number"
            if name in SEVERAL:
                other = f", or {name}=[{shorten(value)}] for all of them in one run"
            elif "list" in kind:
                other = f", or {name}=[{shorten(value)}] for a list"
            elif "text" in kind:
                other = f", or {typed(name, value)} for a text with commas"
            raise PlanError(
                f"{name}={shorten(value)} gives several values to one run. "
                f"Try -m {shell_word(f'{name}={shorten(value)}')} for one run each{other}."
            )


def chosen_options(overrides: Iterable[Override], groups: Groups) -> set[tuple[str, str]]:
    """All (group, option) pairs that the overrides name, sweep values included."""
    return {
        (override.key_or_group, option)
        for override in overrides
        if override.key_or_group in groups.built_in
        for option in _option_names(override)
    }


def quote(name: str, value: str) -> str:
    """``name=value`` with the value quoted for Hydra's grammar."""
    return f"{name}={QuotedString(text=value, quote=Quote.single).with_quotes()}"


def _is_own(override: Override, groups: Groups) -> bool:
    """Whether it chooses a class of the user's own, or of a package, for model, data, optimizer."""
    name = override.key_or_group
    if name not in ("model", "data", "optimizer") or override.is_delete():
        return False
    return bool({CLASS, *groups.installed.get(name, ())} & set(_option_names(override)))


def _refuse_size_of_folder(override: Override, parsed: Iterable[Override]) -> None:
    """Others' names of sizes, which model=hf has from a file: keys of ours would not go, either."""
    name = override.key_or_group
    meant = meant_key(name)
    if not name.startswith("model.") or not meant.startswith(" Try model."):
        return
    if meant.startswith(" Try model.sequence="):  # the one size that is asked for here
        return
    if any(item.key_or_group == "model" and _option_names(item) == ["hf"] for item in parsed):
        raise PlanError(
            f"{shorten(name)} is not a key: with model=hf all sizes are those of config.json in "
            "model.path.",
            fix="Change it there, and add model.pretrained=false where weights of that "
            "size are to be drawn.",
        )


def _check_key(override: Override, groups: Groups, own: Collection[str]) -> None:
    name = override.key_or_group
    line = override.input_line or name
    value = line.partition("=")[2]
    if override.package is not None:
        raise PlanError(f"{shorten(line)}: @package is not supported. Try {typed(name, value)}.")
    if override.is_delete():
        raise PlanError(
            f"{shorten(line)}: keys cannot be removed.",
            fix=f"Leave it out, or give {name}= another value.",
        )
    if name == "hydra" or name.startswith(("hydra.", "hydra/")):
        _check_hydra_key(name, override)
        return
    if name in groups.built_in:
        if override.is_add() or override.is_force_add():
            raise _there_already(override)
        for option in _option_names(override):
            groups.require(name, option)
        return
    known = {entry.path for entry in keys_of(LaunchConfig)} | set(nodes_of(LaunchConfig))
    if is_free(name, LaunchConfig):
        return
    if name not in known:
        raise _unknown(name, value, groups, own)
    if override.is_add():
        raise _there_already(override)
    given: object = None if override.is_sweep_override() else override.value()
    if isinstance(given, dict):
        for child in given:
            path = f"{name}.{child}"
            if path not in known and not is_free(path, LaunchConfig):
                raise unknown_key(f"{name}.{child}")


def _there_already(override: Override) -> PlanError:
    line = override.input_line or ""
    sweep = "-m " if override.is_sweep_override() else ""
    return PlanError(
        f"{shorten(line)}: {override.key_or_group} is there already. "
        f"Try {sweep}{shell_word(line.lstrip('+'))}."
    )


def _check_hydra_key(name: str, override: Override) -> None:
    line = override.input_line or name
    if name in HYDRA_KEYS:
        if override.is_add() or override.is_force_add() or override.is_sweep_override():
            raise PlanError(f"{shorten(line)}: {name} takes one folder. Try {name}=my_folder.")
        return
    other = {
        "hydra.searchpath": " Try --config-dir DIR.",
        "hydra.mode": " Try -m for a sweep.",
        "hydra.job.chdir": " Runs never change the working directory.",
    }
    hint = other.get(name) or did_you_mean(f"{key}=..." for key in nearest(name, HYDRA_KEYS))
    raise PlanError(
        f"{shorten(line)}: of Hydra's own keys only {', '.join(HYDRA_KEYS)} can be set.{hint}"
    )


def _option_names(override: Override) -> list[str]:
    name = override.key_or_group
    if override.is_sweep_override():
        if not override.is_discrete_sweep():
            line = override.input_line
            raise PlanError(f"{shorten(line)}: {name} takes option names. Try -m {name}=A,B.")
        values = itertools.islice(override.sweep_string_iterator(), MAX_JOBS)
        return [option for value in values for option in listed_options(name, value)]
    value: Any = override.value()
    if value is None and name in ("experiment", "callbacks"):
        raise PlanError(f"{name}=null: there is none unless it is named. Try it without {name}=.")
    if isinstance(value, list) and name in SEVERAL and value:
        return [spell(option) for option in value]
    if isinstance(value, list | dict) or value is None:
        way = "--help to see them" + (f", or {name}.KEY=VALUE to set one key" * (name in NODES))
        if isinstance(value, list) and value:
            several = ",".join(map(spell, value))
            way = f"{name}={several}" if len(value) == 1 else f"-m {name}={several} for a run each"
        raise PlanError(f"{name}={shorten(value)}: {name} takes the name of one option. Try {way}.")
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise PlanError(
            f"{name}={value}: a number is no option's name. Try \"{name}='{value}'\" for the name."
        )
    return [spell(value)]


def listed_options(group: str, value: str) -> list[str]:
    """The options that ``tracking=[csv,wandb]`` names, or the only one."""
    if group in SEVERAL and value.startswith("[") and value.endswith("]"):
        return [option.strip().strip("'\"") for option in value[1:-1].split(",")]
    return [value]


def _unknown(name: str, value: str, groups: Groups, own: Collection[str]) -> PlanError:
    group, _, rest = name.partition(".")
    if rest and group in own:
        prefix = f"{group}."
        keys = [entry.path for entry in keys_of(LaunchConfig) if entry.path.startswith(prefix)]
        close = nearest(rest, [key.removeprefix(prefix) for key in keys], limit=1)
        hint = f"Try {typed(f'{group}.args.{rest}', value)}."
        if close:
            hint = f"Did you mean {group}.{close[0]}?"
        return PlanError(
            f"{shorten(name)} is not a key. {hint} Arguments of a class of yours go under "
            f"{group}.args."
        )
    near = nearest(name, groups.built_in, limit=1)
    leaves = {entry.path.rpartition(".")[2] for entry in keys_of(LaunchConfig)}
    if near and "." not in name and name not in leaves and not meant_key(name):
        options = groups.options(near[0])
        option = (*nearest(value, options, limit=1), meant_option(near[0], value))[0]
        hint = f"Did you mean {near[0]}={option}?"
        if option is None:
            hint = f"Did you mean {near[0]}=? Its options: {', '.join(options)}."
        return PlanError(f"{shorten(name)} is not a key. {hint}")
    return unknown_key(name, value=value)


# ``planner.explain=[tp=4,pp=8]``: in Hydra's grammar a list's entries with ``=`` need quotes.

_KEY = "planner.explain="


def quote_explain(words: Iterable[str]) -> tuple[str, ...]:
    """The command line's words, with the entries of ``planner.explain`` quoted.

    >>> quote_explain(["pp=4", "planner.explain=[tp=4,pp=8]"])
    ('pp=4', "planner.explain=['tp=4','pp=8']")
    """
    return tuple(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    value = word.removeprefix(_KEY)
    if value == word or not (value.startswith("[") and value.endswith("]")) or "'" in value:
        return word
    entries = [entry.strip() for entry in value[1:-1].split(",") if entry.strip()]
    if any('"' in entry or "[" in entry for entry in entries):
        return word
    return f"{_KEY}[" + ",".join(f"'{entry}'" for entry in entries) + "]"
