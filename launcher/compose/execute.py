"""Runs the checked jobs through Hydra, and leaves no trace of those that were refused."""

from __future__ import annotations

import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from launcher.compose.overrides import quote
from launcher.compose.session import CONFIG_NAME, to_config
from launcher.config import LaunchConfig
from strategies.errors import PipelineError, PlanError

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

    from launcher.report.sweep_job import SweepJob

Command = Callable[[LaunchConfig, Path], int]

PREEMPTED = 85
_HYDRA_FILES = {"config.yaml", "hydra.yaml", "overrides.yaml"}


class _SweepEnded(BaseException):
    """Leaves Hydra's sweep early; no Exception, because Hydra would keep it until the end."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder, and what has to go if the run is refused.

    Attributes:
        path: Absolute.
        created: Folders that did not exist before, outermost first.
        kept: Contents of files in ``.hydra`` that an earlier run left there.
    """

    path: Path
    created: tuple[Path, ...]
    kept: dict[Path, bytes]

    def undo(self) -> None:
        """Restores what was there before, unless the run has written files of its own."""
        hydra = self.path / ".hydra"
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


def make_run_folder(pattern: str, *, unique: bool) -> RunFolder:
    """Creates the folder of a run.

    Args:
        pattern: Path, relative to the working directory or absolute.
        unique: Whether to append _2, _3, ... where the folder exists, as opposed to reusing it.

    Raises:
        PlanError: It cannot be created.
    """
    path = Path(pattern).absolute()
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
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
            "Try hydra.run.dir=/tmp/my_run."
        ) from error
    created = [folder for folder in missing if folder != path]
    if attempt != path or path in missing:
        created.insert(0, attempt)
    old = attempt / ".hydra"
    kept = {file: file.read_bytes() for file in old.iterdir()} if old.is_dir() else {}
    return RunFolder(attempt, tuple(reversed(created)), kept)


def run_one(hydra: Hydra, overrides: Sequence[str], folder: RunFolder, command: Command) -> int:
    """Runs one job; returns its exit code.

    Raises:
        PipelineError: What the command raised; the folder of a refused run is gone then.
    """
    job = _Job(command)
    words = [word for word in overrides if not word.startswith("hydra.run.dir=")]
    words.append(quote("hydra.run.dir", str(folder.path)))
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
) -> int:
    """Runs every job of a sweep, each in a numbered folder; a failed job does not stop the others.

    It ends with a comparison of all jobs that ran: tables on the terminal, and ``sweep.*``.

    Returns:
        0 if all succeeded, else the first other code. A preempted job ends the sweep.
    """
    job = _Job(command, jobs=jobs)
    words = [word for word in overrides if not word.startswith("hydra.sweep.dir=")]
    words.append(quote("hydra.sweep.dir", str(folder.path)))
    try:
        hydra.multirun(config_name=CONFIG_NAME, task_function=job, overrides=words)
    except _SweepEnded:
        _report(folder.path, job, hurry=False)
        return PREEMPTED
    except KeyboardInterrupt:
        _report(folder.path, job, hurry=True)
        raise
    failed = [(index, code) for index, code in enumerate(job.codes) if code]
    for index, code in failed:
        sys.stderr.write(
            f"job {index} of the sweep failed (exit {code}): {' '.join(jobs[index])}\n"
        )
    sys.stderr.flush()
    _report(folder.path, job, hurry=False)
    return failed[0][1] if failed else 0


def _report(folder: Path, job: _Job, *, hurry: bool) -> None:
    from launcher.report.sweep_files import report_sweep  # Only a sweep needs it.
    from launcher.report.sweep_labels import make_sweep

    if job.ended:
        report_sweep(folder, make_sweep(job.ended, job.jobs), hurry=hurry)


class _Job:
    """What Hydra calls per job; keeps how each one ended, which Hydra has no place for.

    Attributes:
        codes: Exit codes.
        ended: What a sweep shows of its jobs; empty for a single run.
        jobs: Overrides of every job of a sweep.
    """

    def __init__(self, command: Command, *, jobs: Sequence[Sequence[str]] = ()) -> None:
        self.codes: list[int] = []
        self.ended: list[SweepJob] = []
        self.jobs = jobs
        self._command = command
        self._config: LaunchConfig | None = None
        self._error = ""

    def __call__(self, composed: DictConfig) -> int:
        hydra = HydraConfig.get()
        if len(self.jobs) > 1:
            overrides = " ".join(hydra.overrides.task)
            sys.stdout.write(f"[{len(self.codes) + 1}/{len(self.jobs)}] {overrides}\n")
            sys.stdout.flush()
        code = self._in_sweep(composed, hydra) if self.jobs else self._guarded(composed, hydra)
        self.codes.append(code)
        if code == PREEMPTED and self.jobs:
            raise _SweepEnded
        return code

    def _in_sweep(self, composed: DictConfig, hydra: HydraConf) -> int:
        from launcher.report.sweep_job import ended_job, file_stamps

        folder, index = Path(hydra.runtime.output_dir), len(self.ended)
        before = file_stamps(folder)
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

    def _guarded(self, composed: DictConfig, hydra: HydraConf) -> int:
        try:
            self._config = to_config(composed, hydra.runtime.choices)
            return self._command(self._config, Path(hydra.runtime.output_dir))
        except PipelineError as error:
            self._error = str(error)
            sys.stderr.write(f"error: {error}\n")
            return error.exit_code
        except BrokenPipeError:
            raise  # `| head` has closed our output; main() knows.
        except Exception as error:
            # A defect of ours or of the user's model, not a wrong request: show where.
            self._error = "".join(traceback.format_exception_only(error)).strip()
            traceback.print_exc()
            return 1
