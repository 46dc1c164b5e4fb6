"""What a page tells its reader to do: files to write and commands to type, in the page's order.

A fenced block with ``title="path"`` is a file. A command is a line of an indented block, or of a
fenced one without a language or in a shell's, that begins with a program's name; lines that end
with a backslash go on. A fenced block in the language ``output`` is what the command before it
prints; everything else in blocks only looks like it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = (
    "apptainer", "cat", "cd", "cp", "curl", "docker", "foldpipe", "git", "make", "mkdir", "mv",
    "pip", "python", "rm", "salloc", "sbatch", "scancel", "squeue", "srun", "tensorboard",
    "torchrun", "wandb",
)  # fmt: skip
_SHELLS = ("", "bash", "console", "sh", "shell")
_FENCE = re.compile(r"^( *)(`{3,})\s*\{?\s*\.?([\w+-]*)([^\n]*)$")
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True, slots=True)
class File:
    """To be written into the reader's folder."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """To be typed, on one line; ``place`` is PAGE:LINE."""

    text: str
    place: str

    @property
    def words(self) -> list[str]:
        """Without variables in front of it, and without a comment behind it."""
        return [*shlex.split(_bare(self.text), comments=True)]

    @property
    def launcher(self) -> list[str] | None:
        """What is typed behind ``python -m launcher``; None for other programs."""
        words = self.words
        if words[:3] == ["python", "-m", "launcher"]:
            return words[3:]
        return words[1:] if words[:1] == ["foldpipe"] else None


@dataclass(frozen=True, slots=True)
class Output:
    """What the command before it prints; ``...`` stands for lines, or for the rest of a line."""

    lines: tuple[str, ...]
    place: str


def steps(page: Path, root: Path) -> list[File | Command]:
    """Of one page."""
    return [step for step in shown_steps(page, root) if not isinstance(step, Output)]


def shown_steps(page: Path, root: Path) -> list[File | Command | Output]:
    """Of one page, with what it says is printed."""
    return list(_steps(page.read_text(encoding="utf-8"), page.relative_to(root).as_posix()))


def _steps(text: str, name: str) -> Iterator[File | Command | Output]:
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if fence:
            end = next(
                (n for n in range(number + 1, len(lines)) if lines[n].strip() == fence[2]),
                len(lines),
            )
            body = [line.removeprefix(fence[1]) for line in lines[number + 1 : end]]
            title = _TITLE.search(fence[4])
            if title:
                yield File(title[1], "\n".join(body) + "\n")
            elif fence[3] == "output":
                yield Output(tuple(line.rstrip() for line in body), f"{name}:{number + 1}")
            elif fence[3] in _SHELLS:
                yield from _commands(body, name, number + 2)
            number = end + 1
            continue
        if lines[number].startswith("    ") and _opens(lines, number):
            end = next(
                (
                    n
                    for n in range(number, len(lines))
                    if lines[n].strip() and not lines[n].startswith("    ")
                ),
                len(lines),
            )
            yield from _commands([line[4:] for line in lines[number:end]], name, number + 1)
            number = end
            continue
        number += 1


def _opens(lines: list[str], number: int) -> bool:
    """An indented block needs a blank line before it, and no list that it would belong to."""
    before = [line for line in lines[:number] if line.strip()]
    return lines[number - 1].strip() == "" and not re.match(r"\s*([-*]|\d+\.) ", before[-1])


def _commands(body: list[str], name: str, first: int) -> Iterator[Command]:
    number = 0
    while number < len(body):
        line, start = body[number].strip().removeprefix("$ "), number
        while line.endswith("\\") and number + 1 < len(body):
            number += 1
            line = line[:-1].rstrip() + " " + body[number].strip()
        number += 1
        if (_bare(line).split() or [""])[0] in PROGRAMS:
            yield Command(line, f"{name}:{first + start}")


def _bare(line: str) -> str:
    """``A=1 time python ...`` is python."""
    while re.match(r"([A-Z_]+=\S*|time|chrt -r 10|nice -n \d+)\s+", line):
        line = re.sub(r"^([A-Z_]+=\S*|time|chrt -r 10|nice -n \d+)\s+", "", line)
    return line
