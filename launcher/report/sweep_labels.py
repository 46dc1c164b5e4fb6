"""What tells the jobs of a sweep apart: the overrides whose values differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.report.sweep_job import SweepJob


@dataclass(frozen=True, slots=True)
class Sweep:
    """The jobs of a sweep that have ended, and what varies among all that were asked for.

    Attributes:
        jobs: In the order of running.
        num_jobs: How many were asked for; more than ``jobs`` where a sweep ended early.
        varied: Keys of overrides with more than one value, in the order of the command line.
        missing: What is said of the jobs that were asked for and are not here.
    """

    jobs: tuple[SweepJob, ...]
    num_jobs: int
    varied: tuple[str, ...]
    missing: str = "did not run"

    def label(self, job: SweepJob) -> str:
        """``schedule=1f1b pp=2``; all of its overrides where nothing varies."""
        given = override_values(job.overrides)
        keys = self.varied or tuple(key for key in given if key != "mode")
        words = [f"{key}={given[key]}" for key in keys if key in given]
        return " ".join(words) or f"job {job.index}"


def make_sweep(jobs: Sequence[SweepJob], asked: Sequence[Sequence[str]]) -> Sweep:
    """A sweep over the jobs that have ended.

    Args:
        jobs: In the order of running.
        asked: The overrides of every job on the command line.
    """
    values = [override_values(words) for words in asked]
    keys = list(dict.fromkeys(key for given in values for key in given))
    varied = tuple(key for key in keys if len({given.get(key) for given in values}) > 1)
    return Sweep(tuple(jobs), len(asked), varied)


def override_values(words: Sequence[str]) -> dict[str, str]:
    """``key=value`` words as a mapping; of a key that is given twice the last one counts."""
    pairs = (word.lstrip("+").partition("=") for word in words)
    return {key: value for key, _, value in pairs}
