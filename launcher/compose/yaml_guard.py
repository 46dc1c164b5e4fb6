"""Reads a user's YAML file safely and names the line of what is wrong with it.

OmegaConf copies every alias: five lines of YAML can become 59,049 nodes and 11 s. So the file is
first read as a stream of events, in constant memory, and size, nesting, nodes (aliases counted
once per use) and duplicate keys are checked before anything is built from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from launcher.compose.secrets import refuse_secret
from strategies.errors import PlanError

MAX_BYTES = 64 * 1024
MAX_NODES = 2_000
MAX_DEPTH = 20

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(slots=True)
class _Open:
    """A collection whose end has not been seen."""

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
        value = yaml.load(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = " ".join(str(error.problem or error.context or "not YAML").split())
        raise PlanError(f"{file}{line}: {problem}. Correct the YAML there.") from error
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PlanError(f"{file}: {reason}. Correct the YAML there.") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise PlanError(f"{file}: expected `key: value` lines, found a {type(value).__name__}.")
    for name in value:
        if not isinstance(name, str):
            raise PlanError(f"{file}: the key {name!r} is not a text. Write it in quotes.")
    return value


def line_of(file: Path, path: tuple[str, ...]) -> int | None:
    """Line of a (nested) key, counted from 1, for messages; None where it is not found."""
    node = yaml.compose(_text(file), Loader=_LOADER)
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
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise PlanError(f"{file}: {size} bytes; an option file has at most {MAX_BYTES}.")
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(f"{file}: not UTF-8 at byte {error.start}. Save it as UTF-8.") from error
    except OSError as error:
        raise PlanError(f"{file}: cannot be read: {error.strerror}.") from error


def _scan(text: str, file: Path) -> None:
    stack: list[_Open] = []
    anchors: dict[str, int] = {}
    total = 0
    for event in yaml.parse(text, Loader=_LOADER):
        line = event.start_mark.line + 1
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
            _scalar(event.value, stack, file, line)
            if event.anchor:
                anchors[event.anchor] = 1
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise PlanError(f"{file}:{line}: the alias *{event.anchor} contains itself.")
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
                "written out. Use fewer aliases."
            )


def _scalar(value: str, stack: list[_Open], file: Path, line: int) -> None:
    parent = stack[-1] if stack else None
    if parent is None or not parent.is_mapping or parent.children % 2:
        refuse_secret(parent.key if parent else "", value, place=f"{file}:{line}")
        return
    if value in parent.lines:
        raise PlanError(
            f"{file}:{line}: the key {value[:60]} is there twice, first in line "
            f"{parent.lines[value]}. Remove one."
        )
    parent.lines[value] = line
    parent.key = value
    if value == "_target_":
        raise PlanError(
            f"{file}:{line}: _target_ would run code from a configuration file, which is not "
            "supported. Give the name of a registered model, data module or schedule."
        )
    refuse_secret(value, "", place=f"{file}:{line}")
