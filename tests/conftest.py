"""What all tests share: golden files, skips for missing machinery, Hypothesis profiles, order.

And a process that each test leaves as it found it.
"""

from __future__ import annotations

import difflib
import functools
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.ranks.fixtures import all_ranks, ranks, rest
from tests.ranks.rank_server import CALIBRATION

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling
    from xdist.workermanage import WorkerController

__all__ = ["all_ranks", "ranks"]  # fixtures
GOLDEN = Path(__file__).parent / "golden"
# Of hardware=auto, on every machine: what a laptop's datasheet says, so no run measures.
os.environ["FOLDPIPE_CALIBRATION"] = str(CALIBRATION)
_FOLDER = pytest.StashKey[Path]()
SLURM_DAEMONS = ("slurmctld", "slurmd", "munged")
SEVERAL_PROCESSES = ("distributed", "faults", "gpu", "slurm")
FOREIGN = "distributed/foreign/"

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


def _several(items: list[pytest.Item]) -> bool:
    """Whether a test of a file starts several processes, as its markers say."""
    return any(item.get_closest_marker(name) for item in items for name in SEVERAL_PROCESSES)


def _group(items: list[pytest.Item]) -> str | None:
    """The group of a file: of those whose tests start several processes there are two."""
    if not _several(items):
        return None
    if all(item.get_closest_marker("gpu") for item in items) or FOREIGN in items[0].nodeid:
        return None  # file by file, see below
    return "ranks" if any("all_ranks" in _fixtures(item) for item in items) else "launched"


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Names the file in which the first process of `pytest -n` leaves the groups of files."""
    node.workerinput["groups"] = str(_groups_file(node.config))


def _groups_file(config: pytest.Config) -> Path:
    if _FOLDER not in config.stash:
        folder = tempfile.TemporaryDirectory(prefix="foldpipe-tests-")
        config.add_cleanup(folder.cleanup)
        config.stash[_FOLDER] = Path(folder.name)
    return config.stash[_FOLDER] / "groups.json"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """Whole files and groups of them, as the processes have found them in the tests' markers.

    Not `--dist loadgroup`: xdist 3.8 renames tests for it, and in pytest 9.2 their names stay.
    """
    from xdist.scheduler import LoadFileScheduling

    @functools.cache
    def groups() -> dict[str, str]:
        found: dict[str, str] = json.loads(_groups_file(config).read_text())
        return found

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return groups().get(file, file)

    config.option.loadscopereorder = False  # In the order of collection, see below.
    return Scheduling(config, log)


def pytest_make_parametrize_id(val: object) -> str | None:
    # The two processes of `-n 2` must give each test one name, whatever second it was collected in.
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`pytest -n 2`: two files at a time; then those that start several processes, in two groups.

    One process for each group (what runs on the tests' ranks, and what is launched): what it starts
    for several files (ranks, a trained run) is started once per process. At last modules of others,
    file by file, so that both processes are ready at about the same time. What needs a GPU goes
    file by file, too: its machine has cores for several files.
    """
    if worker := getattr(config, "workerinput", None):  # One of several processes that run tests.
        files: dict[str, list[pytest.Item]] = {}
        for item in items:
            files.setdefault(_file(item), []).append(item)
        items.sort(key=lambda item: (_several(files[_file(item)]), FOREIGN in item.nodeid))
        if worker["workerid"] == "gw0":
            groups = {file: _group(tests) for file, tests in files.items()}
            text = json.dumps({file: group for file, group in groups.items() if group})
            Path(worker["groups"]).write_text(text)
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


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    rest(item)


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
def refusal(request: pytest.FixtureRequest) -> Callable[[object], None]:
    """`refusal(error)`: an error has the reason and the fix that the test's marker names.

    That marker is ``lightning_feature(..., refused=, fix=)``, of which docs/reference/lightning.md
    is made.
    """
    marks = request.node.iter_markers("lightning_feature")
    ((reason, fix),) = {(m.kwargs["refused"], m.kwargs["fix"]) for m in marks if m.kwargs}

    def compare(error: object) -> None:
        assert reason in str(error)
        assert fix in str(error)

    return compare


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
