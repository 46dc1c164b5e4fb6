"""Wrong configurations, made from right ones: on the command line and in YAML files; seeded."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.compose.option_groups import conf_dir, find_groups
from launcher.config import LaunchConfig
from launcher.config.key import keys_of

VALUES = [
    "", "null", "true", "-1", "0", "2", "1e9", "-0.5", "1e400", "nan", "inf", "-.inf", "four",
    "auto", "[]", "[1,2]", "[1,", "{a: 1}", "{", "}", "'", '"', "${pp}", "${nope}", "${", "$",
    "a,b", "1,2", "range(1,3)", "interval(0,1)", "glob(*)", "???", "\\", "\x00", "\u00e9", "\u202e",
    "\U0001f600", "\ufeff", "a b", "../x", "0x10", "1_000", "!!int 3", "!!binary x", "*a", "&a 1",
    "@x", "=", ":", "9" * 400, "x" * 3000, "2026-01-01", "1:30", "~", "<<", "? a",
]  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One request.

    ``files`` maps paths below the folder of ``--config-dir`` to bytes.
    """

    words: list[str]
    files: dict[str, bytes]


def mutations(count: int, *, seed: int) -> list[Mutation]:
    """The same for the same seed."""
    draw = random.Random(seed)
    return [_words(draw) if draw.random() < 0.4 else _file(draw) for _ in range(count)]


def _words(draw: random.Random) -> Mutation:
    keys = [entry.path for entry in keys_of(LaunchConfig)]
    keys += [*find_groups(None).names(), "hydra.run.dir", "hydra.verbose"]
    words = []
    for _ in range(draw.randint(1, 3)):
        name = _misspelt(draw, draw.choice(keys)) if draw.random() < 0.5 else draw.choice(keys)
        prefix = draw.choice(["", "", "", "", "+", "++", "~", "-", "@", " "])
        words.append(f"{prefix}{name}{draw.choice(['=', '=', '=', ''])}{draw.choice(VALUES)}")
    return Mutation(words if draw.random() < 0.8 else ["-m", *words], {})


def _file(draw: random.Random) -> Mutation:
    group = draw.choice(["model", "trainer", "schedule", "data", "optimizer", "hardware"])
    sources = sorted((conf_dir() / group).glob("*.yaml"))
    lines = draw.choice(sources).read_text().splitlines()
    for _ in range(draw.randint(0, 3)):
        lines = draw.choice(_EDITS)(draw, lines)
    content = "\n".join(lines).encode("utf-8", "surrogatepass")
    if draw.random() < 0.1:
        at = draw.randrange(len(content) + 1)
        content = content[:at] + bytes([draw.randrange(256)]) + content[at:]
    return Mutation([f"{group}=mutated"], {f"{group}/mutated.yaml": content})


def _misspelt(draw: random.Random, name: str) -> str:
    at = draw.randrange(len(name) + 1)
    edit = draw.choice([".", "/", "@", "x", "", "[0]", "_", "\u00e9"])
    return name[:at] + edit + name[at + draw.randint(0, 2) :]


def _value(draw: random.Random, lines: list[str]) -> list[str]:
    return _changed(draw, lines, lambda key, _: f"{key}: {draw.choice(VALUES)}")


def _key(draw: random.Random, lines: list[str]) -> list[str]:
    return _changed(draw, lines, lambda key, rest: f"{_misspelt(draw, key)}:{rest}")


def _twice(draw: random.Random, lines: list[str]) -> list[str]:
    return [*lines, draw.choice(lines)] if lines else lines


def _indent(draw: random.Random, lines: list[str]) -> list[str]:
    at = draw.randrange(len(lines)) if lines else 0
    return [*lines[:at], *(draw.choice(["  ", "\t", " - "]) + line for line in lines[at : at + 1]),
            *lines[at + 1 :]]  # fmt: skip


def _noise(draw: random.Random, lines: list[str]) -> list[str]:
    at = draw.randrange(len(lines) + 1)
    noise = ["---", "...", "%YAML 9.9", "- a", "a: [", "{", "# @package hydra",
             "# @package _global_", "defaults: [nope]", "? {a: b}", "_target_: os.system",
             "x" * 70_000, "\x00", "\ufffe", "!!set {a}", "a: !!python/tuple [1]"]  # fmt: skip
    return [*lines[:at], draw.choice(noise), *lines[at:]]


def _bomb(draw: random.Random, lines: list[str]) -> list[str]:
    width, depth = draw.choice([(9, 5), (3, 9), (40, 3), (2, 16)])
    bomb = [f"a0: &a0 [{','.join('1' * width)}]"]
    bomb += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * width)}]" for n in range(1, depth)]
    return [*lines, *bomb]


def _deep(draw: random.Random, lines: list[str]) -> list[str]:
    depth = draw.choice([30, 500, 5000])
    return [*lines, "deep: " + "[" * depth + "]" * depth]


def _changed(draw: random.Random, lines: list[str], change: Callable[[str, str], str]) -> list[str]:
    places = [number for number, line in enumerate(lines) if ":" in line and line[:1] != "#"]
    if not places:
        return lines
    at = draw.choice(places)
    key, _, rest = lines[at].partition(":")
    return [*lines[:at], change(key, rest), *lines[at + 1 :]]


_EDITS = [_value, _value, _value, _key, _key, _twice, _indent, _noise, _bomb, _deep]


def write(mutation: Mutation, folder: Path) -> list[str]:
    """Writes the files below a folder; returns the whole command line."""
    for name, content in mutation.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    given = ["--config-dir", str(folder)] if mutation.files else []
    return [*given, *mutation.words, "mode=simulate"]
