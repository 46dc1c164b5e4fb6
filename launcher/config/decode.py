"""Plain nested values to a typed ``LaunchConfig`` and back, exactly.

The one door through which configuration enters: Hydra's result goes through it, and so does the
JSON that worker processes read. Unknown keys cannot pass, however they were written (``+key=``, a
user's YAML), and a value is never bent into another type except where nothing is lost (4 for 4.0).
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher, get_close_matches
from importlib.metadata import entry_points
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from launcher.config.foreign_words import OTHER_SCALES, meant_key, meant_value
from launcher.config.key import (
    Args,
    Key,
    choices,
    describe,
    is_free,
    keys_of,
    nodes_of,
    shorten,
    spell,
    type_hints,
)
from launcher.config.key import typed as spelt
from launcher.config.launch import LaunchConfig
from strategies.errors import PlanError
from strategies.keyword_types import MISMATCH, convert

Schema = TypeVar("Schema")


class KeyPlaceError(PlanError):
    """An unknown key or a value of the wrong type, with the place in the tree.

    Attributes:
        path: Names from the top of the decoded tree to the key.
    """

    def __init__(self, reason: str, path: str, *, fix: str = "") -> None:
        super().__init__(reason, fix=fix)
        self.path = tuple(path.split("."))


def from_dict(values: Mapping[str, Any]) -> LaunchConfig:
    """Types a nested mapping; missing keys take their defaults.

    Raises:
        PlanError: A key that does not exist, or a value of another type.
    """
    return decode(values, LaunchConfig)


def dump(config: LaunchConfig) -> dict[str, Any]:
    """The configuration as JSON-ready values; ``from_dict(dump(c)) == c``."""
    plain = _plain(config)
    assert isinstance(plain, dict)
    return plain


def decode(values: Mapping[str, Any], schema: type[Schema], prefix: str = "") -> Schema:
    """Types the mapping of one node.

    ``prefix``: dotted path of the node with a trailing dot, empty at the top.

    Raises:
        PlanError: As ``from_dict``.
    """
    hints = type_hints(schema)
    for name in values:
        if name not in hints:
            raise unknown_key(f"{prefix}{name}", nested=isinstance(values[name], Mapping))
    nodes = nodes_of(schema)
    leaves = {entry.path: entry for entry in keys_of(schema, prefix)}
    typed: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if name in nodes:
            if not isinstance(value, Mapping):
                first = keys_of(nodes[name], f"{path}.")[0]
                raise KeyPlaceError(
                    f"{path}={shorten(value)}: {path} holds keys, it is not a value itself. "
                    f"Try {first.path}={spell(first.example)}.",
                    path,
                )
            typed[name] = decode(value, nodes[name], f"{path}.")
            continue
        typed[name] = _typed_value(value, hints[name], path, leaves[path])
    return schema(**typed)


def _typed_value(value: object, hint: object, path: str, entry: Key) -> object:
    typed = _convert(value, hint)
    if typed is not MISMATCH:
        return typed
    words = choices(hint)
    near = nearest(value, words) if isinstance(value, str) else ()
    kinds = {*_kinds(hint)}
    meant = meant_value(
        path,
        value,
        switch=bool in kinds,
        whole=float not in kinds,
        number=bool(kinds & {int, float}),
    )
    meant = meant or _nothing(value, hint, entry)
    if isinstance(value, str) and re.fullmatch(r"[^,;\n]+", value) and hint == tuple[str, ...]:
        near = (f"[{value.strip()}]" if re.fullmatch(r"[\w./-]+", value) else f"['{value}']",)
    hinted = meant or (near[0] if near else spell(entry.example))
    many = len(words) > _MOST_LISTED
    shown = f"'{value}'" if meant is not None and meant == value else shorten(value)
    several = _several(value) if kinds & {int, float} else None
    other = f", or -m {path}={several} for one run each" if several else ""
    wrong = f"{path}={shown}: expected {describe(hint)}"
    if many:
        wrong = f"{path}={shown} does not exist"
    if many and not (meant or near):
        raise KeyPlaceError(f"{wrong}. --help {path} lists its values. Try {path}={hinted}.", path)
    raise KeyPlaceError(f"{wrong}. Try {path}={hinted}{other}.", path)


_MOST_LISTED = 8
_NOTHING = ("none", "null", "off", "never", "no", "false", "all", "inf", "infinity", "unlimited")


def _nothing(value: object, hint: object, entry: Key) -> str | None:
    """How a key says that there is none, or no limit, where a word says so."""
    if str(value).strip().lower() not in _NOTHING or bool in _kinds(hint):
        return None
    if NoneType in get_args(hint):
        return "null"
    return "0" if entry.low == 0 and str(value).lower() in _NOTHING[:6] else None


def _several(value: object) -> str | None:
    """The values of a sweep, where one is expected.

    >>> _several([1, 2]), _several("1-3"), _several("1:8:2"), _several("{1,2}"), _several("1e-3")
    ('1,2', "'range(1,4)'", '1,8,2', '1,2', None)
    """
    if isinstance(value, Mapping) and all(item is None for item in value.values()):
        value = list(value)
    if isinstance(value, list | tuple):
        plain = [spell(item) for item in value]
        return ",".join(plain) if len(plain) > 1 and all(map(_is_number, plain)) else None
    text = str(value).strip("()[]{} ")
    if found := re.fullmatch(r"(\d+)\s*(?:-|\.\.\.?)\s*(\d+)", text):
        first, last = int(found[1]), int(found[2])
        return f"'range({first},{last + 1})'" if first < last else None
    parts = [part for part in re.split(r"[\s,;:|]+", text) if part]
    return ",".join(parts) if len(parts) > 1 and all(map(_is_number, parts)) else None


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) is not None


def unknown_key(path: str, *, nested: bool = False, value: str = "") -> KeyPlaceError:
    """``value``: what was typed for it, which the key that was meant gets where it takes it."""
    assert not is_free(path, LaunchConfig)
    known = [entry.path for entry in keys_of(LaunchConfig)]
    candidates = [*known, *nodes_of(LaunchConfig), "experiment"]
    if nested:
        candidates = list(nodes_of(LaunchConfig))
    hint = _with_value(path, meant_key(path, value), value)
    near = nearest_keys(path, candidates)
    hint = hint or did_you_mean(_given(one, value) or one for one in near)
    if path in known:  # one key of a YAML file, dots and all
        outer, _, last = path.rpartition(".")
        hint = f" A file nests its keys: write `{last}: ...` indented below `{outer}:`."
    return KeyPlaceError(f"{shorten(path)} is not a key.{hint or ' Try --help.'}", path)


_ONE_KEY = re.compile(r" Try ([\w.]+)=([^\s,]+)\.")
_PLACES = ("FOLDER", "TEXT", "IMAGE")


def _with_value(path: str, hint: str, value: str) -> str:
    """`` Try model.layers=8.`` with the user's own number."""
    found = _ONE_KEY.fullmatch(hint)
    if not value or found is None or {path, path.rpartition(".")[2]} & {*OTHER_SCALES}:
        return hint
    if found[2] in _PLACES:
        return f" Try {spelt(found[1], value)}."
    given = _given(found[1], value)
    return f" Try {given}." if given else hint


def _given(path: str, value: str) -> str | None:
    """``model.layers=8``, where the key takes that value, or each one of a sweep's list."""
    entry = next((one for one in keys_of(LaunchConfig) if one.path == path), None)
    if entry is None or not value:
        return None
    kinds = {*_kinds(entry.hint)}
    number, whole = bool(kinds & {int, float}), float not in kinds
    text = meant_value(path, value, switch=bool in kinds, whole=whole, number=number) or value
    if _fits(text, entry):
        return spelt(path, text)
    parts = value.split(",")
    return f"-m {path}={value}" if all(part and _fits(part, entry) for part in parts) else None


def _fits(text: str, entry: Key) -> bool:
    try:
        given = json.loads(text)
    except ValueError:
        given = text
    return _convert(given, entry.hint) is not MISMATCH and _inside(given, entry)


def _inside(value: object, entry: Key) -> bool:
    if not isinstance(value, int | float):
        return True
    low, above, high = entry.low, entry.above, entry.high
    return (
        (low is None or value >= low)
        and (above is None or value > above)
        and (high is None or value <= high)
    )


def _convert(value: object, hint: object) -> object:
    if hint is Args:
        return Args(value) if isinstance(value, Mapping) and _is_plain(value) else MISMATCH
    return convert(value, hint)


def _is_plain(value: object) -> bool:
    """Whether JSON can say it."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(child) for name, child in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def _kinds(hint: object) -> tuple[object, ...]:
    """The plain types that a value may have."""
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return tuple(kind for option in get_args(hint) for kind in _kinds(option))
    return (hint,) if hint in (bool, int, float, str) else ()


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.plain() if isinstance(value, Args) else value


# What somebody probably meant: the nearest valid keys and values.


def nearest(word: str, candidates: Iterable[str], *, limit: int = 3) -> tuple[str, ...]:
    """The closest candidates, best first; empty where nothing is close."""
    listed, plain = {one.lower(): one for one in candidates}, word[:200].lower()
    if plain in listed:
        return (listed[plain],)
    begun = [one for one in listed if len(plain) > 2 and one.startswith(plain)]
    found = begun[:limit] or get_close_matches(plain, listed, n=limit, cutoff=0.6)
    return tuple(listed[one] for one in found)


def nearest_keys(word: str, candidates: Iterable[str], *, limit: int = 3) -> tuple[str, ...]:
    """Like ``nearest`` for dotted keys: a wrong part may sit before or behind the dot.

    ``modle.hidden`` and plain ``hidden`` both lead to ``model.hidden``.
    """
    word = word[:200].lower()
    word_head, _, word_leaf = word.rpartition(".")
    scored = []
    for candidate in candidates:
        score = _ratio(word, candidate)
        head, _, leaf = candidate.rpartition(".")
        if word_head and word_head == head:
            # That it is the right group says nothing for any key of it.
            score = max(score, _ratio(word_leaf, leaf)) if _ratio(word_leaf, leaf) > 0.6 else 0.0
        elif word_head:
            # Each part alone, so that a short wrong leaf is not lost beside a long right head.
            score = max(score, (_ratio(word_head, head) + _ratio(word_leaf, leaf)) / 2)
        elif head:
            score = max(score, 0.95 * _ratio(word, leaf))
        if candidate == word_head:
            score = 0.0
        elif leaf == word_leaf:
            score = max(score, 0.8)  # the name is right, where it stands is not
        scored.append((score, candidate))
    scored.sort(key=lambda pair: (-pair[0], pair[1]))
    best = scored[0][0] if scored else 0.0
    least = max(0.65, best - (0.05 if best > 0.9 else 0.15))  # one letter off is no riddle
    return tuple(name for score, name in scored[:limit] if score >= least)


def did_you_mean(matches: Iterable[str]) -> str:
    """`` Did you mean a or b?``, or nothing."""
    listed = " or ".join(matches)
    return f" Did you mean {listed}?" if listed else ""


def _ratio(left: str, right: str) -> float:
    return SequenceMatcher(None, left, right).ratio()


# Names that other installed distributions offer; nothing of theirs is imported here.

# Option on the command line -> entry point group.
ENTRY_POINTS = {
    "model": "foldpipe.models",
    "data": "foldpipe.data",
    "schedule": "foldpipe.schedules",
}


# ``model=class`` and the like: code of the user's own, by the path that he types.
CLASS = "class"


def brings_own(option: str, name: str) -> bool:
    """Whether what ``model=`` or ``data=`` names is code of the user's own, or of a package."""
    return name == CLASS or name in installed_names(option)


def installed_names(option: str) -> tuple[str, ...]:
    """Names for ``model=``, ``data=`` or ``schedule=`` beyond our own, sorted."""
    return _names_on(ENTRY_POINTS[option], tuple(sys.path))


@functools.cache
def _names_on(group: str, _path: tuple[str, ...]) -> tuple[str, ...]:
    # Every installed distribution is looked at, which takes as long as reading all of conf/.
    return tuple(sorted({point.name for point in entry_points(group=group)}))
