"""A profile in the planner's terms: which units it has figures for, under which conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from strategies.costs.analytic import AnalyticCosts
from strategies.costs.profile import Profile, Seconds, SizeProfile
from strategies.costs.profiled import ProfiledCosts

PlannedCosts = AnalyticCosts | ProfiledCosts
"""What a candidate's cut takes, computed or measured."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured layers and links.

    Attributes:
        profile: The measurement.
        classes: Per unit of the model, its class: an index into ``profile.classes``.
        tp: Ranks that shared matrices when it was made; no other degree is known.
        selective: Whether layers recomputed parts of themselves.
    """

    profile: Profile
    classes: tuple[int, ...]
    tp: int
    selective: bool

    @property
    def sizes(self) -> range:
        """Microbatch sizes that it can tell: those between two that were measured."""
        numbers = [number for number, _ in self.profile.sizes]
        return range(min(numbers), max(numbers) + 1)

    @property
    def error(self) -> float | None:
        """The largest of its microbatch sizes; None where none is known."""
        return max(self.profile.errors, default=None)

    def costs(
        self,
        assumed: AnalyticCosts,
        stages: Sequence[range],
        microbatch_size: int,
        *,
        fixed: bool = True,
    ) -> ProfiledCosts:
        """The costs of a cut.

        Args:
            assumed: Of the same cut, for what was not measured.
            stages: Ranges of units.
            microbatch_size: Sequences.
            fixed: Whether stages take something by themselves; not for comparing units.
        """
        classes = tuple(tuple(self.classes[unit] for unit in stage) for stage in stages)
        profile = self.profile if fixed else _units_alone(self.profile)
        return ProfiledCosts(profile, classes, microbatch_size, assumed)


def _units_alone(profile: Profile) -> Profile:
    sizes = tuple(
        (number, SizeProfile(Seconds(), figures.units, figures.error))
        for number, figures in profile.sizes
    )
    return replace(profile, sizes=sizes, rest_s=0.0)
