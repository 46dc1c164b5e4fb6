"""Which stage hands which tensor to which: a long skip goes past the stages that do not use it.

A tensor that crosses cuts is handed from its maker to the first stage that uses it, from there to
the next one, and so on: what every stage uses (a mask) goes along the chain, a U-Net's skip goes
straight from one arm to the other, and neither is kept where nobody needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from strategies.runtime.replay.path import Boundary, Cut, Key

Ends = tuple[Cut, Cut | None]
Link = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Routes:
    """What each stage takes and gives.

    Attributes:
        cuts: Per stage its two ends, with the tensors it is handed (by source, then as made) and
            those it hands on (by target, then as made).
        groups: Per stage, how many of its outputs go to which stage.
    """

    cuts: tuple[Ends, ...]
    groups: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def skips(self) -> tuple[Link, ...]:
        """Pairs of stages that are no neighbours and between which something travels."""
        found = {
            (stage, target)
            for stage, groups in enumerate(self.groups)
            for target, _ in groups
            if target > stage + 1
        }
        return tuple(sorted(found))


def make_routes(cuts: Sequence[Ends], *, allowed: Sequence[Link] | None = None) -> Routes:
    """Finds the way of each tensor.

    Args:
        cuts: Per stage its two ends, each with everything that crosses there.
        allowed: Pairs of stages that may skip others; None for all. Programs are made for the step
            that was probed first; tensors of other steps go along the chain where it has no link.
    """
    crossing: dict[Key, dict[int, Boundary]] = {}  # per tensor: stage that it leaves -> boundary
    for stage, (_, leave) in enumerate(cuts[:-1]):
        assert leave is not None
        for boundary in leave.tensors:
            crossing.setdefault(boundary.key, {})[stage] = boundary
    taken: list[list[tuple[int, Boundary]]] = [[] for _ in cuts]
    given: list[list[tuple[int, Boundary]]] = [[] for _ in cuts]
    for left in crossing.values():
        holders = _holders(left, cuts, allowed)
        for source, target in pairwise(holders):
            given[source].append((target, left[source]))
            taken[target].append((source, left[target - 1]))
    found = []
    groups = []
    for stage, (entry, leave) in enumerate(cuts):
        own, others = (sorted(part, key=_first) for part in (taken[stage], given[stage]))
        entry = replace(entry, tensors=tuple(boundary for _, boundary in own))
        if leave is not None:
            leave = replace(leave, tensors=tuple(boundary for _, boundary in others))
        found.append((entry, leave))
        targets = [target for target, _ in others]
        groups.append(tuple((target, targets.count(target)) for target in sorted({*targets})))
    return Routes(tuple(found), tuple(groups))


def _holders(
    left: dict[int, Boundary], cuts: Sequence[Ends], allowed: Sequence[Link] | None
) -> list[int]:
    """The tensor's maker and the stages that it is handed to, in order."""
    maker, last = min(left), max(left) + 1
    wanted = [maker, *(s for s in range(maker + 1, last) if _holds(left[s - 1], cuts[s])), last]
    if allowed is None:
        return wanted
    holders = [maker]
    for source, target in pairwise(wanted):
        direct = (source, target) in allowed
        holders += [target] if direct else range(source + 1, target + 1)
    return holders


def _holds(boundary: Boundary, ends: Ends) -> bool:
    """Whether a stage uses a tensor that crosses both of its ends, or must pass it on itself."""
    entry, leave = ends
    if leave is None or entry.position == leave.position or boundary.changed:
        # A stage without layers hands on what it gets; a tensor that is written to has one way.
        return True
    return any(entry.clock < clock <= leave.clock for clock in boundary.uses)


def _first(entry: tuple[int, Boundary]) -> int:
    return entry[0]
