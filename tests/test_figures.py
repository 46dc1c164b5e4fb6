"""A figure of the tree is slower than a commit's, equal to it, or there are too few to tell."""

from __future__ import annotations

import re
import sys

import pytest

from tools import figures
from tools.figures import CONTROL, ROOT, Line, main, table

BASE = (1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0)


@pytest.mark.parametrize(
    ("name", "tree", "slower"),
    [
        ("twice as slow", [2 * value for value in BASE], True),
        ("twice as quick", [value / 2 for value in BASE], False),
        ("5 % more, and the quartiles overlap", [1.05 * value for value in BASE], False),
        ("apart, but by 2 %", [1.02] * 7, False),
        ("six pairs", [2.0] * 6, None),
        (f"torch{CONTROL}", [2 * value for value in BASE], None),
    ],
)
def test_slower_is_what_lies_apart_by_more_than_three_percent(name, tree, slower):
    base = [1.0] * 7 if name.startswith("apart") else BASE
    line = Line(name, tuple(base[: len(tree)]), tuple(tree))
    assert line.slower is slower
    words = {True: "slower", False: "", None: "no verdict"}
    assert table([line]).endswith(f"| {words[slower]} |")


def compared(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    if not (ROOT / ".git").exists():
        pytest.skip("no commits here")
    monkeypatch.setattr(sys, "argv", ["figures", *words.split()])
    assert main() == 0
    return capsys.readouterr().out


@pytest.mark.full  # Every day: `make bench-smoke`.
def test_a_commit_and_the_tree_are_measured_in_turns(monkeypatch, capsys):
    out = compared("HEAD --pairs 1 --only refusal", monkeypatch, capsys)
    number = r"[\d.]+ \([\d.]+ - [\d.]+\)"
    assert re.search(rf"\n\| a refusal, CPU s \| {number} \| {number} \| [\d.]+ \| no ver", out)


@pytest.mark.full
@pytest.mark.parametrize("only", [name for name in figures.MEASURES if name != "refusal"])
def test_every_figure_is_measured(only, monkeypatch, capsys):
    assert compared(f"HEAD --pairs 1 --only {only}", monkeypatch, capsys).count("verdict") >= 1


def test_a_commit_that_is_none_ends_at_once(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["figures", "no-such-commit"])
    with pytest.raises(SystemExit, match="BASE=no-such-commit: "):
        main()


def test_a_command_that_fails_is_no_figure():
    with pytest.raises(SystemExit, match=r"ended with 2 instead of 0:\nerror: "):
        figures.run(figures.Measure("launcher schedle=1f1b", lambda ended: {}), ROOT)
