"""``-m sweep.trials=20``: jobs that learn from the ones before, chosen by Optuna.

Optuna itself and not Hydra's plugin for it: the plugin's release for Hydra 1.3 needs an Optuna
before 3, and instantiates classes that a configuration names. Akiba et al., 2019,
https://arxiv.org/abs/1907.10902; the sampler is the tree-structured Parzen estimator.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import IntervalSweep, Override

from launcher.compose.overrides import MAX_JOBS, as_typed
from launcher.config import LaunchConfig
from launcher.config.key import shorten
from strategies.errors import PlanError, install_words

if TYPE_CHECKING:
    from launcher.compose.multirun import EarlierJob
    from launcher.report.sweep.sweep_jobs import SweepJob


def check_search(config: LaunchConfig) -> None:
    if config.cluster.name == "slurm":
        raise PlanError(
            f"{TRIALS}={config.sweep.trials} chooses each job by the results of those before, and "
            "cluster=slurm only submits them. Try it inside a job with cluster=local, or a list of "
            "values without it."
        )
    _optuna()


class Search:
    """The trials of a search, each chosen when there is room for it."""

    def __init__(self, space: Space, config: LaunchConfig, past: Sequence[EarlierJob] = ()) -> None:
        optuna = _optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # Trials that still run count as bad ones, or those beside them would be the same.
        aside = config.sweep.parallel > 1
        # A search that goes on must not begin with the same random trials.
        seed = config.seed + len(past)
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=aside)
        self._study = optuna.create_study(sampler=sampler, direction="minimize")
        self._states = optuna.trial.TrialState
        trials = config.sweep.trials
        assert trials is not None
        self.total = trials
        self._space = space
        self._asked: list[list[str]] = []
        self._trials: dict[int, Any] = {}
        self._goal = _Goal(config.sweep.metric, [axis.key for axis in space.axes])
        self._again: list[EarlierJob] = []
        for job in past:
            self._remember(job)

    def _remember(self, job: EarlierJob) -> None:
        """A trial of the search that this one goes on with."""
        from launcher.compose.multirun import own_words  # Only a sweep needs it.

        given = dict(word.split("=", 1) for word in job.overrides)
        if any(axis.key not in given for axis in self._space.axes) or not {
            *own_words(self._space.fixed)
        } <= {*job.overrides}:
            words = shorten(" ".join(own_words(job.overrides)))
            raise PlanError(
                f"sweep.resume: job {job.index} of that sweep is {words}, which these words do "
                "not search among. "
                "Try the words of that sweep, or a sweep of its own without sweep.resume."
            )
        self._study.enqueue_trial({a.key: a.value(given[a.key]) for a in self._space.axes})
        self._asked.append(list(job.overrides))
        if job.done is None:
            self._again.append(job)
        trial = self._trials[job.index] = self._study.ask()
        for axis in self._space.axes:
            _ask(trial, axis)
        if job.done is not None:
            self.tell(job.done)

    def take(self) -> tuple[int, Sequence[str]] | None:
        if self._again:
            job = self._again.pop(0)
            return job.index, job.words(job.overrides)
        index = len(self._asked)
        if index == self.total:
            return None
        trial = self._trials[index] = self._study.ask()
        self._asked.append([*self._space.fixed, *(_ask(trial, axis) for axis in self._space.axes)])
        return index, self._asked[index]

    def tell(self, job: SweepJob) -> None:
        trial, value = self._trials.pop(job.index), self._goal.value(job)
        if value is not None:
            self._study.tell(trial, value)
        else:
            pruned = job.status == "pruned"
            self._study.tell(trial, state=self._states.PRUNED if pruned else self._states.FAIL)

    def asked(self) -> Sequence[Sequence[str]]:
        return self._asked


class _Goal:
    """A figure that is to become small; which one is decided by the first job that is done."""

    def __init__(self, metric: str, keys: Sequence[str]) -> None:
        from launcher.report.sweep.sweep_figures import figures_for

        self._figures = figures_for(metric, keys)

    def value(self, job: SweepJob) -> float | None:
        if job.status != "done":
            return None
        for figure in self._figures:
            value = figure.value(job)
            if value is not None:
                self._figures = (figure,)
                return -value if figure.better == "high" else float(value)
        return None


def _ask(trial: Any, axis: Axis) -> str:  # noqa: ANN401 -- Optuna is optional
    if axis.choices:
        return axis.word(trial.suggest_categorical(axis.key, axis.choices))
    if axis.whole:
        low, high = math.ceil(axis.low), math.floor(axis.high)
        return axis.word(trial.suggest_int(axis.key, low, high, log=axis.log))
    value = trial.suggest_float(axis.key, axis.low, axis.high, log=axis.log)
    return axis.word(f"{value:.6g}")


def _optuna() -> Any:  # noqa: ANN401 -- Optuna is optional
    try:
        return importlib.import_module("optuna")
    except ImportError:
        raise PlanError(
            f"{TRIALS} needs the package optuna. Try {install_words('optuna')}, or lists of "
            f"values without {TRIALS}."
        ) from None


# What a search varies: the sweep overrides of a command line as axes. Knows no optimizer.
#
# ``pp=1,2`` and ``range(1,5)`` are choices; ``interval(1e-4,1e-2)``, ``tag(log, interval(...))``
# and ``int(interval(1,8))`` are intervals.

TRIALS = "sweep.trials"


@dataclass(frozen=True, slots=True)
class Axis:
    """One key that a search sets.

    Attributes:
        choices: Values as typed; empty for an interval.
        log: Whether the logarithm is what matters.
        whole: Whether only whole numbers count.
    """

    key: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    def value(self, text: str) -> str | int | float:
        """What a word of an earlier trial stands for, inside the bounds."""
        if self.choices:
            return text
        if self.whole:
            return int(text)
        return min(max(float(text), self.low), self.high)

    def word(self, value: object) -> str:
        return f"{self.key}={value}"

    @property
    def ends(self) -> tuple[str, str]:
        if self.choices:
            return self.word(self.choices[0]), self.word(self.choices[-1])
        low, high = (int(self.low), int(self.high)) if self.whole else (self.low, self.high)
        return self.word(low), self.word(high)


@dataclass(frozen=True, slots=True)
class Space:
    """All axes, in the order of the command line, and the words that all trials share."""

    fixed: tuple[str, ...]
    axes: tuple[Axis, ...]

    def corners(self) -> list[list[str]]:
        """Two jobs that can be checked before the first trial: all first and all last values."""
        return [[*self.fixed, *(axis.ends[end] for axis in self.axes)] for end in (0, 1)]


def asks_for_trials(words: Sequence[str]) -> bool:
    """Whether a command line wants a search and not every combination."""
    given = [word.partition("=")[2] for word in words if word.partition("=")[0] == TRIALS]
    return bool(given) and given[-1] != "null"


def find_space(overrides: Iterable[Override]) -> Space:
    """The space of a command line."""
    fixed: list[str] = []
    axes: list[Axis] = []
    for override in overrides:
        name = override.get_key_element()
        if not override.is_sweep_override():
            fixed.append(f"{name}={as_typed(override.get_value_element_as_str())}")
        elif override.is_discrete_sweep():
            found = itertools.islice(override.sweep_string_iterator(), MAX_JOBS)
            values = tuple(map(as_typed, found))
            axes.append(Axis(name, choices=values))
        else:
            axes.append(_interval(name, override))
    if not axes:
        raise PlanError(
            f"{TRIALS} searches among values, and no key has more than one. "
            "Try optimizer.lr='interval(1e-4,1e-2)', or schedule=1f1b,foldx_fifo."
        )
    return Space(tuple(fixed), tuple(axes))


def _interval(name: str, override: Override) -> Axis:
    value = override.value()
    assert isinstance(value, IntervalSweep)
    low, high, log = float(value.start or 0), float(value.end or 0), "log" in value.tags
    if not low < high or (log and low <= 0):
        rule = "0 < low < high" if log else "low < high"
        raise PlanError(
            f"{shorten(override.input_line)}: expected {rule}. "
            f"Try {name}='tag(log, interval(1e-4,1e-2))'."
        )
    whole = isinstance(value.start, int) and isinstance(value.end, int)
    return Axis(name, low=low, high=high, log=log, whole=whole)
