"""What reaches a terminal is text: it obeys nothing, claims nothing, and ends."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest

from launcher.processes.failure import failure_file, write_failure
from launcher.processes.progress import ProgressView
from launcher.terminal import LastingStream, complain, say, say_error, shortened
from tests.launcher.command_line import launch_here

NASTY = "a\x1b]0;owned\x07\x1b[2Jb\u202egnp.exe\r\x9b31m\u061c\U000e0041\udcff"
SHOWN = "a\\x1b]0;owned\\x07\\x1b[2Jb\\u202egnp.exe\\r\\x9b31m\\u061c\\U000e0041\\udcff"


@pytest.mark.parametrize("tell", [say, complain])
def test_control_characters_are_written_out(tell, capsys):
    tell(f"{NASTY}\n  second line\tafter a tab\n")
    output, errors = capsys.readouterr()
    assert output + errors == f"{SHOWN}\n  second line\tafter a tab\n"


def test_a_line_break_in_a_name_is_no_line_of_ours(capsys):
    say_error("no such file: x\nerror: all is well\n  warning: believe it\nsee above")
    shown = "error: no such file: x\\nerror: all is well\\n  warning: believe it\nsee above\n"
    assert capsys.readouterr().err == shown


def test_long_texts_are_cut_in_the_middle(tmp_path):
    assert shortened("abcdef", 6) == "abcdef"
    text = shortened("a" * 6000 + "b" * 6000, 4000)
    assert text.startswith("a" * 3000 + " ... [8,000 characters left out] ... b")
    (tmp_path / "logs").mkdir()
    write_failure(tmp_path, 0, ValueError("x" * 5_000_000))
    assert failure_file(tmp_path, 0).stat().st_size < 5000
    assert len(json.loads(failure_file(tmp_path, 0).read_text())["message"]) < 4100


def test_a_note_beside_the_bar_is_text_and_no_markup(monkeypatch):
    shown = io.StringIO()
    shown.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", shown)
    with ProgressView(enabled=True, total=3) as view:
        view({"kind": "note", "text": f"[/bold] {NASTY}"})
    assert f"[/bold] {SHOWN}" in shown.getvalue().replace("\n", "")


@pytest.mark.parametrize(
    "word",
    [
        f"data=text data.path='/x/{NASTY}'", f"mode=eval checkpoint='/x/{NASTY}'",
        f"trainer.resume='/x/{NASTY}'", f"costs=profiled costs.file='/x/{NASTY}'",
        f"schedule=custom schedule.file='{NASTY}'", f"model=hf model.path='/{NASTY}'",
        f"'{NASTY}=1'", f"experiment_name='{NASTY}'",
    ],
    ids=["data", "checkpoint", "resume", "costs", "schedule", "hf", "key", "name"],
)  # fmt: skip
def test_names_in_messages_cannot_reach_the_terminal(word, tmp_path):
    words = [part.strip("'") for part in word.replace("='", "=").split("' ")]
    words = [w for part in words for w in (part.split(" ", 1) if "=" in part[:12] else [part])]
    done = launch_here(words, tmp_path)
    assert done.code == 2
    assert not set(done.errors) & {"\x1b", "\x07", "\u202e", "\r", "\x9b"}


def test_words_that_nobody_can_have_end_nothing(capsys, monkeypatch):
    with open("/dev/full", "w") as full:
        stream = LastingStream(full, told=True)
        for _ in range(3):
            assert stream.write("x" * 100_000) == 100_000
            stream.flush()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("warning: standard output cannot be written: No space left on device")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as left:
        stream = LastingStream(left, told=True)
        stream.write("gone")
        stream.flush()
        assert not stream.isatty()
    nothing = LastingStream(None)
    nothing.write("x")
    nothing.flush()
    assert not nothing.isatty()
    assert capsys.readouterr().err == ""
