"""``python -m launcher init``: a project that trains at once, and nothing overwritten."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.tools import project
from strategies.errors import PlanError
from tests.launcher.command_line import run_here
from tests.launcher.runs import environment, launch

FILES = {
    ".gitignore", "README.md", "conf/experiment/first.yaml", "conftest.py", "net.py", "spirals.py",
    "tests/test_net.py",
}  # fmt: skip
FIRST = ["--config-dir", "conf", "experiment=first"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init") / "my-nets"
    project.run([str(folder)])
    return folder


def test_its_files_are_there_under_its_name(made):
    files = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    assert files == FILES
    assert (made / "README.md").read_text().startswith("# my-nets\n")
    for path in made.rglob("*.py"):
        ast.parse(path.read_text())


def test_its_python_is_formatted_and_linted_as_this_project_is(made):
    for words in (["format", "--check"], ["check", "--select=E,F,I,B,UP"]):
        command = [sys.executable, "-m", "ruff", *words, "--line-length=100", "--isolated", "."]
        done = subprocess.run(command, cwd=made, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_the_first_command_is_one_that_the_launcher_takes(made, tmp_path, monkeypatch):
    words = [*FIRST, "model.args.width=32", f"hydra.run.dir={tmp_path / 'run'}"]
    done = run_here(words, made, monkeypatch)
    assert (done.code, done.errors) == (0, "")
    (call,) = done.calls
    assert (call.config.model.path, call.config.pp) == ("net:Net", 2)
    assert call.config.model.args["width"] == 32


def test_others_may_read_it_as_the_user_has_it(tmp_path, monkeypatch):
    before = os.umask(0o022)
    try:
        done = run_here(["init", "mine"], tmp_path, monkeypatch)
    finally:
        os.umask(before)
    assert (done.code, done.errors) == (0, "")
    assert done.output.splitlines()[1:] == [
        "train it:  cd mine",
        "           python -m launcher --config-dir conf experiment=first",
    ]
    assert (tmp_path / "mine" / "net.py").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "init: expected one folder. Try python -m launcher init my_project."),
        (["a", "b"], "expected one folder"),
        (["name=mine"], "expected one folder"),
        (["--force"], "expected one folder"),
        (["a b"], "letters, digits"),
        (["full"], "the folder is not empty (kept.txt), and nothing in it is overwritten"),
        (["full/kept.txt"], "there is a file of that name"),
        (["full/kept.txt/new"], "Not a directory"),
    ],
)
def test_a_place_that_is_taken_is_refused(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept.txt").write_text("mine")
    with pytest.raises(PlanError) as refused:
        project.run(words)
    assert message in str(refused.value)
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "kept.txt"]
    assert (tmp_path / "full" / "kept.txt").read_text() == "mine"


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "new").mkdir()
    assert project.run([str(tmp_path / "new")]) == 0


@pytest.mark.distributed
@pytest.mark.full
def test_it_trains_with_its_first_command_and_its_tests_pass(made):
    done = launch([*FIRST, "trainer.max_steps=4"], made).assert_done()
    assert "trained net:Net" in done.output
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=made,
        env=environment(made),
        capture_output=True,
        text=True,
    )
    assert "2 passed" in tested.stdout, tested.stdout
