"""How one job of a sweep is started: Hydra's part, and the job in this process, at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO, cast

from hydra._internal.callbacks import Callbacks
from hydra.core.utils import run_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from launcher.checkpoints import hold
from launcher.compose.execute import Command, JobTask, RunFolder, into_folder
from launcher.compose.session import CONFIG_NAME
from launcher.config import LaunchConfig
from launcher.config.running import LONGEST_TAG
from launcher.processes.failure import explained
from launcher.report.sweep.sweep_jobs import Stamps, asked_figures, file_stamps
from launcher.secrets import MaskedStream
from launcher.terminal import LastingStream

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

OUTPUT = "output.txt"
# What ends a command: Ctrl-C, and what the command line makes the same of.
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Told of a job's number, folder and files there, before anything runs in it.
Begun = Callable[[int, Path, Stamps], None]


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that has ended, as whoever ran it knows it.

    Attributes:
        code: Its exit code, None where it was interrupted.
        asked: What result.json would say of it, from its configuration alone.
    """

    index: int
    code: int | None
    error: str
    asked: Mapping[str, object]


class JobStarter:
    """Hydra's part: a job's configuration, folder and ``.hydra``, as its own launcher does it.

    Attributes:
        folder: The sweep's.
    """

    def __init__(
        self, hydra: Hydra, words: Sequence[str], folder: RunFolder, command: Command
    ) -> None:
        master = hydra.compose_config(
            config_name=CONFIG_NAME,
            overrides=into_folder(words, "hydra.sweep.dir", folder),
            run_mode=RunMode.MULTIRUN,
            with_log_configuration=False,
        )
        OmegaConf.save(master, folder.path / "multirun.yaml")
        self._master: DictConfig = master
        self._context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(master))
        self._command = command
        self.folder = folder.path

    def run(
        self,
        index: int,
        words: Sequence[str],
        begun: Callable[[Path], None],
        output: Callable[[Path], contextlib.AbstractContextManager[object]] | None,
    ) -> Ended:
        """Runs one job to its end; a KeyboardInterrupt ends it, and is left to the caller."""
        task = JobTask(self._command, output=output, begun=begun, adapt=self._of_sweep)
        own = [word for word in words if not word.lstrip("+").startswith("hydra.")]
        config = self._context.config_loader.load_sweep_config(self._master, own)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = index
        try:
            done = run_job(
                hydra_context=self._context,
                task_function=task,
                config=config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
            _ = done.return_value  # raises what the task raised
        except KeyboardInterrupt:
            task.error = task.error or "interrupted"
        except OSError as error:  # Hydra's own files: one job that has no room, not the end of all
            full = explained(error, self.folder)
            if full is None:
                raise
            task.code, task.error = full.exit_code, str(full)
        asked = {} if task.config is None else asked_figures(task.config)
        return Ended(index, task.code, task.error, asked)

    def _of_sweep(self, config: LaunchConfig) -> LaunchConfig:
        config = tagged(config, self.folder)
        if config.sweep.prune_at:  # jobs find each other there
            config = replace(config, sweep=replace(config.sweep, dir=str(self.folder)))
        return config


class InTurn:
    """Runs each job in this process, at once.

    While it is entered, Ctrl-C and its like interrupt what a job runs, and are kept for later
    everywhere else: a job that has ended is never lost between its end and the sweep's table.
    """

    def __init__(self, starter: JobStarter, begun: Begun, *, quiet: bool) -> None:
        self.interrupted = False
        self._starter = starter
        self._begun = begun
        self._quiet = quiet
        self._ended: list[Ended] = []
        self._inside = False  # whether a job runs that can be interrupted
        self._heard: list[signal.Signals] = []  # whose handler is ours meanwhile

    def __enter__(self) -> InTurn:
        if threading.current_thread() is threading.main_thread():
            for number in _ENDINGS:
                if signal.getsignal(number) is signal.default_int_handler:
                    self._heard.append(number)
                    signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._heard:
            signal.signal(number, signal.default_int_handler)
        self._heard.clear()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        if self._inside:
            signal.default_int_handler(number, frame)

    def free(self) -> bool:
        return not self._ended

    def busy(self) -> bool:
        return bool(self._ended)

    def start(self, index: int, words: Sequence[str]) -> None:
        def begun(folder: Path) -> None:
            self._begun(index, folder, file_stamps(folder))

        self._ended.append(self._starter.run(index, words, begun, self._output))
        self.interrupted |= self._ended[-1].code is None

    @contextlib.contextmanager
    def _output(self, folder: Path) -> Iterator[None]:
        """The job's folder is its own while it runs, as that of a run outside a sweep is."""
        alone = contextlib.nullcontext() if folder == self._starter.folder else hold(folder)
        with alone, job_output(folder) if self._quiet else contextlib.nullcontext():
            try:
                self._inside = True
                if self.interrupted:  # before anything runs
                    raise KeyboardInterrupt
                yield
            finally:
                self._inside = False

    def wait(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended

    def stop(self) -> None:
        """Nothing else runs."""


@contextlib.contextmanager
def job_output(folder: Path) -> Iterator[None]:
    """Everything that is said meanwhile goes to ``output.txt`` in the job's folder."""
    with (
        (folder / OUTPUT).open(
            "a", buffering=1, encoding="utf-8", errors="backslashreplace"
        ) as file,
        contextlib.redirect_stdout(cast(TextIO, MaskedStream(LastingStream(file)))),
        contextlib.redirect_stderr(cast(TextIO, MaskedStream(LastingStream(file)))),
    ):
        yield


def tagged(config: LaunchConfig, folder: Path) -> LaunchConfig:
    """W&B finds the jobs of a sweep by one tag; its groups are runs of one schedule and size."""
    tag = f"sweep {folder.parent.name} {folder.name}"[:LONGEST_TAG]
    return replace(config, tracking=replace(config.tracking, tags=(*config.tracking.tags, tag)))
