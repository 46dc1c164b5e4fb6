"""Stages on a path: which calls, cuts and parameters each stage has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter

from strategies.errors import ModelError
from strategies.models.replay.path import Boundary, Cut, Key, Path, used_parameters


@dataclass(frozen=True, slots=True)
class Layout:
    """How one step is divided.

    Attributes:
        calls: Unit calls of every stage.
        cuts: Per stage the cut where it begins and the one where it ends (None: the step's end).
        parameters: Per stage the global names of its parameters, in order of use.
        groups: Per stage, how many of the tensors that it hands on go to which stage.
        skips: Pairs of stages that are no neighbours and between which tensors travel.
    """

    calls: tuple[range, ...]
    cuts: tuple[tuple[Cut, Cut | None], ...]
    parameters: tuple[tuple[str, ...], ...]
    groups: tuple[tuple[tuple[int, int], ...], ...]
    skips: tuple[tuple[int, int], ...]


def group_calls(path: Path) -> tuple[range, ...]:
    """Joins calls between which no cut is possible."""
    starts = [call for call in range(len(path.calls)) if isinstance(path.cuts[call], Cut)]
    ends = [*starts[1:], len(path.calls)] if starts else []
    return tuple(range(start, end) for start, end in zip(starts, ends, strict=True))


def first_layout(
    path: Path, groups: Sequence[range], stages: Sequence[range], names: Sequence[str], step: str
) -> Layout:
    """Divides the step that was probed first; every parameter gets at least one stage.

    ``groups`` has the calls of every unit, ``stages`` the units of every stage, contiguous, maybe
    empty; ``names`` are all parameters' in registration order.
    """
    position = 0
    calls = []
    for stage in stages:
        end = groups[stage.stop - 1].stop if stage else position
        calls.append(range(position, end))
        position = end
    layout = _layout(path, calls, step)
    parameters = [dict.fromkeys(used) for used in layout.parameters]
    # What this step never uses may serve validation: it stays with its neighbours.
    owner = 0
    for name in names:
        users = [stage for stage, used in enumerate(layout.parameters) if name in used]
        if users:
            owner = users[0]
        else:
            parameters[owner][name] = None
    return replace(layout, parameters=tuple(tuple(used) for used in parameters))


def follow_layout(path: Path, layout: Layout, step: str) -> Layout:
    """Divides another step so that every call runs on a stage that owns its parameters.

    Raises:
        ModelError: If its layers do not run in the order of the stages.
    """
    owners = [frozenset(used) for used in layout.parameters]
    stage = 0
    stage_of = []
    for index, call in enumerate(path.calls):
        possible = [s for s, names in enumerate(owners) if names >= set(call.parameters)]
        later = [s for s in possible if s >= stage]
        if not later:
            where = f"stage {possible[0]}" if possible else "several stages"
            raise ModelError(
                f"{call.line}: {step} calls {path.name(index)}, which is on {where}, "
                f"after layers of stage {stage}. Every step must run the layers in the order of "
                "the first one, which stages are made for; where one goes through the network once "
                "more, let the first one do so, too (and multiply by zero), or let it keep what "
                "the first call gave. Generation loops and the like need pp=1."
            )
        stage = later[0]
        stage_of.append(stage)
    calls = []
    position = 0
    for number in range(len(layout.calls)):
        end = position + stage_of.count(number)
        calls.append(range(position, end))
        position = end
    divided = _layout(path, calls, step, allowed=layout.skips)
    for number, names in enumerate(divided.parameters):
        missing = [name for name in names if name not in owners[number]]
        if missing:
            raise ModelError(
                f"{step} uses {missing[0]} on stage {number}, which does not have it: "
                "its layers are on other stages only. Use it between the same layers in "
                "every step, or pp=1."
            )
    return replace(divided, parameters=layout.parameters)


def same_layout(path: Path, layout: Layout, step: str) -> Layout:
    """Divides a step that was probed again, with other gradients, where it was divided.

    Raises:
        ModelError: If other tensors would have to cross its cuts.
    """
    divided = _layout(path, layout.calls, step, allowed=layout.skips)
    if divided.groups != layout.groups:
        raise ModelError(
            f"{step} hands other tensors from stage to stage since parameters were frozen or "
            "unfrozen. Use the same values in every step, freeze before fit(), or use pp=1."
        )
    return replace(divided, parameters=layout.parameters)


def _layout(
    path: Path,
    calls: Sequence[range],
    step: str,
    *,
    allowed: Sequence[tuple[int, int]] | None = None,
) -> Layout:
    num_calls = len(path.calls)
    last = len(calls) - 1
    cuts: list[tuple[Cut, Cut | None]] = []
    parameters = []
    for stage, own in enumerate(calls):
        entry = _cut(path, own.start if stage else 0, step)
        leave = None if stage == last else _cut(path, own.stop, step)
        cuts.append((entry, leave))
        end = (num_calls, len(path.events[num_calls])) if leave is None else leave.position
        start = (0, -1) if stage == 0 else entry.position
        parameters.append(used_parameters(path, start, end, own))
    routes = make_routes(cuts, allowed=allowed)
    return Layout(tuple(calls), routes.cuts, tuple(parameters), routes.groups, routes.skips)


def _cut(path: Path, call: int, step: str) -> Cut:
    cut = path.cuts[call]
    if isinstance(cut, str):
        raise ModelError(
            f"{step} cannot be cut before {path.name(call)} ({path.calls[call].line}): {cut}. "
            "Choose other stages with schedule.layers_per_stage."
        )
    return cut


# -- routes: which stage hands which tensor to which ----------------------------------------------
#
# A tensor that crosses cuts is handed from its maker to the first stage that uses it, from there to
# the next one, and so on: what every stage uses (a mask) goes along the chain, a U-Net's skip goes
# straight from one arm to the other, and neither is kept where nobody needs it.

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
        found = {
            (stage, target)
            for stage, groups in enumerate(self.groups)
            for target, _ in groups
            if target > stage + 1
        }
        return tuple(sorted(found))


def make_routes(cuts: Sequence[Ends], *, allowed: Sequence[Link] | None = None) -> Routes:
    """Finds the way of each tensor, from each stage's two ends with everything that crosses there.

    ``allowed`` are the pairs of stages that may skip others; None for all. Programs are made for
    the step that was probed first; tensors of other steps go along the chain without such a link.
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
        own, others = (sorted(part, key=itemgetter(0)) for part in (taken[stage], given[stage]))
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
