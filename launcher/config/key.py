"""How one configuration key is declared: its default, its help and its range, in one place.

The command line's ``--help``, its suggestions and its range checks all read these declarations, so
a key cannot exist without an explanation. Knows nothing of Hydra, and must not: ranks read their
configuration without it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from strategies import keyword_types
from strategies.errors import PlanError


def key(
    default: object,
    help_text: str,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    example: object = None,
    unit: tuple[str, float] | None = None,
) -> Any:  # noqa: ANN401 -- stands for any field's type, as dataclasses.field does
    """A dataclass field with help text and bounds.

    Args:
        default: Value where neither YAML nor command line says anything.
        help_text: What ``--help`` prints: one sentence, units included.
        low: Smallest allowed number.
        above: Numbers must be larger than this.
        high: Largest allowed number.
        example: A value that works, for error messages; the default where it is None.
        unit: Another one that people give it in, and how much one of it is: ("TFLOPS", 1e12).
    """
    metadata = {
        "help": help_text,
        "low": low,
        "above": above,
        "high": high,
        "example": default if example is None else example,
        "unit": unit,
    }
    return field(default=default, metadata=metadata)


class Args(Mapping[str, Any]):
    """Values under names of the user's own, nested as they were typed; cannot be changed.

    What JSON has: texts, numbers, true and false, null, lists and mappings.
    """

    __slots__ = ("_text",)

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._text = json.dumps(dict(values or {}))

    def plain(self) -> dict[str, Any]:
        """The values anew, for whoever may change them."""
        found: dict[str, Any] = json.loads(self._text)
        return found

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 -- any value's
        return self.plain()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain())

    def __len__(self) -> int:
        return len(self.plain())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Args) and self.plain() == other.plain()

    def __hash__(self) -> int:
        return hash(json.dumps(self.plain(), sort_keys=True))

    def __repr__(self) -> str:
        return f"Args({self._text})"


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf of the configuration tree.

    Attributes:
        path: Dotted, as typed on the command line, e.g. ``model.hidden``.
        above: Exclusive lower bound, or None.
        example: A value that works.
        unit: Another unit that people give it in, and how much one of it is.
    """

    path: str
    hint: Any
    default: Any
    help_text: str
    low: float | None
    above: float | None
    high: float | None
    example: Any
    unit: tuple[str, float] | None


def type_hints(schema: type) -> dict[str, Any]:
    """Resolved annotations of a dataclass."""
    return _type_hints(schema)


def keys_of(schema: type, prefix: str = "") -> tuple[Key, ...]:
    """All leaves below a dataclass, in declaration order."""
    return _keys_of(schema, prefix)


def free_keys(schema: type) -> tuple[str, ...]:
    """Paths below which every name is allowed."""
    return tuple(entry.path for entry in keys_of(schema) if entry.hint is Args)


def is_free(path: str, schema: type) -> bool:
    """Whether a path lies below one of ``free_keys``."""
    return any(path.startswith(f"{free}.") for free in free_keys(schema))


def value_at(config: object, path: str) -> Any:  # noqa: ANN401 -- any field's
    for name in path.split("."):
        config = getattr(config, name)
    return config


def nodes_of(schema: type) -> dict[str, type]:
    """The direct children of a dataclass that are dataclasses themselves."""
    hints = type_hints(schema)
    return {
        name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)
    }


def describe(hint: object) -> str:
    """A type in words: ``a whole number or auto``."""
    return "keys of your own" if hint is Args else keyword_types.describe(hint)


def choices(hint: object) -> tuple[str, ...]:
    """The words that a type takes: of a Literal, of a switch, null.

    >>> choices(Literal["auto"] | bool | None)
    ('auto', 'true', 'false', 'null')
    """
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return tuple(word for option in get_args(hint) for word in choices(option))
    if get_origin(hint) is Literal:
        return tuple(map(str, get_args(hint)))
    return {bool: ("true", "false"), NoneType: ("null",)}.get(hint, ())


def spell(value: object) -> str:
    """A value as the command line spells it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(spell(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{spell(item)}" for name, item in value.items()) + "}"
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in str(value))


def typed(path: str, value: object) -> str:
    """``path=value`` as it is pasted into a shell: texts quoted for Hydra, and that for the shell.

    >>> print(typed("pp", 4), typed("checkpoint", "my runs/a.ckpt"), typed("user.cost", "5 $"))
    pp=4 "checkpoint='my runs/a.ckpt'" 'user.cost="5 $"'
    """
    text = shorten(value, 1000)  # a path in advice is whole
    if not isinstance(value, str) or _PLAIN.fullmatch(text):
        return f"{path}={text}"
    if not {*text} & {*"'\"$`\\!"}:
        return f"\"{path}='{text}'\""
    if not {*text} & {*"'\""} and not text.endswith("\\"):
        return f"'{path}=\"{text}\"'"
    if not {*text} & {*'"$`\\!'}:
        return f'"{path}=\\"{text}\\""'
    inner = _CLOSING.sub(lambda found: 2 * found[1] + found[2].replace("'", "\\'"), text)
    return shlex.quote(f"{path}='{inner}'")


# What Hydra reads without quotes, and backslashes before a quote, which it wants doubled.
_PLAIN = re.compile(r"[\w./%+@:-]+", re.ASCII)
_CLOSING = re.compile(r"(\\*)('|$)")


def require_name(key: str, name: str) -> None:
    """Refuses what cannot be the name of a file anywhere, so that nobody need look there.

    ``key``: as it is typed in front of the name: ``data.path=``, ``--config-dir``.

    Raises:
        PlanError: ``~somebody`` of whom this machine knows no home, or a null byte.
    """
    if "\0" in name:
        raise PlanError(
            f"{key}{shorten(name)}: a null byte is in no file's name. Try {key}/path/to/it."
        )
    try:
        Path(name).expanduser()
    except RuntimeError:
        raise PlanError(
            f"{key}{shorten(name)}: this machine knows no home of {shorten(name.split('/')[0])}. "
            f"Try {key}/path/to/it."
        ) from None


def shorten(value: object, limit: int = 80) -> str:
    """A value in one line of a message, spelt and cut."""
    text = spell(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


@cache
def _type_hints(schema: type) -> dict[str, Any]:
    return get_type_hints(schema)


@cache
def _keys_of(schema: type, prefix: str) -> tuple[Key, ...]:
    return tuple(_walk(schema, prefix))


def _walk(schema: type, prefix: str) -> Iterator[Key]:
    hints = type_hints(schema)
    for entry in fields(schema):
        path = f"{prefix}{entry.name}"
        if is_dataclass(hints[entry.name]):
            yield from keys_of(hints[entry.name], f"{path}.")
            continue
        assert entry.default is not MISSING, f"{path} has no default"
        yield Key(
            path=path,
            hint=hints[entry.name],
            default=entry.default,
            help_text=entry.metadata["help"],
            low=entry.metadata["low"],
            above=entry.metadata["above"],
            high=entry.metadata["high"],
            example=entry.metadata["example"],
            unit=entry.metadata["unit"],
        )
