"""Checks the option files of a user's ``--config-dir`` that a run would load.

Each file is read within limits and held against the schema of its group, so that a message can name
file and line: after composition nobody knows any more where a key came from.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from launcher.compose.option_groups import Groups
from launcher.compose.overrides import HYDRA_KEYS
from launcher.compose.wrong_word import NAME_A_CLASS, NO_TARGET, is_open
from launcher.config.check import check_range
from launcher.config.decode import CLASS, KeyPlaceError, decode, did_you_mean, nearest
from launcher.config.key import free_keys, keys_of, nodes_of, type_hints, value_at
from launcher.config.launch import LaunchConfig
from launcher.secrets import refuse_secret
from strategies.errors import PlanError
from strategies.small_file import FileRefusedError, read_text


def check_user_files(chosen: Iterable[tuple[str, str]], groups: Groups) -> None:
    """Checks the user's files among the chosen options, and those their defaults lists name."""
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
    if package not in (None, "_global_", group):
        raise PlanError(
            f"{file}: # @package {package} is not supported. Try # @package _global_, or none."
        )
    everywhere = package == "_global_"
    if group == "experiment" and not everywhere:
        raise PlanError(
            f"{file}: an experiment sets keys of all groups.",
            fix="Write `# @package _global_` in its first line.",
        )
    named = _defaults(values.pop("defaults", []), file, group, groups)
    if everywhere and "hydra" in values:
        for path in _paths(values.pop("hydra"), "hydra"):
            if path not in HYDRA_KEYS:
                raise PlanError(
                    f"{file}: {path}: of Hydra's own keys only {', '.join(HYDRA_KEYS)} can be set."
                )
    if group in free_keys(LaunchConfig) and not everywhere:
        values, everywhere = {group: values}, True
    if everywhere:
        _refuse_options(values, file, groups)
    elif list(values) == [group] and isinstance(values[group], dict):
        raise PlanError(
            f"{file}:{_line_of(file, (group,))}: a file of {group}/ has keys of {group} alone.",
            fix=f"Write them without `{group}:` above them.",
        )
    schema = LaunchConfig if everywhere else nodes_of(LaunchConfig)[group]
    prefix = "" if everywhere else f"{group}."
    if everywhere and values.get("experiment_name", "") is None:
        values.pop("experiment_name")  # null means the experiment's own name
    plain = _without_interpolations(values, schema)
    try:
        _check_ranges(plain, decode(plain, schema, prefix), schema, prefix)
    except KeyPlaceError as error:
        line = _line_of(file, error.path if everywhere else error.path[1:])
        at = f"{file}{f':{line}' if line else ''}"
        if not everywhere and values.get("name") == CLASS and "is not a key" in str(error):
            own = ".".join(error.path[1:])
            raise PlanError(
                f"{at}: {group}.{own} is not a key. Arguments of a class of yours stand below "
                "`args:`.",
                fix=f"Write `args: {{{own}: ...}}`.",
            ) from error
        raise PlanError(f"{at}: {error.reason}", fix=error.fix) from error
    return named


def _check_ranges(values: dict[str, Any], typed: object, schema: type, prefix: str) -> None:
    """As the whole configuration is checked, while it is known who has set what."""
    for entry in keys_of(schema, prefix):
        path = entry.path.removeprefix(prefix)
        if not _has(values, path.split(".")):
            continue
        try:
            check_range(entry, value_at(typed, path))
        except PlanError as error:
            raise KeyPlaceError(error.reason, entry.path, fix=error.fix) from error


def _has(values: object, names: Sequence[str]) -> bool:
    for name in names:
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True


def _refuse_options(values: dict[str, Any], file: Path, groups: Groups) -> None:
    """``schedule: gpipe`` chooses nothing: options stand in the list of defaults."""
    for group, value in values.items():
        if group == "callbacks" and isinstance(value, str):
            raise PlanError(
                f"{file}:{_line_of(file, (group,))}: `callbacks: {value[:60]}`: a callback has a "
                "name of your choice and a path.",
                fix="Write `callbacks: {stop: {path: ...}}`.",
            )
        if group in groups.built_in and isinstance(value, str):
            raise PlanError(
                f"{file}:{_line_of(file, (group,))}: `{group}: {value[:60]}` chooses no option "
                "here.",
                fix=f"Write `- override /{group}: {value[:60]}` below `defaults:`.",
            )


def _defaults(entries: object, file: Path, group: str, groups: Groups) -> list[tuple[str, str]]:
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
            again = not words[:-1] and group == "experiment" and target != "callbacks"
            plain = words[:-1] in ([], ["override"], ["optional"])
            if again or not plain or not words[-1].startswith("/"):
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
            raise PlanError(f"{file}: defaults: {error.reason}", fix=error.fix) from error
        named.append(pair)
    return named


def _package(file: Path) -> str | None:
    """The ``# @package`` header, found the way Hydra finds it."""
    whole = _text(file)
    if whole.startswith("\ufeff") and whole.lstrip("\ufeff# ").startswith("@package"):
        raise PlanError(
            f"{file}: a byte order mark stands before its first line, where Hydra looks for "
            "`# @package`.",
            fix="Save it as UTF-8 without one (sed -i '1s/^\\xEF\\xBB\\xBF//' "
            f"{shlex.quote(str(file))}).",
        )
    for line in whole.splitlines():
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


# Reads a user's YAML file safely and names the line of what is wrong with it.
#
# OmegaConf copies every alias: five lines of YAML can become 59,049 nodes and 11 s. So the file is
# first read as a stream of events, in constant memory, and size, nesting, nodes (aliases counted
# once per use) and duplicate keys are checked before anything is built from it.

MAX_BYTES = 64 * 1024
MAX_NODES = 2_000
MAX_DEPTH = 20


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads scalars as OmegaConf does, which is how Hydra will read them: ``3e-4`` is a number.

    YAML 1.1 wants a dot and a signed exponent, and takes ``2026-11-22`` for a date.
    """


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if not tag.endswith(":timestamp")]
    for first, known in _Loader.yaml_implicit_resolvers.items()
}
_TAGS = "tag:yaml.org,2002:"
_KNOWN_TAGS = ("!", "str", "int", "float", "bool", "null", "map", "seq")
_LONG = re.compile(r"[-+]?(0[xb])?[0-9a-fA-F_]{400,}")
_SIXTIES = re.compile(r"[-+]?[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")  # 12:30 is 750
_EIGHTS = re.compile(r"[-+]?0[0-7_]*[1-7][0-7_]*")  # 010 is 8
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(_[0-9]+)*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


@dataclass(slots=True)
class _Open:
    is_mapping: bool
    anchor: str | None
    nodes: int = 1
    children: int = 0
    key: str = ""
    lines: dict[str, int] = field(default_factory=dict)


def read_yaml(file: Path) -> dict[str, Any]:
    """The file's mapping; an empty file is an empty mapping.

    Raises:
        PlanError: File and line of a syntax error, a duplicate key, ``_target_``, a credential, or
            a limit that is passed.
    """
    text = _text(file)
    try:
        _scan(text, file)
        if "\t" in text:  # libyaml takes more of them than OmegaConf's loader
            yaml.compose(text, Loader=yaml.SafeLoader)
        value = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if "could not find expected ':'" in str(error.problem) and error.context_mark:
            mark = error.context_mark  # of the line that lacks it; the other is behind it
        line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = " ".join(str(error.problem or error.context or "not YAML").split())
        if mark and text[mark.index : mark.index + 1] == "\t":
            problem = "a tab, where YAML takes blanks only"
        elif mark and (meant := _meant_line("".join(text.splitlines()[mark.line : mark.line + 1]))):
            problem = f"{problem}. Write `{meant}`, with a blank behind the colon"
        elif "mapping values are not allowed" in problem:
            problem = f"{problem} (a line that is indented otherwise than its neighbours?)"
        raise PlanError(f"{file}{line}: {problem}.", fix="Correct the YAML there.") from error
    except (yaml.YAMLError, ValueError, LookupError) as error:
        reason = " ".join(str(error).split())[:200]
        if isinstance(error, LookupError):  # !!bool maybe
            reason = f"{reason} does not fit its tag"
        raise PlanError(f"{file}: {reason}.", fix="Correct the YAML there.") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        what = "a list" if isinstance(value, list) else "a text"
        raise PlanError(
            f"{file}: expected `key: value` lines, found {what}.",
            fix="Write each key in a line of its own, as in `lr: 3e-4`.",
        )
    for name in _keys(value):
        if not isinstance(name, str):
            raise PlanError(f"{file}: the key {name!r} is not a text.", fix="Write it in quotes.")
    return value


def _meant_line(line: str) -> str | None:
    """``lr: 1e-3`` for ``lr:1e-3`` and ``lr = 1e-3``.

    >>> _meant_line("  lr =1e-3"), _meant_line("lr: 1e-3")
    ('lr: 1e-3', None)
    """
    found = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(?:=|:(?!\s))\s*(\S.*?)\s*", line)
    return f"{found[1]}: {found[2]}" if found else None


def _keys(value: object) -> Iterator[object]:
    """All keys of a nested value; aliases that contain themselves have been refused."""
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _keys(child)


def _line_of(file: Path, path: tuple[str, ...]) -> int | None:
    """Line of a (nested) key, counted from 1, for messages; None where it is not found."""
    node = yaml.compose(_text(file), Loader=_Loader)
    found = None
    for name in path:
        if not isinstance(node, yaml.MappingNode):
            return found
        for key_node, value_node in node.value:
            if key_node.value == name:
                found, node = key_node.start_mark.line + 1, value_node
                break
        else:
            return found
    return found


def _text(file: Path) -> str:
    try:
        return read_text(file, most_bytes=MAX_BYTES)
    except (OSError, FileRefusedError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PlanError(
            f"{file}: cannot be read: {reason}. An option file is UTF-8 of at most {MAX_BYTES} "
            "bytes."
        ) from error


def _scan(text: str, file: Path) -> None:
    stack: list[_Open] = []
    anchors: dict[str, int] = {}
    total = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1
        tag = getattr(event, "tag", None)
        if tag is not None and tag.removeprefix(_TAGS) not in _KNOWN_TAGS:
            raise PlanError(
                f"{file}:{line}: the tag {tag.removeprefix(_TAGS)[:60]} is not read, only "
                f"!!{', !!'.join(_KNOWN_TAGS[1:])}.",
                fix="Write the value without it.",
            )
        if isinstance(event, yaml.CollectionStartEvent):
            stack.append(_Open(isinstance(event, yaml.MappingStartEvent), event.anchor))
            if len(stack) > MAX_DEPTH:
                raise PlanError(f"{file}:{line}: nested deeper than {MAX_DEPTH} levels.")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            closed = stack.pop()
            size = closed.nodes
            if closed.anchor:
                anchors[closed.anchor] = size
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            if not event.style and event.implicit[0]:
                _refuse_surprise(event.value, file, line)
            _scalar(event.value, stack, file, line)
            if event.anchor:
                anchors[event.anchor] = 1
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                above = re.search(rf"&{re.escape(event.anchor)}\b", text)
                wrong = f"contains itself. Write out what is below &{event.anchor}"
                if above is None:
                    wrong = f"stands for nothing: no &{event.anchor} is above it. Write the value"
                raise PlanError(f"{file}:{line}: the alias *{event.anchor} {wrong}.")
            size = anchors[event.anchor]
        else:
            continue
        total = size
        if stack:
            stack[-1].children += 1
            stack[-1].nodes += size
            total = stack[-1].nodes
        if total > MAX_NODES:
            raise PlanError(
                f"{file}:{line}: more than {MAX_NODES} values once its aliases (*name) are "
                "written out.",
                fix="Use fewer aliases.",
            )


def _refuse_surprise(value: str, file: Path, line: int) -> None:
    """Plain words that YAML 1.1, which Hydra reads, takes for other numbers than they look like."""
    if _LONG.fullmatch(value) and value.strip("+-")[0].isdigit():
        raise PlanError(
            f"{file}:{line}: a number of {len(value)} characters.",
            fix="Write it in quotes for a text.",
        )
    sixties, eights = _SIXTIES.fullmatch(value), _EIGHTS.fullmatch(value)
    if not sixties and not eights:
        return
    meant = yaml.load(value, Loader=_Loader)
    if sixties or meant != int(value.replace("_", "")):
        raise PlanError(
            f"{file}:{line}: YAML reads {value} as {meant}.",
            fix=f"Write '{value}' in quotes for a text, or the number that is meant.",
        )


def _scalar(value: str, stack: list[_Open], file: Path, line: int) -> None:
    parent = stack[-1] if stack else None
    if parent is None or not parent.is_mapping or parent.children % 2:
        refuse_secret(parent.key if parent else "", value, place=f"{file}:{line}")
        if is_open(value):
            raise PlanError(
                f"{file}:{line}: {value[:60]}: ${{ begins what another key holds, and nothing "
                "closes it.",
                fix="Write ${pp}, say, or \\${ for the characters.",
            )
        return
    if value in parent.lines:
        raise PlanError(
            f"{file}:{line}: the key {value[:60]} is there twice, first in line "
            f"{parent.lines[value]}.",
            fix="Remove one.",
        )
    parent.lines[value] = line
    parent.key = value
    if value == "_target_":
        raise PlanError(f"{file}:{line}: {NO_TARGET}", fix=NAME_A_CLASS)
    refuse_secret(value, "", place=f"{file}:{line}")
