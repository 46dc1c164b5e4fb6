"""The command line's overrides, checked word by word before Hydra composes anything.

Hydra reports a misspelt key with its own vocabulary and no suggestion; here every override's key
and option is looked up first. Also expands a sweep into its jobs, so that all of them are checked
before the first one starts.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from typing import Any, get_args

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from launcher.compose.option_groups import OWN_FILES, Groups
from launcher.config.decode import CLASS, did_you_mean, nearest, unknown_key
from launcher.config.foreign_words import meant_key, meant_option, meant_value
from launcher.config.key import Key, describe, is_free, keys_of, nodes_of, shorten, spell, typed
from launcher.config.launch import LaunchConfig, Mode
from launcher.secrets import refuse_secret
from strategies.errors import PlanError

TOOLS = ("demo", "doctor", "init")
_HELP = ("help", "?", "usage", "list", "version", "info", "run")
MAX_CHARACTERS = 16_384
MAX_JOBS = 1_000

# Hydra's own configuration can name classes to instantiate (logging, launchers): only these.
HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")

# Groups of which several options go together: ``tracking=[csv,wandb]``.
SEVERAL = ("tracking", "callbacks")
NO_TARGET = (
    "_target_ would run code from any configuration, which is not supported. Name a class of your "
    "own as model=class model.path=my_pkg.nets:LitNet model.args.width=64 (data=class, "
    "optimizer=class, schedule.path= and callbacks.NAME.path= take theirs alike)."
)


def parse_overrides(
    words: Sequence[str], groups: Groups, loader: ConfigLoader | None = None
) -> list[Override]:
    """Parses and checks ``key=value`` words; ``glob()`` sweeps ask Hydra's loader for options."""
    for word in words:
        _check_word(word)
    parser = OverridesParser.create(config_loader=loader)
    parsed: list[Override] = []
    for word in words:
        try:
            parsed += parser.parse_overrides([word])
        except (HydraException, RecursionError, ValueError) as error:
            raise _unreadable(word) from error
    seen: set[str] = set()
    own = {override.key_or_group for override in parsed if _is_own(override, groups)}
    for override in parsed:
        _check_key(override, groups, own)
        name = override.key_or_group
        if name in seen and name in groups.built_in:
            raise PlanError(f"{name}= is given twice. Keep one, or try -m {name}=A,B for a sweep.")
        seen.add(name)
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
                raise _unreadable(override.input_line or name) from error
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
                f"Try -m {_shell(f'{name}={shorten(value)}')} for one run each{other}."
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


def _check_word(word: str) -> None:
    name, separator, value = word.partition("=")
    try:
        word.encode()
    except UnicodeEncodeError:
        raise PlanError(
            f"{shorten(name)}: this word has bytes that are no UTF-8, which no file of a run could "
            "hold. Try a name of other letters, or a link to it."
        ) from None
    refuse_secret(name.lstrip("+~"), value)
    if len(word) > MAX_CHARACTERS:
        raise PlanError(
            f"{shorten(name)}: {len(word)} characters; at most {MAX_CHARACTERS} are read."
        )
    if "_target_" in word:
        raise PlanError(f"{shorten(name)}: {NO_TARGET}")
    if not name or (not separator and not word.startswith("~")):
        keys = [entry.path for entry in keys_of(LaunchConfig)]
        bare = word.rstrip(":")
        near = (bare,) if bare in _CHOICES else nearest(bare, keys, limit=1)
        hint = did_you_mean(f"{path}=..." for path in near)
        mode = meant_value("mode", word, switch=False, whole=False, number=False) or word
        if word in TOOLS:
            raise PlanError(f"{word} stands first. Try python -m launcher {word}.")
        if separator or _VALUE_ALONE.fullmatch(word):
            hint = (
                " No blanks stand around the =, nor between values: try pp=4, or -m pp=1,2,4 for "
                "one run each."
            )
        elif _SCRIPT.fullmatch(word):
            hint = (
                " A script of your own is started by python itself, with PipelineStrategy in it; "
                "classes of it are named as model=class model.path=my_pkg.nets:LitNet."
            )
        elif meant := _colon(word):
            hint = f" Try {meant}."
        elif mode in get_args(Mode):
            hint = f" Did you mean mode={mode}?"
        elif word.lower() in _HELP:
            hint = ""
        elif word.endswith((".yaml", ".yml")):
            hint = f" {OWN_FILES}"
        hint = hint or " Try --help."
        raise PlanError(f"{shorten(word)}: expected key=value.{hint}")


_CHOICES = {*nodes_of(LaunchConfig), "experiment"}
_VALUE_ALONE = re.compile(r"[+-]?[\d.][\w.,+-]*|[\[({].*")
_SCRIPT = re.compile(r"python[\d.]*|torchrun|[\w./-]+\.(py|sh|ipynb)")


def _colon(word: str) -> str | None:
    """``pp=4`` for ``pp:4``, ``pp: 4`` and ``pp = 4``."""
    name, sign, value = re.sub(r"\s*([:=]+)\s*", r"\1", word, count=1).partition(":")
    name, _, value = f"{name}{sign and '='}{value}".partition("=")
    names = {entry.path for entry in keys_of(LaunchConfig)} | _CHOICES
    value = value.lstrip("=").strip()
    return typed(name, value) if name in names and value else None


def _is_own(override: Override, groups: Groups) -> bool:
    """Whether it chooses a class of the user's own, or of a package, for model, data, optimizer."""
    name = override.key_or_group
    if name not in ("model", "data", "optimizer"):
        return False
    return bool({CLASS, *groups.installed.get(name, ())} & set(_option_names(override)))


def _check_key(override: Override, groups: Groups, own: Collection[str]) -> None:
    name = override.key_or_group
    line = override.input_line or name
    value = line.partition("=")[2]
    if override.package is not None:
        raise PlanError(f"{shorten(line)}: @package is not supported. Try {typed(name, value)}.")
    if override.is_delete():
        raise PlanError(
            f"{shorten(line)}: keys cannot be removed. Leave it out, or give {name}= another value."
        )
    if name == "hydra" or name.startswith(("hydra.", "hydra/")):
        _check_hydra_key(name, override)
        return
    if name in groups.built_in:
        if override.is_add() or override.is_force_add():
            raise PlanError(f"{shorten(line)}: {name} is there already. Try {typed(name, value)}.")
        for option in _option_names(override):
            groups.require(name, option)
        return
    known = {entry.path for entry in keys_of(LaunchConfig)} | set(nodes_of(LaunchConfig))
    if is_free(name, LaunchConfig):
        return
    if name not in known:
        raise _unknown(name, value, groups, own)
    if override.is_add():
        raise PlanError(f"{shorten(line)}: {name} is there already. Try {typed(name, value)}.")
    given: object = None if override.is_sweep_override() else override.value()
    if isinstance(given, dict):
        for child in given:
            if f"{name}.{child}" not in known:
                raise unknown_key(f"{name}.{child}")


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
        return []
    if isinstance(value, list) and name in SEVERAL and value:
        return [spell(option) for option in value]
    if isinstance(value, list | dict) or value is None:
        raise PlanError(
            f"{name}={shorten(value)}: {name} takes the name of one option. "
            f"Try --help to see them, or {name}.KEY=VALUE to set one key."
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
    return unknown_key(name)


def _unreadable(word: str) -> PlanError:
    name, _, value = word.partition("=")
    if word.startswith("~"):
        return PlanError(
            f"{shorten(word)}: keys cannot be removed. Leave it out, or give the key another value."
        )
    if value.startswith("=") or name != name.strip():
        meant = _colon(word)
        if meant:
            return PlanError(f"{shorten(word)}: expected key=value, with one =. Try {meant}.")
    if not _KEY_NAME.fullmatch(name.lstrip("+~")):
        plain = re.sub(r"\.+", ".", name.strip("+~.")) or "pp"
        keys = [entry.path for entry in keys_of(LaunchConfig)]
        near = nearest(plain, keys, limit=1) or nearest(plain, nodes_of(LaunchConfig), limit=1)
        return PlanError(
            f"{shorten(word)}: {shorten(name)} is no key: names joined by single dots, as in "
            f"trainer.max_steps.{did_you_mean(f'{one}=...' for one in near) or ' Try --help.'}"
        )
    if is_open(value):
        return _unclosed(word)
    entry = next((one for one in keys_of(LaunchConfig) if one.path == name.lstrip("+")), None)
    if called := _CALL.match(value):
        if called[1] not in FUNCTIONS:
            return PlanError(
                f"{shorten(word)}: {called[1]} is no function of a sweep: {', '.join(FUNCTIONS)} "
                f"are. Try -m {name}=A,B, or {typed(name, value)} for a text."
            )
    elif entry is not None and "text" not in describe(entry.hint):
        return PlanError(
            f"{shorten(word)}: expected {describe(entry.hint)}. "
            f"Try {name}={meant_list(value, entry) or spell(entry.example)}."
        )
    spelt = typed(name, value.replace("${", r"\${"))
    if entry is not None and "list" in describe(entry.hint):
        items = value.removeprefix("[").removesuffix("]").replace("'", "").replace('"', "")
        listed = ",".join(f"'{item.strip()}'" for item in items.split(",") if item.strip())
        spelt = _shell(f"{name}=[{shorten(listed)}]")
    advice = f" Try {spelt}." if len(spelt) < _PASTED else ""
    return PlanError(
        f"{shorten(word)}: this value cannot be read. Text with other characters than letters, "
        f"digits and any of - _ . / % + @ needs quotes inside the shell's quotes.{advice}"
    )


_PASTED = 600  # characters: advice that is longer is no help


_KEY_NAME = re.compile(r"[A-Za-z_][\w-]*([./@][A-Za-z_][\w-]*)*")
_CALL = re.compile(r"([a-z_]+)\(")
FUNCTIONS = ("choice", "range", "interval", "glob", "sort", "shuffle", "tag", "extend_list")


def _shell(word: str) -> str:
    """The word in the quotes that a shell needs, where it needs any."""
    if not re.search(r"[^\w.,/%+@:=\[\]-]", word):
        return word
    return shlex.quote(word) if {*word} & {*'"$`\\!'} else f'"{word}"'


def is_open(value: str) -> bool:
    r"""Whether an interpolation in it is never closed.

    >>> is_open("${pp"), is_open("a-${oc.env:HOME,${x}}"), is_open(r"\${")
    (True, False, False)
    """
    plain = value.replace("\\${", "")
    return plain.count("${") > plain.count("}")


def _unclosed(word: str) -> PlanError:
    name, _, value = word.partition("=")
    closed = value + "}" * (value.count("${") - value.count("}"))
    fix = f"'{name}={closed}'" if re.fullmatch(r"[^']*\$\{[\w.:,/]+\}*", closed) else ""
    plain = typed(name, value.replace("${", r"\${"))
    entry = next((one for one in keys_of(LaunchConfig) if one.path == name.lstrip("+")), None)
    if entry is not None and describe(entry.hint) not in ("a text", "a text or null"):
        plain = f"{name}={spell(entry.example)}"
    return PlanError(
        f"{shorten(word)}: ${{ begins what another key holds, and nothing closes it. "
        f"Try {' or '.join(filter(None, (fix, plain)))}."
    )


def meant_list(value: str, entry: Key) -> str | None:
    """``[0.9,0.95]`` for ``(0.9,0.95)`` and ``{0.9,0.95}``, where a list is taken."""
    items = value.strip("()[]{} ").split(",")
    if "list" not in describe(entry.hint) or not all(
        _PLAIN_NUMBER.fullmatch(i.strip()) for i in items
    ):
        return None
    return f"[{','.join(item.strip() for item in items)}]"


_PLAIN_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")


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
