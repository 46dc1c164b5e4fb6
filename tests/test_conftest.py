"""`make test`: two files at a time; then, in two groups, those that start several themselves.

And each test leaves the process as it found it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
FIXTURES = CONFTEST.parent / "ranks" / "fixtures.py"
TORCH = "from types import SimpleNamespace\ncuda = SimpleNamespace(is_available=lambda: True)\n"
NOTE = """
import os
import pytest

{mark}
@pytest.mark.parametrize("number", range(3))
def test_it({more}number):
    with open("order.txt", "a") as order:
        order.write(f"{name} {{os.environ['PYTEST_XDIST_WORKER']}}\\n")
    assert "{name}" != "several_a" or number != 1
"""
# Two files that each wait until the other runs, too.
MEETING = """
import os
import time
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]

@pytest.mark.parametrize("number", range(3))
def test_it(number):
    with open("order.txt", "a") as order:
        order.write(f"{name} {{os.environ['PYTEST_XDIST_WORKER']}}\\n")
    until = time.monotonic() + 20
    while not all(name in open("order.txt").read() for name in ("gpu_a", "gpu_b")):
        assert time.monotonic() < until
        time.sleep(0.01)
"""


def test_files_with_several_processes_come_last_each_group_in_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    (folder / "distributed").mkdir(parents=True)
    (folder / "distributed" / "foreign").mkdir()
    (folder / "ranks").mkdir()
    shutil.copy(CONFTEST, folder)
    shutil.copy(FIXTURES, folder / "ranks")
    (tmp_path / "torch.py").write_text(TORCH)  # It sees a GPU.
    for name in ("several_a", "several_b", "single_a", "single_b", "ranks_c"):
        text = NOTE.format(
            mark="" if name.startswith("single") else "@pytest.mark.distributed",
            name=name,
            more="ranks, " if name.startswith("ranks") else "",
        )
        (folder / f"test_{name}.py").write_text(text)
    mark = {"mark": "@pytest.mark.distributed", "more": "ranks, "}
    for name in ("ranks_a", "ranks_b"):
        text = NOTE.format(name=name, **mark)
        (folder / "distributed" / f"test_{name}.py").write_text(text)
    text = NOTE.format(name="modules", **mark)
    (folder / "distributed" / "foreign" / "test_modules.py").write_text(text)
    for name in ("gpu_a", "gpu_b"):
        (folder / "distributed" / f"test_{name}.py").write_text(MEETING.format(name=name))
    # Also where this very test runs in one of two processes.
    outside = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    outside["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # Those installed here take seconds to import.
    options = ["-p", "xdist.plugin", "-p", "no:cacheprovider", "-n", "2"]
    options += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests"],
        cwd=tmp_path,
        env=outside,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED tests/test_several_a.py::test_it[1] - " in done.stdout
    assert "= 1 failed, 29 passed in " in done.stdout.splitlines()[-1]
    told = [line.split() for line in (tmp_path / "order.txt").read_text().splitlines()]
    assert len({worker for name, worker in told if name.startswith("single")}) == 2
    assert len({worker for name, worker in told if name.startswith("several")}) == 1
    several = [name for name, _ in told if name.startswith("several")]
    assert several == ["several_a"] * 3 + ["several_b"] * 3
    # File by file: on a GPU's machine there are cores for both.
    assert len({worker for name, worker in told if name.startswith("gpu")}) == 2
    ranks = {name: worker for name, worker in told if name.startswith("ranks")}
    assert list(ranks) == ["ranks_a", "ranks_b", "ranks_c"]
    assert len(set(ranks.values())) == 1
    assert [name for name, _ in told].index("modules") >= 9  # behind a group, and what is in none


@pytest.fixture(scope="module")
def found() -> Iterator[list[Any]]:
    yield [_state()]


def _state() -> tuple[Any, ...]:
    umask = os.umask(0o022)
    os.umask(umask)
    # Which test runs is in a variable, too.
    variables = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    return variables, list(sys.path), Path.cwd(), umask, signal.getsignal(signal.SIGUSR2)


def test_a_careless_test(found: list[Any], tmp_path: Path) -> None:
    os.environ.pop("HOME")
    os.environ.update(PATH="/nowhere", MPLCONFIGDIR="/nowhere")
    sys.path.insert(0, "/nowhere")
    os.chdir(tmp_path)
    os.umask(0o011)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    assert all(a != b for a, b in zip(_state(), found[0], strict=True))


def test_changes_nothing_for_the_one_behind_it(found: list[Any]) -> None:
    assert _state() == found[0]
