"""A sweep: which job is next, what is said of each, and what is left however it ends.

Jobs run one after the other in this process, or side by side in processes of their own
(``launcher.compose.job_pool``). What a job says goes to ``output.txt`` in its folder; of each job
that has ended one line is printed, and the sweep ends with the comparison of all.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from launcher.commands.submit import submit_sweep
from launcher.compose.execute import Command, RunFolder
from launcher.compose.job_pool import JobPool
from launcher.compose.job_start import OUTPUT, Ended, InTurn, JobStarter
from launcher.compose.running_view import RunningView
from launcher.config import LaunchConfig
from launcher.report.sweep.files import report_so_far, report_sweep
from launcher.report.sweep.sweep_jobs import (
    Stamps,
    Sweep,
    SweepJob,
    ended_job,
    make_sweep,
    write_record,
)
from launcher.report.sweep.sweep_table import job_line
from launcher.terminal import complain, say

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

PREEMPTED, INTERRUPTED = 85, 130


class Source(Protocol):
    """Where jobs come from: every combination, or a search that learns from those before."""

    total: int

    def take(self) -> tuple[int, Sequence[str]] | None:
        """The next job; None where there is none (yet)."""

    def tell(self, job: SweepJob) -> None:
        """A job has ended."""

    def asked(self) -> Sequence[Sequence[str]]:
        """The overrides of all jobs that are known so far."""


class Runner(Protocol):
    """Who runs jobs; ``begun`` and ``ended`` of the sweep are told by it."""

    interrupted: bool

    def free(self) -> bool: ...

    def busy(self) -> bool: ...

    def start(self, index: int, words: Sequence[str]) -> None: ...

    def wait(self) -> list[Ended]:
        """Jobs that have ended since; waits for the first."""

    def stop(self) -> None:
        """Asks the jobs that run to end, with what checkpoint they can write."""


class Combinations:
    """Every job of a list."""

    def __init__(self, jobs: Sequence[Sequence[str]]) -> None:
        self.total = len(jobs)
        self._jobs = jobs
        self._next = iter(enumerate(jobs))

    def take(self) -> tuple[int, Sequence[str]] | None:
        return next(self._next, None)

    def tell(self, job: SweepJob) -> None:
        """Nothing is learnt from it."""

    def asked(self) -> Sequence[Sequence[str]]:
        return self._jobs


class SweepState:
    """What is known of a sweep while it runs, and what is printed and written of it."""

    def __init__(
        self, folder: Path, source: Source, config: LaunchConfig, view: RunningView, *, quiet: bool
    ) -> None:
        self.jobs: dict[int, SweepJob] = {}
        self.stopped = False
        self.submits = config.cluster.name == "slurm"
        self._folder = folder
        self._source = source
        self._config = config
        self._view = view
        self._quiet = quiet
        self._begun: dict[int, tuple[Path, Stamps, float]] = {}

    def begun(self, index: int, folder: Path, stamps: Stamps) -> None:
        """A job's folder is there, and nothing has run in it yet."""
        self._begun[index] = folder, stamps, time.monotonic()
        folders = {number: found for number, (found, _, _) in self._begun.items()}
        write_record(self._folder, self._source.asked(), folders)
        words = self._source.asked()[index]
        if not self._quiet and self._source.total > 1:
            say(f"[{index + 1}/{self._source.total}] {' '.join(words)}")
        self._view.begun(index, self._label(index), folder / OUTPUT)

    def _label(self, index: int) -> str:
        sweep = make_sweep((), self._source.asked())
        return sweep.label_of(index, self._source.asked()[index])

    def ended(self, ended: Ended) -> None:
        """A job has ended, however that was."""
        index, words = ended.index, self._source.asked()[ended.index]
        unknown = self._folder / str(index), (None, None), time.monotonic()  # not composed even
        folder, stamps, since = self._begun.get(index, unknown)
        job = ended_job(
            index, folder, words,
            asked=ended.asked, before=stamps, exit_code=ended.code, error=ended.error,
        )  # fmt: skip
        self.jobs[index] = job
        self._source.tell(job)
        self._view.ended(index)
        left = self._source.total - len(self.jobs)
        failed = job.status in ("failed", "refused")
        self._say(job, time.monotonic() - since)
        if job.status in ("preempted", "interrupted") or (
            failed and left and self._config.sweep.fail_fast
        ):
            self.stopped = True
        elif left and not self.submits:
            report_so_far(self._folder, self.sweep())

    def _say(self, job: SweepJob, took_s: float) -> None:
        if job.status in ("failed", "refused"):
            words = " ".join(self._source.asked()[job.index])
            first = (job.error.splitlines() or [""])[0]
            where = f"; see {job.folder / OUTPUT}" if self._quiet else ""
            said = f": {first}" if first and self._quiet else ""
            text = f"job {job.index} of the sweep failed (exit {job.exit_code}): {words}{said}"
            self._view.print(text + where, complain)
        elif self._quiet:
            count = f"[{len(self.jobs)}/{self._source.total}]"
            self._view.print(f"{count} {job_line(self.sweep(), job, took_s)}", say)
        if not self._quiet and self._config.sweep.parallel > 1:
            say((job.folder / OUTPUT).read_text(encoding="utf-8", errors="replace"))

    def sweep(self) -> Sweep:
        jobs = [self.jobs[index] for index in sorted(self.jobs)]
        return replace(make_sweep(jobs, self._source.asked()), num_jobs=self._source.total)

    def report(self, *, hurry: bool) -> None:
        if self.submits:
            if not hurry and not (self._config.sweep.fail_fast and self.code()):
                folders = [folder for _, (folder, _, _) in sorted(self._begun.items())]
                submit_sweep(self._folder, folders, self._config.cluster)
            place = f"sweep.dir={self._folder}"
            words = shlex.join(["python", "-m", "launcher", "mode=collect", place])
            say(f"to compare the jobs once they have ended: {words}")
        elif self.jobs:
            report_sweep(self._folder, self.sweep(), metric=self._config.sweep.metric, hurry=hurry)

    def code(self) -> int:
        """0 if all have succeeded, else that of the first job that has not."""
        codes = [job.exit_code for _, job in sorted(self.jobs.items()) if job.status != "pruned"]
        if PREEMPTED in codes:
            return PREEMPTED
        return next((INTERRUPTED if code is None else code for code in codes if code != 0), 0)


def run_multirun(
    hydra: Hydra,
    words: Sequence[str],
    folder: RunFolder,
    command: Command,
    *,
    source: Source,
    config: LaunchConfig,
    verbose: bool = False,
) -> int:
    """Runs every job of a sweep, each in a folder of its own.

    A failed job is named at once, and stops the others only with ``sweep.fail_fast``.

    It ends with a comparison of all jobs that ran: tables on the terminal, and ``sweep.*``.

    ``config``: of the first job: what is common to all.
    ``verbose``: leaves what jobs say where it is said.

    Returns:
        0 if all succeeded, else the first other code. A preempted job ends the sweep.
    """
    starter = JobStarter(hydra, words, folder, command)
    quiet = not verbose and config.cluster.name != "slurm"
    aside = min(config.sweep.parallel, source.total)
    view = RunningView(enabled=quiet and sys.stdout.isatty(), threaded=aside == 1)
    state = SweepState(folder.path, source, config, view, quiet=quiet)
    if source.total > 1 and (quiet or aside > 1):
        beside = "" if aside == 1 else f", {aside} side by side: their times are those of a share"
        say(f"{source.total} jobs in {folder.path}, each with an {OUTPUT}{beside}")
    with ExitStack() as stack:
        if aside > 1:
            pool = JobPool(starter, aside, state.begun, view.refresh)
            runner: Runner = stack.enter_context(pool)
        else:
            runner = InTurn(starter, state.begun, quiet=quiet)
        stack.enter_context(view)
        _run(source, runner, state)
    state.report(hurry=runner.interrupted)
    if runner.interrupted:
        raise KeyboardInterrupt
    return state.code()


def _run(source: Source, runner: Runner, state: SweepState) -> None:
    while True:
        while runner.free() and not (state.stopped or runner.interrupted):
            job = source.take()
            if job is None:
                break
            runner.start(*job)
        if not runner.busy():
            return
        for ended in runner.wait():
            state.ended(ended)
        if state.stopped and runner.busy():
            runner.stop()
