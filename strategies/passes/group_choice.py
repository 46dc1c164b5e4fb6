"""Chooses the group size N of ``schedule=foldx``: the least memory at the shortest time.

N interpolates between fifo (N = P) and aiao (N = M): the last group has to last as long as the
reductions that run under it, and every microbatch more in a group is held in memory. No closed form
covers uneven last groups, buckets and links, so the candidates are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from strategies.analysis.memory import peak_activations, peak_bytes
from strategies.costs.table import Costs
from strategies.ir.program import Program
from strategies.simulator.engine import simulate

# Above this many sizes only the smallest of those that give equally many groups are simulated:
# within them, a larger N holds more and leaves a shorter last group to hide reductions under.
_ALL = 32

# Times that differ by less are equal: sums of the same durations in another order.
_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Candidate:
    """One group size, simulated.

    Attributes:
        group: N.
        makespan: In the costs' time unit.
        peak: Activations on the worst rank, in full-rank microbatches.
        fits: Whether every rank stays below the memory limit.
    """

    group: int
    makespan: float
    peak: float
    fits: bool


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """What was chosen, and why."""

    chosen: Candidate
    candidates: tuple[Candidate, ...]  # All that were simulated, by N.

    @property
    def group(self) -> int:
        return self.chosen.group

    @property
    def reason(self) -> str:
        chosen = self.chosen
        fitting = [c for c in self.candidates if c.fits]
        text = (
            f"schedule.group={chosen.group}: makespan {chosen.makespan:.5g}, peak "
            f"{chosen.peak:.4g} microbatches"
        )
        if not fitting:
            return f"{text}; no group fits the memory limit, this one holds least"
        count = len(self.candidates)
        text += f"; the least memory at the shortest time of {count} simulated"
        largest = self.candidates[-1]
        if largest.group != chosen.group:
            text += f" (group={largest.group}: {largest.makespan:.5g}, {largest.peak:.4g})"
        refused = [c for c in self.candidates if not c.fits]
        return text + (f"; {len(refused)} above the memory limit" if refused else "")


def group_candidates(low: int, num_microbatches: int) -> list[int]:
    """The sizes from ``low`` to M that are worth simulating, ascending.

    >>> group_candidates(4, 6)
    [4, 5, 6]
    >>> group_candidates(8, 64)
    [8, 10, 11, 13, 16, 22, 32, 64]
    """
    groups = list(range(low, num_microbatches + 1))
    if len(groups) <= _ALL:
        return groups
    by_count = {-(-num_microbatches // group): group for group in reversed(groups)}
    return sorted(by_count.values())


def choose_group(
    groups: Iterable[int],
    build: Callable[[int], Program],
    costs: Costs,
    *,
    memory_bytes: int | None = None,
) -> GroupChoice:
    """Simulates every group and takes the one of least peak whose time is minimal.

    ``build`` makes the lowered training program of N. With a limit per rank the shortest time is
    that of the groups that fit; if none fits, the one of least peak is taken.
    """
    candidates = []
    for group in groups:
        program = build(group)
        held = [b for b in peak_bytes(program, costs.table(program)) if b is not None]
        candidates.append(
            Candidate(
                group=group,
                makespan=simulate(program, costs).makespan,
                peak=max(peak_activations(program, costs.table(program))),
                fits=memory_bytes is None or max(held, default=0) <= memory_bytes,
            )
        )
    fitting = [c for c in candidates if c.fits]
    if fitting:
        best = min(c.makespan for c in fitting)
        fitting = [c for c in fitting if c.makespan <= best * (1 + _SAME)]
    pool = fitting or candidates
    return GroupChoice(min(pool, key=lambda c: (c.peak, c.makespan, c.group)), tuple(candidates))
