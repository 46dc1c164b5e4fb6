"""What a search varies: the sweep overrides of a command line as axes. Knows no optimizer.

``pp=1,2`` and ``range(1,5)`` are choices; ``interval(1e-4,1e-2)``, ``tag(log, interval(...))`` and
``int(interval(1,8))`` are intervals.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.types import IntervalSweep, Override

from launcher.compose.overrides import MAX_JOBS
from launcher.config.key import shorten
from strategies.errors import PlanError

TRIALS = "sweep.trials"


@dataclass(frozen=True, slots=True)
class Axis:
    """One key that a search sets.

    Attributes:
        key: Dotted name.
        choices: Values as typed; empty for an interval.
        low: Lower end of an interval.
        high: Upper end.
        log: Whether the logarithm is what matters.
        whole: Whether only whole numbers count.
    """

    key: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    def word(self, value: object) -> str:
        """``key=value``."""
        return f"{self.key}={value}"

    @property
    def ends(self) -> tuple[str, str]:
        """The words of its first and last value."""
        if self.choices:
            return self.word(self.choices[0]), self.word(self.choices[-1])
        low, high = (int(self.low), int(self.high)) if self.whole else (self.low, self.high)
        return self.word(low), self.word(high)


@dataclass(frozen=True, slots=True)
class Space:
    """All axes, and what all trials share.

    Attributes:
        fixed: ``key=value`` words of every trial.
        axes: In the order of the command line.
    """

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
    """The space of a command line.

    Raises:
        PlanError: Nothing varies, or an interval is empty.
    """
    fixed: list[str] = []
    axes: list[Axis] = []
    for override in overrides:
        name = override.get_key_element()
        if not override.is_sweep_override():
            fixed.append(f"{name}={override.get_value_element_as_str()}")
        elif override.is_discrete_sweep():
            values = tuple(itertools.islice(override.sweep_string_iterator(), MAX_JOBS))
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
