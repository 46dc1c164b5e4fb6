"""Runs one checked job through Hydra, and leaves no trace of one that was refused."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra._internal.callbacks import Callbacks
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log, run_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, read_write

from launcher.checkpoints import LOCK
from launcher.compose.overrides import quote
from launcher.compose.session import CONFIG_NAME, to_config
from launcher.compose.used_checkpoint import use_checkpoint
from launcher.config import LaunchConfig
from launcher.config.key import require_name, shorten
from launcher.processes.failure import as_in_the_way, explained, free_bytes
from launcher.processes.preempted import PRUNED
from launcher.secrets import mask
from launcher.terminal import complain, say, say_error, shortened
from strategies.errors import PipelineError, PlanError, RunError, readable
from strategies.small_file import FileRefusedError, read_bytes

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

Command = Callable[[LaunchConfig, Path], int]

_LEAST_BYTES = 1 << 20  # Configuration, results, logs and pictures of a small run.
_MOST_BYTES = 1 << 24  # of one of Hydra's files
_MOST_ERROR, _MOST_TRACEBACK = 8_000, 20_000  # characters of what somebody's code raises
_HYDRA_FILES = {"config.yaml", "hydra.yaml", "overrides.yaml"}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder, and what has to go if the run is refused.

    Attributes:
        created: Folders that did not exist before, outermost first.
        kept: Contents of files in ``.hydra`` that an earlier run left there.
    """

    path: Path
    created: tuple[Path, ...]
    kept: dict[Path, bytes]

    def undo(self) -> None:
        """Restores what was there before, unless the run has written files of its own."""
        hydra, lock = self.path / ".hydra", self.path / LOCK
        if not self.kept and any(file not in (hydra, lock) for file in self.path.iterdir()):
            return  # Its ranks have refused, and said so in logs and result.json.
        if hydra.is_dir() and {file.name for file in hydra.iterdir()} <= _HYDRA_FILES:
            if self.kept:
                for file, content in self.kept.items():
                    file.write_bytes(content)
            else:
                shutil.rmtree(hydra)
        if self.created:
            lock.unlink(missing_ok=True)
        for folder in reversed(self.created):
            if any(folder.iterdir()):
                return
            folder.rmdir()


def _unfit(folder: Path) -> str | None:
    """Why nothing can be written there; None if it can."""
    if not os.access(folder, os.W_OK | os.X_OK) or os.statvfs(folder).f_flag & os.ST_RDONLY:
        return "cannot be written: it is read-only for this user"
    free = free_bytes(folder)
    if free < _LEAST_BYTES:
        return f"has {free:,} bytes free, and a run writes {_LEAST_BYTES:,} at least"
    return None


def _of_another(folder: Path) -> bool:
    """Whether a stranger has made the folder where anybody can, such as /tmp.

    Links that he has laid there would have our files written wherever they point.
    """
    own, above = folder.stat(), folder.parent.stat()
    strange = own.st_uid not in (os.getuid(), 0)
    return strange and bool((own.st_mode | above.st_mode) & stat.S_IWOTH)


def require_one_line(key: str, name: str) -> None:
    """Refuses a folder's name that would be more than a name wherever it is printed.

    Raises:
        PlanError: A line break or what a terminal obeys is in it.
    """
    if readable(name) != name or not {"\n", "\t"}.isdisjoint(name):
        raise PlanError(
            f"{key}={shorten(ascii(name))}: a line break or another control character is in it, "
            f"which no folder of ours has. Try {key}=my_run."
        )


def make_run_folder(pattern: str, *, unique: bool, kind: str = "run") -> RunFolder:
    """Creates the folder of a run, or (``kind``) of a sweep.

    ``unique``: whether to append _2, _3, ... where the folder exists, as opposed to reusing it.
    """
    require_name(f"hydra.{kind}.dir=", pattern)
    path = Path(pattern).expanduser().absolute()
    if not pattern.strip() or path in (Path(path.anchor), Path.home()):
        reason = f"{path} is nobody's run" if pattern.strip() else "it is empty"
        raise PlanError(f"hydra.{kind}.dir={pattern}: {reason}. Try hydra.{kind}.dir=my_run.")
    require_one_line(f"hydra.{kind}.dir", pattern)
    try:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        attempt, number = path, 1
        while True:
            try:
                attempt.mkdir(exist_ok=not unique)
                break
            except FileExistsError:
                if not unique or number == 1000:
                    raise
                number += 1
                attempt = path.with_name(f"{path.name}_{number}")
    except OSError as error:
        raise PlanError(
            f"The run folder {path} cannot be created: {error.strerror}. "
            f"Try hydra.{kind}.dir=/tmp/my_run."
        ) from error
    created = [folder for folder in missing if folder != path]
    if attempt != path or path in missing:
        created.insert(0, attempt)
    problem = _unfit(attempt)
    if attempt not in created and _of_another(attempt):
        problem = "is another user's, in a place where anybody can make folders"
    if problem is not None:
        for folder in created:
            folder.rmdir()
        raise PlanError(
            f"The run folder {attempt} {problem}. Try hydra.{kind}.dir=/elsewhere/my_run."
        )
    old = attempt / ".hydra"
    return RunFolder(attempt, tuple(reversed(created)), _kept(old) if old.is_dir() else {})


def _kept(folder: Path) -> dict[Path, bytes]:
    """What an earlier run has left; read here, and written over by this one."""
    try:
        if folder.is_symlink() or any(file.is_symlink() for file in folder.iterdir()):
            raise FileRefusedError("there is a link in it")
        return {file: read_bytes(file, most_bytes=_MOST_BYTES) for file in folder.iterdir()}
    except (OSError, FileRefusedError) as error:
        raise PlanError(
            f"{folder}, which this run is to replace, cannot be read: {error}.",
            fix="Remove it, or try another hydra.run.dir.",
        ) from None


def tell_closed(folder: Path) -> None:
    """Says which folder above keeps the group out of one that it may read."""
    for parent in folder.parents:
        found = parent.stat()
        if found.st_uid == os.getuid() and found.st_mode & 0o050 != 0o050:
            say(
                f"note: output.group_readable=true, but {parent} is closed to your group. "
                f"Try chmod g+rx {shlex.quote(str(parent))}."
            )


def run_one(
    hydra: Hydra,
    composed: DictConfig,
    overrides: Sequence[str],
    folder: RunFolder,
    command: Command,
) -> int:
    """Runs one job, ``composed`` from its overrides; returns its exit code.

    Raises:
        PipelineError: What the command raised; the folder of a refused run is gone then.
    """
    job = JobTask(command)
    words = into_folder(overrides, "hydra.run.dir", folder)
    if composed.hydra.verbose or composed.hydra.mode is not None:  # It tells how it composes.
        hydra.run(config_name=CONFIG_NAME, task_function=job, overrides=words)
    else:
        _run_composed(hydra, composed, words, folder, job)
    assert job.code is not None
    if job.code == PlanError.exit_code:
        folder.undo()
    return job.code


def _run_composed(
    hydra: Hydra, composed: DictConfig, words: Sequence[str], folder: RunFolder, job: JobTask
) -> None:
    """What ``Hydra.run`` does once it has composed, which takes a third of a second a time."""
    own = [word for word in words if word.split("=")[0].lstrip("+~").split(".")[0] == "hydra"]
    with read_write(composed.hydra):
        composed.hydra.run.dir = str(folder.path)
        composed.hydra.overrides.hydra = own
        composed.hydra.mode = RunMode.RUN
    configure_log(composed.hydra.hydra_logging, composed.hydra.verbose)
    callbacks = Callbacks(composed)
    callbacks.on_run_start(config=composed, config_name=CONFIG_NAME)
    done = run_job(
        hydra_context=HydraContext(config_loader=hydra.config_loader, callbacks=callbacks),
        task_function=job,
        config=composed,
        job_dir_key="hydra.run.dir",
        job_subdir_key=None,
    )
    callbacks.on_run_end(config=composed, config_name=CONFIG_NAME, job_return=done)
    _ = done.return_value  # Raises what has ended the job.


def into_folder(overrides: Sequence[str], key: str, folder: RunFolder) -> list[str]:
    """The words with ``hydra.run.dir`` or ``hydra.sweep.dir`` set to a folder that is there."""
    kept = [word for word in overrides if not word.startswith(f"{key}=")]
    return [*kept, quote(key, str(folder.path))]


class JobTask:
    """What Hydra calls for a job; keeps how it ended, which Hydra has no place for.

    Args:
        output: Where the job's own words go while it runs; None to leave them where they are.
        begun: Told of the job's folder before anything runs in it.
        adapt: What a sweep changes in the configuration of each of its jobs.

    Attributes:
        code: Its exit code; None where it was interrupted, or has not ended.
        error: What ended it.
        config: What it ran; None if it could not be composed.
    """

    def __init__(
        self,
        command: Command,
        *,
        output: Callable[[Path], AbstractContextManager[object]] | None = None,
        begun: Callable[[Path], None] | None = None,
        adapt: Callable[[LaunchConfig], LaunchConfig] | None = None,
    ) -> None:
        self.code: int | None = None
        self.error = ""
        self.config: LaunchConfig | None = None
        self._command = command
        self._output = output
        self._begun = begun
        self._adapt = adapt

    def __call__(self, composed: DictConfig) -> None:
        hydra = HydraConfig.get()
        folder = Path(hydra.runtime.output_dir)
        try:
            if self._begun is not None:
                self._begun(folder)
            with nullcontext() if self._output is None else self._output(folder):
                self.code = self._guarded(composed, hydra, folder)
        except (PipelineError, OSError) as error:  # of what is written around the job
            known = error if isinstance(error, PipelineError) else _unwritten(error, folder)
            if known is None:
                raise
            self.error, self.code = str(known), known.exit_code
            say_error(known)

    def _guarded(self, composed: DictConfig, hydra: HydraConf, folder: Path) -> int:
        try:
            use_checkpoint(composed, hydra)  # of a sweep's job, which is composed of words alone
            config = to_config(composed, hydra)
            self.config = config if self._adapt is None else self._adapt(config)
            return self._command(self.config, folder)
        except PipelineError as error:
            self.error = shortened(mask(str(error)), _MOST_ERROR)
            if error.exit_code == PRUNED:
                say(f"pruned: {error}")
            else:
                say_error(error)
            return error.exit_code
        except KeyboardInterrupt:
            self.error = "interrupted"
            raise
        except Exception as error:
            unwritten = _unwritten(error, folder)
            if unwritten is not None:
                self.error = str(unwritten)
                say_error(unwritten)
                return unwritten.exit_code
            # A defect of ours or of the user's model, not a wrong request: show where.
            said = "".join(traceback.format_exception_only(error)).strip()
            self.error = shortened(mask(said), _MOST_ERROR)
            complain(shortened(mask(traceback.format_exc()), _MOST_TRACEBACK))
            return 1


def _unwritten(error: BaseException, folder: Path) -> RunError | None:
    return explained(error, folder) or as_in_the_way(error, folder)
