"""A sweep: which job is next, what is said of each, and what is left however it ends.

Jobs run one after the other in this process, or side by side in processes of their own
(``launcher.compose.job_pool``). What a job says goes to ``output.txt`` in its folder; of each job
that has ended one line is printed, and the sweep ends with the comparison of all.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from omegaconf import DictConfig, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from launcher.checkpoints import newest_in
from launcher.commands.submit import submit_sweep
from launcher.compose.execute import Command, RunFolder, require_one_line
from launcher.compose.job_pool import JobPool
from launcher.compose.job_start import OUTPUT, Ended, InTurn, JobStarter
from launcher.compose.overrides import quote
from launcher.compose.running_view import RunningView
from launcher.config import LaunchConfig
from launcher.config.key import shorten
from launcher.report.sweep.files import job_line, report_so_far, report_sweep
from launcher.report.sweep.sweep_jobs import (
    OWN_FILES,
    Stamps,
    Sweep,
    SweepJob,
    ended_job,
    make_sweep,
    newest_record,
    read_record,
    write_record,
)
from launcher.report.typed_command import paste
from launcher.secrets import refuse_secret
from launcher.terminal import complain, say
from strategies.errors import PlanError

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

PREEMPTED, INTERRUPTED = 85, 130
_PLAIN = re.compile(r"[\w./-]+")  # a path that Hydra's grammar takes as it is
_FINISHED = {"done": 0, "pruned": 86}  # what is not run again, and its exit code


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
    """Every job of a list, but for those that an earlier sweep has finished."""

    def __init__(self, jobs: Sequence[Sequence[str]], past: Sequence[EarlierJob] = ()) -> None:
        self.total = len(jobs)
        self._jobs = jobs
        if past and [own_words(job.overrides) for job in past] != [*map(own_words, jobs)]:
            raise PlanError(_other_jobs([job.overrides for job in past], jobs))
        begun = {job.index: job for job in past}
        self._next = iter(
            (index, begun[index].words(words) if index in begun else words)
            for index, words in enumerate(jobs)
            if index not in begun or begun[index].done is None
        )

    def take(self) -> tuple[int, Sequence[str]] | None:
        return next(self._next, None)

    def tell(self, job: SweepJob) -> None:
        """Nothing is learnt from it."""

    def asked(self) -> Sequence[Sequence[str]]:
        return self._jobs


# A sweep that goes on: which of its jobs are done, and where the others left off. The words come
# from the command line again, never from the folder: a file must not choose what is run.


@dataclass(frozen=True, slots=True)
class EarlierJob:
    """A job of the record of an earlier sweep.

    Attributes:
        folder: None of one that had not begun.
        done: What it left, if it needs not be run again.
        checkpoint: The newest whole one that it has written; None where it starts anew.
    """

    index: int
    overrides: tuple[str, ...]
    folder: Path | None
    done: SweepJob | None
    checkpoint: Path | None

    def words(self, typed: Sequence[str]) -> list[str]:
        """With the checkpoint that it goes on from."""
        if self.checkpoint is None:
            return list(typed)
        kept = [word for word in typed if not word.startswith("trainer.resume=")]
        return [*kept, quote("trainer.resume", str(self.checkpoint))]


def resumed_folder(config: LaunchConfig, named: str | None) -> Path:
    """The folder of ``sweep.resume``.

    Raises:
        PlanError: It holds no sweep, another folder is named as well, or SLURM has its jobs.
    """
    asked = config.sweep.resume
    assert asked is not None
    if config.cluster.name == "slurm":
        raise PlanError(
            "sweep.resume starts jobs again that have ended here, and jobs of cluster=slurm are "
            "requeued by themselves. Try mode=collect, which tells how they stand."
        )
    place = Path(asked).expanduser()
    if asked == "auto":
        place = newest_record(Path("multirun"), key="sweep.resume")
    if named is not None and Path(named).absolute() != place.absolute():
        raise PlanError(
            f"sweep.resume={asked} writes into {place}, and hydra.sweep.dir names {named}. "
            "Try it without hydra.sweep.dir."
        )
    read_record(place.absolute(), key="sweep.resume")
    return place.absolute()


def earlier_jobs(folder: Path) -> tuple[EarlierJob, ...]:
    """All jobs of a sweep's record."""
    record = read_record(folder)
    return tuple(
        _earlier(index, words, record.folders.get(index))
        for index, words in enumerate(record.overrides)
    )


def _earlier(index: int, words: tuple[str, ...], folder: Path | None) -> EarlierJob:
    if folder is None:
        return EarlierJob(index, words, None, None, None)
    found = ended_job(index, folder, words, asked={}, before=(None, None), exit_code=0)
    status = str(found.result.get("status"))
    if status in _FINISHED:
        error = "" if status == "done" else str(found.result.get("error") or "")
        done = replace(found, status=status, exit_code=_FINISHED[status], error=error)
        return EarlierJob(index, words, folder, done, None)
    return EarlierJob(index, words, folder, None, newest_in(folder))


def own_words(words: Sequence[str]) -> tuple[str, ...]:
    """What makes a job this one: not how the sweep treats it, nor where it is written."""
    return tuple(word for word in words if not word.lstrip("+").startswith(("sweep.", "hydra.")))


def _other_jobs(before: Sequence[Sequence[str]], now: Sequence[Sequence[str]]) -> str:
    fix = "Try the words of that sweep, or a sweep of its own without sweep.resume."
    if len(before) != len(now):
        return f"sweep.resume: that sweep has {len(before)} jobs, and these words {len(now)}. {fix}"
    pairs = enumerate(zip(before, now, strict=True))
    index, (old, new) = next(
        pair for pair in pairs if own_words(pair[1][0]) != own_words(pair[1][1])
    )
    return (
        f"sweep.resume: job {index} of that sweep is {shorten(' '.join(own_words(old)))}, of these "
        f"words {shorten(' '.join(own_words(new)))}. {fix}"
    )


def check_subdirs(composed: Sequence[DictConfig], *, searched: bool) -> None:
    """Every job has a folder of its own, below the sweep's.

    ``composed``: each job's configuration; of a search the first one's, whose values are not yet
    known, so that only the job's number can tell its folders apart.

    Raises:
        PlanError: Two jobs would have one folder, one would lie outside or be a file of the sweep's
            own, or its name is no name.
    """
    fix = (
        "Try it without hydra.sweep.subdir, which numbers the jobs, or with "
        "'hydra.sweep.subdir=job_${hydra.job.num}'."
    )
    jobs: dict[str, int] = {}
    for number, config in enumerate([*composed, *composed] if searched else composed):
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra.job.num, config.hydra.job.id = number, str(number)
        try:
            subdir = str(config.hydra.sweep.subdir)
        except OmegaConfBaseException as error:
            first = str(error).splitlines()[0]
            raise PlanError(f"hydra.sweep.subdir cannot be resolved: {first}. {fix}") from None
        refuse_secret("hydra.sweep.subdir", subdir, place="the resolved folder")
        require_one_line("hydra.sweep.subdir", subdir)
        named = f"hydra.sweep.subdir={shorten(subdir)} of job {number}"
        place = os.path.normpath(subdir)
        if os.path.isabs(place) or place.split(os.sep)[0] == os.pardir:
            raise PlanError(f"{named} lies outside of the sweep's folder. {fix}")
        if (first := place.split(os.sep)[0]) in OWN_FILES:
            raise PlanError(f"{named}: {first} is a file that the sweep itself writes. {fix}")
        if place in jobs:
            raise PlanError(
                f"{named} is the folder of job {jobs[place]} as well, whose files it "
                f"would replace. {fix}"
            )
        jobs[place] = number


class SweepState:
    """What is known of a sweep while it runs, and what is printed and written of it."""

    def __init__(
        self, folder: Path, source: Source, config: LaunchConfig, view: RunningView,
        *, past: Sequence[EarlierJob], quiet: bool,
    ) -> None:  # fmt: skip
        self.jobs: dict[int, SweepJob] = {}
        self.stopped = False
        self.submits = config.cluster.name == "slurm"
        self._folder = folder
        self._source = source
        self._config = config
        self._view = view
        self._quiet = quiet
        self._since = time.time()  # one that goes on begins again
        self._begun: dict[int, tuple[Path, Stamps, float]] = {}
        for job in past:
            if job.folder is not None:
                self._begun[job.index] = job.folder, (None, None), time.monotonic()
            if job.done is not None:
                self.jobs[job.index] = job.done

    def begun(self, index: int, folder: Path, stamps: Stamps) -> None:
        """A job's folder is there, and nothing has run in it yet."""
        self._begun[index] = folder, stamps, time.monotonic()
        folders = {number: found for number, (found, _, _) in self._begun.items()}
        write_record(self._folder, self._source.asked(), folders, begun=self._since)
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
        elif not self.submits:
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

    def end(self, words: Sequence[str], *, hurry: bool = False) -> None:
        """Reports all jobs, and how those go on that have not ended."""
        self._report(hurry=hurry)
        left = not self.submits and len(self.jobs) < self._source.total
        if left or self._unfinished():
            say(f"to go on: {self._command(words)}")

    def _report(self, *, hurry: bool) -> None:
        if self.submits:
            if not hurry and not (self._config.sweep.fail_fast and self.code()):
                folders = [folder for _, (folder, _, _) in sorted(self._begun.items())]
                submit_sweep(self._folder, folders, self._config.cluster)
            place = f"sweep.dir={self._folder}"
            words = shlex.join(["python", "-m", "launcher", "mode=collect", place])
            say(f"to compare the jobs once they have ended: {words}")
        elif self.jobs:
            report_sweep(self._folder, self.sweep(), metric=self._config.sweep.metric, hurry=hurry)

    def _unfinished(self) -> bool:
        """Whether a job would go on, were the sweep typed again with sweep.resume."""
        return any(job.status in ("preempted", "interrupted") for job in self.jobs.values())

    def _command(self, words: Sequence[str]) -> str:
        """What is typed to go on."""
        dropped = ("sweep.resume=", "hydra.sweep.dir=", "hydra.searchpath=")
        kept = [word for word in words if not word.startswith(dropped)]
        some = next((folder for folder, _, _ in self._begun.values()), self._folder)
        here = Path.cwd()
        place = (
            self._folder.relative_to(here) if self._folder.is_relative_to(here) else self._folder
        )
        word = f"sweep.resume={place}"
        if not _PLAIN.fullmatch(str(place)):
            word = quote("sweep.resume", str(place))
        return paste(some, ["-m", *kept, word])

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
    past: Sequence[EarlierJob] = (),
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
    state = SweepState(folder.path, source, config, view, past=past, quiet=quiet)
    if past:
        again = sum(job.checkpoint is not None for job in past)
        done = f"{len(state.jobs)} of {source.total} jobs are done"
        say(f"goes on in {folder.path}: {done}, {again} from a checkpoint")
    if source.total > 1 and (quiet or aside > 1):
        beside = "" if aside == 1 else f", {aside} side by side: their times are those of a share"
        say(f"{source.total} jobs in {folder.path}, each with an {OUTPUT}{beside}")
    with ExitStack() as stack:
        if aside > 1:
            pool = JobPool(starter, aside, state.begun, view.refresh)
            runner: Runner = stack.enter_context(pool)
        else:
            runner = stack.enter_context(InTurn(starter, state.begun, quiet=quiet))
        try:
            with view:
                _run(source, runner, state)
        except KeyboardInterrupt:  # before any of them, or once more
            runner.interrupted = True
        if runner.interrupted:  # Signals are kept for later still: this is what is left of them.
            state.end(words, hurry=True)
    if runner.interrupted:
        raise KeyboardInterrupt
    state.end(words)
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
