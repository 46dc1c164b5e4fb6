"""The process that all ranks of the tests are forked from: what they import is imported once.

It lives as long as the process of pytest. Launchers find it in ``FOLDPIPE_RANK_SERVER``, and each
is served by a fork of it as by a process of its own; so are the ranks of ``tests.distributed``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import getpass
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from launcher.processes.local import our_path
from launcher.processes.rank_server import ROOM_VARIABLE
from launcher.rank import worker
from launcher.rank.fork_server import serve
from launcher.secrets import MaskedStream

REPOSITORY = Path(__file__).resolve().parents[2]
CALIBRATION = REPOSITORY / "tests" / "calibration.json"
# Among them what torch and Lightning have set in this process.
_NOT_KEPT = (
    "WANDB_", "FOLDPIPE_", "PYTEST_", "PL_", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR",
)  # fmt: skip


def variables() -> dict[str, str]:
    """Ours, without what would reach an account of whoever runs the tests."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_KEPT)}
    ours = {
        "PYTHONPATH": our_path(os.environ), "OMP_NUM_THREADS": "1", "COLUMNS": "120",
        "FOLDPIPE_CALIBRATION": str(CALIBRATION),
        # As rank_environment has it: what is imported before Lightning must not start CUDA.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }  # fmt: skip
    # What is compiled once is so for all runs, each of which has a home of its own.
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    return kept | ours | {"TORCHINDUCTOR_CACHE_DIR": str(compiled)}


VARIABLES = variables()
POOL_RANK = "TESTS_POOL_RANK"  # Has the descriptor of a rank of tests.ranks.pool.
_MODULES = (
    "launcher.rank.jobs", "launcher.workloads.hf.hf_model", "omegaconf",
    "torch._inductor.compile_fx",  # torch.compile, with which ranks of several files begin
)  # fmt: skip


@functools.cache
def rank_server_address() -> str:
    """Where it listens; started by the first who asks, and ended with this process."""
    folder = tempfile.TemporaryDirectory(prefix="foldpipe-tests-")
    address = str(Path(folder.name) / "ranks")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(16)  # Who comes before all is imported waits.
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.rank_server", str(listener.fileno()), " " * 300],
            env=VARIABLES | {ROOM_VARIABLE: "." * 4096, "FOLDPIPE_PARENT": str(os.getpid())},
            cwd=REPOSITORY,
            pass_fds=(listener.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def end() -> None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        folder.cleanup()

    atexit.register(end)
    return address


def shares(given: Mapping[str, str]) -> bool:
    """Whether ranks with these variables may be forked there: libraries read some when loaded."""
    return dict(given) == VARIABLES | {"HOME": given["HOME"]}


def main() -> None:
    worker.die_with(int(os.environ["FOLDPIPE_PARENT"]))
    sys.stdout, sys.stderr = MaskedStream(sys.stdout), MaskedStream(sys.stderr)
    for name in _MODULES:
        importlib.import_module(name)
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        os.set_inheritable(listener.fileno(), False)
        signal.signal(signal.SIGTERM, _end)
        own = os.getpid()
        while True:
            channel, _ = listener.accept()
            with channel:
                if os.fork() == 0:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    listener.close()
                    worker.die_with(own)
                    serve(channel, _run, __spec__.name)
                    worker.leave(0)
            _bury(os.WNOHANG)


def _end(number: int, _: object) -> None:
    _bury(0)  # Their seconds are then known as those of the tests.
    worker.leave(0)


def _bury(options: int) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass


def _run(run_dir: Path) -> int:
    if POOL_RANK not in os.environ:
        return worker.run_rank(run_dir)
    importlib.import_module("tests.ranks.pool").serve_rank()
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 2:  # one rank, where none can be forked
        worker.die_with(int(os.environ["FOLDPIPE_PARENT"]))
        sys.stdout, sys.stderr = MaskedStream(sys.stdout), MaskedStream(sys.stderr)
        worker.leave(_run(Path(sys.argv[1])))
    main()
