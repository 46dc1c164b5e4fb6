"""What all tests share: golden files, skips for missing machinery, Hypothesis profiles, order.

And a process that each test leaves as it found it.
"""

from __future__ import annotations

import difflib
import functools
import gc
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

GOLDEN = Path(__file__).parent / "golden"
SLURM_DAEMONS = ("slurmctld", "slurmd", "munged")
SEVERAL_PROCESSES = re.compile(r"\bmark\.(distributed|faults|gpu|slurm)\b")
ON_A_GPU = re.compile(r"^pytestmark = .*\bmark\.gpu\b", re.MULTILINE)
FOREIGN = "distributed/foreign/"
ON_RANKS = re.compile(r"^from tests\.distributed\.", re.MULTILINE)

# No deadline: on a shared machine it would assert a timing. The everyday profile draws the same
# examples each time; `make test-all` looks further and at random.
hypothesis.settings.register_profile("everyday", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.register_profile("full", deadline=None, max_examples=500)
hypothesis.settings.load_profile("everyday")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden",
        action="store_true",
        help="run only the tests with golden files, and rewrite those files",
    )


@functools.cache
def _fills_the_cores(file: Path) -> bool:
    """Whether a test in this file starts several processes, as its markers say."""
    return SEVERAL_PROCESSES.search(file.read_text(encoding="utf-8")) is not None


@functools.cache
def _is_on_a_gpu(file: Path) -> bool:
    """Whether all of its tests need a GPU, and so a machine with cores for several files."""
    return ON_A_GPU.search(file.read_text(encoding="utf-8")) is not None


def _is_on_ranks(file: str, root: Path) -> bool:
    """Whether its tests run on the ranks that those of ``tests/distributed`` share."""
    text = (root / file).read_text(encoding="utf-8")
    return file.startswith("tests/distributed/") or ON_RANKS.search(text) is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """`pytest -n 2`: two files at a time; then those that start several processes, in two lots.

    Whole files, because all that is known of a test here is its name. One process for each lot
    (what runs on ranks of the tests, and what is launched), because what it starts for several
    files (ranks, a trained run) is started once per process. At last modules of others, file by
    file: so both are ready at about the same time. What needs a GPU goes file by file, too.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            path = config.rootpath / file
            if not _fills_the_cores(path) or _is_on_a_gpu(path):
                return file
            if not _is_on_ranks(file, config.rootpath):
                return "launched"
            return file if FOREIGN in file else "on ranks"

    config.option.loadscopereorder = False  # In the order of collection, see below.
    return Scheduling(config, log)


def pytest_make_parametrize_id(val: object) -> str | None:
    # The two processes of `-n 2` must give each test one name, whatever second it was collected in.
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # One of several processes that run tests.
        items.sort(key=lambda item: (_fills_the_cores(item.path), FOREIGN in item.nodeid))
    if config.getoption("--golden"):
        keep = [item for item in items if "golden" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in keep])
        items[:] = keep


def pytest_collection_finish() -> None:
    # What collecting has left stays to the end: walking all of it again and again for cycles took
    # a sixth of the seconds of whatever runs in this process.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch  # only here: collecting torch-free tests must stay quick

        if not torch.cuda.is_available():
            pytest.skip("torch sees no GPU on this machine")
    if item.get_closest_marker("slurm"):
        missing = [name for name in SLURM_DAEMONS if shutil.which(name) is None]
        if missing:
            pytest.skip(f"not installed on this machine: {' '.join(missing)}")


# Not SIGCHLD: torch sets its handler once per process, and notices dead loaders by it.
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def process_left_as_found() -> Iterator[None]:
    """The variables, folder, paths, umask and signal handlers of this process are put back.

    Set up before all others of a test, so it sees what their ends have left. It is silent, since
    libraries set variables where they are imported first. Of wider fixtures it knows nothing.
    """
    variables, paths, folder = dict(os.environ), list(sys.path), Path.cwd()
    umask = os.umask(0o077)
    os.umask(umask)
    handlers = {number: signal.getsignal(number) for number in _ASKING}
    yield
    if os.environ != variables:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
    sys.path[:] = paths
    os.chdir(folder)
    os.umask(umask)
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares the whole text with `tests/golden/<name>.txt`.

    A name may hold folders (`"schedules/zb_v"`). `make golden` writes the files; nothing else does.
    """

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        # Files end with a newline, so that editors and git leave them alone.
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="ascii", newline="\n")
            return
        if not path.is_file():
            pytest.fail(f"tests/golden/{name}.txt does not exist: write it with `make golden`")
        expected = path.read_text(encoding="ascii")
        if text != expected:
            diff = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), path.name, "produced now", lineterm=""
            )
            pytest.fail(
                "\n".join(diff) + "\nIf this is what you meant: `make golden`.", pytrace=False
            )

    return compare
