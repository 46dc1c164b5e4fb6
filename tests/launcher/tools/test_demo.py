"""``python -m launcher demo``: what is shown, and what is started."""

from __future__ import annotations

import webbrowser

import pytest

from launcher.tools import demo
from tests.launcher.command_line import run_here
from tests.launcher.runs import MODEL, launch


@pytest.fixture
def shown(tmp_path, monkeypatch, capsys):
    """Runs it with a recorder in place of the training; the words of that, and what is printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def show(*words, code=0):
        calls = []
        assert demo.run(words, lambda given: calls.append(list(given)) or code) == code
        return calls, capsys.readouterr().out

    return show


def test_three_schedules_are_drawn_one_is_trained_and_the_picture_is_named(shown, tmp_path):
    (words,), text = shown()
    assert words[:3] == ["schedule=zb_h1", "pp=2", "trainer.max_steps=40"]
    assert "gpipe: 15 F, 20.0 % idle, 4 microbatches held\nrank 0 | 0F0 0F1 0F2 0F3" in text
    assert "1f1b: 15 F, 20.0 % idle, 2 microbatches held" in text
    assert "zb_h1: 13 F, 7.7 % idle, 2 microbatches held" in text
    drawn = text.partition("2. One of them")[0]
    assert max(map(len, drawn.splitlines())) <= 80
    folder = words[-1].removeprefix("hydra.run.dir=")
    assert f"{(tmp_path / folder / 'timeline.html').as_uri()}\n" in text


def test_words_replace_its_own_and_go_to_the_training(shown, tmp_path):
    (words,), text = shown("trainer.max_steps=2", "pp=1", "hydra.run.dir=here")
    assert words == ["schedule=zb_h1", "experiment_name=demo", "trainer.max_steps=2", "pp=1",
                     "hydra.run.dir=here"]  # fmt: skip
    assert (tmp_path / "here" / "timeline.html").as_uri() in text


def test_a_picture_is_opened_only_where_that_is_asked_for(shown, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    shown()
    assert opened == []
    (words,), _ = shown("--open")
    assert "--open" not in words
    assert [page.startswith("file:///") for page in opened] == [True]


def test_a_training_that_fails_has_no_picture(shown):
    _, text = shown(code=2)
    assert "\n2. One of them" in text
    assert "\n3. " not in text
    assert "file:///" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "--opne"], "--opne is not a flag of demo. Try --open"),
        (["pp=2", "demo"], "demo stands first. Try python -m launcher demo."),
    ],
)
def test_wrong_words_are_refused(words, message, tmp_path, monkeypatch):
    done = run_here(words, tmp_path, monkeypatch)
    done.assert_refused()
    assert message in done.errors


def test_its_help_says_what_it_does(tmp_path, monkeypatch):
    done = run_here(["demo", "--help"], tmp_path, monkeypatch)
    assert done.code == 0
    assert done.output.startswith("python -m launcher demo: three schedules simulated")


@pytest.mark.distributed
@pytest.mark.full
def test_it_trains(tmp_path):
    done = launch(["demo", *MODEL, "trainer.max_steps=2"], tmp_path).assert_done()
    assert "trained tiny (12,112 parameters): 2 steps" in done.output
    (page,) = tmp_path.glob("outputs/*/*_demo/timeline.html")
    assert page.as_uri() in done.output
