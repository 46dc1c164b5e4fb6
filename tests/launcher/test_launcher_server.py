"""A launcher that is forked for a test is what a launcher that was started would be."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.launcher.runs import Finished, launch
from tests.ranks.launcher_server import run_forked, serves
from tests.ranks.rank_server import REPOSITORY, VARIABLES, variables

# Code of a user's own, which tells of the process that it runs in.
ORDER = """
import os, sys, warnings

print(sys.argv[1:], sys.path[0], os.getcwd(), os.environ["HOME"], sys.stdout.encoding)
print(sorted(os.environ), sys.warnoptions, sys.flags, "torch" in sys.modules, sys.orig_argv[1:])
print(sys.stdin.read(), sys.modules["__main__"].__spec__.name, os.umask(0o077), file=sys.stderr)

def order(shape):
    warnings.warn("a warning is an error")
"""


@pytest.mark.parametrize(
    "words",
    [
        ["mode=simulate", "schedule=custom", "schedule.path=mine:order", "pp=2"],
        pytest.param(["pp=0"], marks=pytest.mark.full),
        pytest.param(["--cfg=job", "pp=3"], marks=pytest.mark.full),
    ],
    ids=["own code", "refused", "shown"],
)
def test_it_says_and_ends_with_what_a_started_one_does(words, tmp_path):
    def said(folder: str, *, fresh: bool) -> Finished:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(ORDER)
        return launch(words, tmp_path / folder, fresh=fresh)

    forked, started = said("a", fresh=False), said("b", fresh=True)

    def alike(text: str) -> str:
        return text.replace(str(tmp_path / "b"), str(tmp_path / "a"))

    assert (forked.code, forked.output, forked.errors) == (
        started.code,
        alike(started.output),
        alike(started.errors),
    )
    assert started.output + started.errors


def test_one_that_goes_on_is_killed_in_the_end(tmp_path):
    (tmp_path / "mine.py").write_text("import time\ntime.sleep(1000)\n")
    words = ["mode=simulate", "schedule=custom", "schedule.path=mine:order", "pp=2"]
    with pytest.raises(subprocess.TimeoutExpired):
        run_forked(words, tmp_path, VARIABLES | {"HOME": str(tmp_path)}, timeout_s=0.3)


def test_what_is_read_while_python_starts_asks_for_a_process_of_its_own():
    assert serves(VARIABLES | {"HOME": "/elsewhere", "WANDB_MODE": "offline"})
    assert not serves(VARIABLES | {"PYTHONWARNINGS": "ignore"})
    assert not serves(VARIABLES | {"LC_ALL": "C"})


def test_packages_that_are_found_by_python_path_are_found_by_processes_of_the_tests(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/wheels")
    assert variables()["PYTHONPATH"].split(os.pathsep) == [str(REPOSITORY), "/wheels"]
