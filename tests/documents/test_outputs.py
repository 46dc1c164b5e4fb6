"""What pages say is printed is printed: blocks in the language ``output``.

Every day of commands that start no rank, line by line. ``make test-docs`` runs the others, too,
and compares what they measure by its shape: a number for a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents.steps import Command, File, Output, shown_steps
from tests.documents.test_commands import PAGES, ROOT, is_quiet, printed_every_day, run_script
from tests.launcher.command_line import launch_here
from tests.launcher.runs import launch

_CUT = " ..."  # at the end of a line whose rest is left out
SHOWN = [page for page in PAGES if any(isinstance(s, Output) for s in shown_steps(page, ROOT))]


def _pairs(page: Path) -> Iterator[tuple[list[File], Command, Output]]:
    """The files so far, a command, and what it prints."""
    files: list[File] = []
    command: Command | None = None
    for step in shown_steps(page, ROOT):
        if isinstance(step, File):
            files.append(step)
        elif isinstance(step, Command):
            command = step
        else:
            assert command is not None, f"{step.place}: no command prints this"
            yield [*files], command, step


def _measured(line: str) -> str:
    """A line without what is another one on every machine and at every time."""
    line = re.sub(r"\d[\d,.:e+-]*", "#", line)
    return re.sub(r"[ =]+", " ", line).strip()


def missing(shown: Output, printed: str, *, measured: bool) -> str | None:
    """The first line of a block that is not printed behind those before it.

    >>> missing(Output(("a", "...", "c"), ""), "a\\nb\\nc\\n", measured=False)
    >>> missing(Output(("a", "c"), ""), "a\\nb\\nc\\n", measured=False)
    'c'
    >>> missing(Output(("a long ...",), ""), "a long line\\n", measured=False)
    """
    lines = [line.rstrip() for line in printed.splitlines()]
    if measured:
        lines = [_measured(line) for line in lines]
    at, free = 0, True
    for line in shown.lines:
        if line.strip() == "...":
            free = True
            continue
        begun = line.removesuffix(_CUT)
        wanted = _measured(begun) if measured else begun
        rest = lines[at:] if free else lines[at : at + 1]
        same = str.startswith if begun != line else str.__eq__
        found = next((n for n, each in enumerate(rest) if same(each, wanted)), None)
        if found is None:
            return line
        at, free = at + found + 1, False
    return None


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_shows_is_printed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    chosen = printed_every_day(page)
    for number, (files, command, shown) in enumerate(_pairs(page)):
        words = command.launcher
        if words is None or command.place not in chosen:
            continue
        folder = tmp_path / str(number)
        _write(files, folder)
        printed = launch_here(words, folder).assert_done().output
        absent = missing(shown, printed, measured=False)
        assert absent is None, f"{shown.place}: {command.text}\n{absent}\nis not in\n{printed}"


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_shows_of_runs_is_printed(page: Path, tmp_path: Path) -> None:
    """In the page's order and in one folder, as they are typed."""
    shown_by = {command.place: shown for _, command, shown in _pairs(page)}
    for step in shown_steps(page, ROOT):
        if isinstance(step, File):
            _write([step], tmp_path)
        elif isinstance(step, Command) and step.place in shown_by:
            words, shown = step.launcher, shown_by[step.place]
            measured = words is not None and not is_quiet(words)
            if words is None:
                printed = run_script(step.words[1], tmp_path)
            else:
                printed = launch(words, tmp_path, timeout_s=300).assert_done().output
            absent = missing(shown, printed, measured=measured)
            assert absent is None, f"{shown.place}: {step.text}\n{absent}\nis not in\n{printed}"


def _write(files: list[File], folder: Path) -> None:
    for file in files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text, encoding="utf-8")
