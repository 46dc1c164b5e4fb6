"""Runs the checked jobs through Hydra, and leaves no trace of those that were refused."""

from __future__ import annotations

import os
import shlex
import shutil
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from launcher.compose.overrides import quote
from launcher.compose.session import CONFIG_NAME, to_config
from launcher.config import LaunchConfig
from launcher.processes.failure import as_full_disk, free_bytes
from launcher.terminal import complain, say, say_error
from strategies.errors import PipelineError, PlanError

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

    from launcher.report.sweep.sweep_jobs import Sweep, SweepJob

Command = Callable[[LaunchConfig, Path], int]

PREEMPTED, INTERRUPTED = 85, 130
_LEAST_BYTES = 1 << 20  # Configuration, results, logs and pictures of a small run.
_HYDRA_FILES = {"config.yaml", "hydra.yaml", "overrides.yaml"}


class _SweepEnded(BaseException):
    """Leaves Hydra's sweep early; no Exception, because Hydra would keep it until the end."""


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
        hydra = self.path / ".hydra"
        if not self.kept and any(file != hydra for file in self.path.iterdir()):
            return  # Its ranks have refused, and said so in logs and result.json.
        if hydra.is_dir() and {file.name for file in hydra.iterdir()} <= _HYDRA_FILES:
            if self.kept:
                for file, content in self.kept.items():
                    file.write_bytes(content)
            else:
                shutil.rmtree(hydra)
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


def make_run_folder(pattern: str, *, unique: bool, kind: str = "run") -> RunFolder:
    """Creates the folder of a run, or (``kind``) of a sweep.

    ``unique``: whether to append _2, _3, ... where the folder exists, as opposed to reusing it.
    """
    path = Path(pattern).absolute()
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
    if problem is not None:
        for folder in created:
            folder.rmdir()
        raise PlanError(
            f"The run folder {attempt} {problem}. Try hydra.{kind}.dir=/elsewhere/my_run."
        )
    old = attempt / ".hydra"
    kept = {file: file.read_bytes() for file in old.iterdir()} if old.is_dir() else {}
    return RunFolder(attempt, tuple(reversed(created)), kept)


def tell_closed(folder: Path) -> None:
    """Says which folder above keeps the group out of one that it may read."""
    for parent in folder.parents:
        found = parent.stat()
        if found.st_uid == os.getuid() and found.st_mode & 0o050 != 0o050:
            say(
                f"note: output.group_readable=true, but {parent} is closed to your group. "
                f"Try chmod g+rx {shlex.quote(str(parent))}."
            )


def run_one(hydra: Hydra, overrides: Sequence[str], folder: RunFolder, command: Command) -> int:
    """Runs one job; returns its exit code.

    Raises:
        PipelineError: What the command raised; the folder of a refused run is gone then.
    """
    job = Jobs(command)
    words = _words(overrides, "hydra.run.dir", folder)
    hydra.run(config_name=CONFIG_NAME, task_function=job, overrides=words)
    code = job.codes[0]
    if code == PlanError.exit_code:
        folder.undo()
    return code


def run_sweep(
    hydra: Hydra,
    overrides: Sequence[str],
    folder: RunFolder,
    command: Command,
    *,
    jobs: Sequence[Sequence[str]],
    config: LaunchConfig,
) -> int:
    """Runs every job of a sweep, each in a numbered folder.

    A failed job is named at once, and stops the others only with ``sweep.fail_fast``.

    It ends with a comparison of all jobs that ran: tables on the terminal, and ``sweep.*``.

    ``config``: of the first job: what is common to all.

    Returns:
        0 if all succeeded, else the first other code. A preempted job ends the sweep.
    """
    job = Jobs(command, jobs=jobs, folder=folder.path, config=config)
    words = _words(overrides, "hydra.sweep.dir", folder)

    def run_all() -> None:
        hydra.multirun(config_name=CONFIG_NAME, task_function=job, overrides=words)

    return end_sweep(run_all, folder, job, config)


def _words(overrides: Sequence[str], key: str, folder: RunFolder) -> list[str]:
    kept = [word for word in overrides if not word.startswith(f"{key}=")]
    return [*kept, quote(key, str(folder.path))]


def end_sweep(
    run_all: Callable[[], None], folder: RunFolder, job: Jobs, config: LaunchConfig
) -> int:
    """Runs the jobs of a sweep, and reports however that ends."""
    try:
        run_all()
    except _SweepEnded:
        pass
    except KeyboardInterrupt:
        _report(folder.path, job, config, hurry=True)
        raise
    _report(folder.path, job, config, hurry=False)
    if PREEMPTED in job.codes:
        return PREEMPTED
    return next((code for code in job.codes if code), 0)


def _report(folder: Path, job: Jobs, config: LaunchConfig, *, hurry: bool) -> None:
    from launcher.report.sweep.files import report_sweep  # Only a sweep needs it.

    if job.submits:
        if not hurry and not (config.sweep.fail_fast and any(job.codes)):
            from launcher.commands.submit import submit_sweep

            submit_sweep(folder, job.folders, config.cluster)
        words = shlex.join(["python", "-m", "launcher", "mode=collect", f"sweep.dir={folder}"])
        say(f"to compare the jobs once they have ended: {words}")
    elif job.ended:
        report_sweep(folder, job.sweep(), metric=config.sweep.metric, hurry=hurry)


class Jobs:
    """What Hydra calls per job; keeps how each one ended, which Hydra has no place for."""

    def __init__(
        self,
        command: Command,
        *,
        jobs: Sequence[Sequence[str]] = (),
        folder: Path | None = None,
        config: LaunchConfig | None = None,
        total: int | None = None,
    ) -> None:
        self.codes: list[int] = []
        self.ended: list[SweepJob] = []
        self.jobs = jobs
        self.submits = config is not None and config.cluster.name == "slurm"
        self._fail_fast = config is not None and config.sweep.fail_fast
        self._folder = folder
        self._total = total
        self.folders: list[Path] = []
        self._command = command
        self._config: LaunchConfig | None = None
        self._error = ""

    def __call__(self, composed: DictConfig) -> int:
        hydra = HydraConfig.get()
        if self.total > 1:
            overrides = " ".join(hydra.overrides.task)
            say(f"[{len(self.codes) + 1}/{self.total}] {overrides}")
        code = self._in_sweep(composed, hydra) if self.jobs else self._guarded(composed, hydra)
        self.codes.append(code)
        if self.jobs:
            self._job_ended(code)
        return code

    @property
    def total(self) -> int:
        """How many jobs there will be; those of a search are known one by one."""
        return len(self.jobs) if self._total is None else self._total

    def sweep(self) -> Sweep:
        from launcher.report.sweep.sweep_jobs import make_sweep

        return replace(make_sweep(self.ended, self.jobs), num_jobs=self.total)

    def _job_ended(self, code: int) -> None:
        index = len(self.codes) - 1
        if code:
            words = " ".join(self.jobs[index])
            complain(f"job {index} of the sweep failed (exit {code}): {words}")
        left = self.total - len(self.codes)
        if code in (PREEMPTED, INTERRUPTED) or (code and left and self._fail_fast):
            raise _SweepEnded
        if left and not self.submits and self._folder is not None:
            from launcher.report.sweep.files import report_so_far

            report_so_far(self._folder, self.sweep())

    def _in_sweep(self, composed: DictConfig, hydra: HydraConf) -> int:
        from launcher.report.sweep.sweep_jobs import ended_job, file_stamps, write_record

        folder, index = Path(hydra.runtime.output_dir), len(self.ended)
        before = file_stamps(folder)
        self.folders.append(folder)
        if self._folder is not None:
            write_record(self._folder, self.jobs, self.folders)
        self._config, self._error = None, ""
        code: int | None = None
        try:
            code = self._guarded(composed, hydra)
            return code
        except KeyboardInterrupt:
            self._error = "interrupted"
            raise
        finally:
            self.ended.append(
                ended_job(
                    index, folder, self.jobs[index],
                    config=self._config, before=before, exit_code=code, error=self._error,
                )
            )  # fmt: skip

    def _grouped(self, config: LaunchConfig) -> LaunchConfig:
        """Trackers show the jobs of a sweep together, unless somebody has named another group."""
        if self._folder is None or config.tracking.group is not None:
            return config
        group = f"{config.experiment_name} {self._folder.parent.name} {self._folder.name}"
        return replace(config, tracking=replace(config.tracking, group=group))

    def _guarded(self, composed: DictConfig, hydra: HydraConf) -> int:
        try:
            self._config = self._grouped(to_config(composed, hydra))
            return self._command(self._config, Path(hydra.runtime.output_dir))
        except PipelineError as error:
            self._error = str(error)
            say_error(error)
            return error.exit_code
        except BrokenPipeError:
            raise  # `| head` has closed our output; main() knows.
        except Exception as error:
            full = as_full_disk(error, Path(hydra.runtime.output_dir))
            if full is not None:
                self._error = str(full)
                say_error(full)
                return full.exit_code
            # A defect of ours or of the user's model, not a wrong request: show where.
            self._error = "".join(traceback.format_exception_only(error)).strip()
            traceback.print_exc()
            return 1
