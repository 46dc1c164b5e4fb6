"""Segments between critical values, and the graph as a chain of them.

A value is critical where nothing else goes from what is before it to what is behind it: the stream
between the layers of a transformer. For each state of a segment's ends its best options are found
once for all segments that are alike, so time grows with the number of unique layers; then dynamic
programming goes along the chain. Inside a segment the states of values that are alive are followed
cone by cone while they are few; else an integer program finds the best (``_solve_ilp``). Both are
exact, so the whole is.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

from strategies.errors import ModelError, PlanError, install_words
from strategies.planner.shardings.network import Cone, Cones, serves
from strategies.planner.shardings.operators import OperatorGraph
from strategies.planner.shardings.prices import Prices

Level = Literal["O2", "O3"]
States = tuple[str, ...]

# A stretch without a critical value that is longer than this is cut where two values are alive.
_LONGEST = 32
# States of all values that are alive, above which an integer program takes over.
_MOST_STATES = 512
# Ways to cut weights that several operators share, above which one program covers the graph.
_MOST_TIED = 32


class Found(NamedTuple):
    """A choice for each operator, and the seconds of all."""

    seconds: float
    picks: tuple[int, ...]


class _Way(NamedTuple):
    """Through a segment: seconds, and the option of each cone."""

    seconds: float
    options: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Segment:
    """Cones that follow each other, and the values that enter and leave, in one order."""

    start: int
    stop: int
    given: tuple[int, ...]
    left: tuple[int, ...]


class Search:
    """Finds the best plans of one graph; what it has once solved it keeps."""

    def __init__(self, graph: OperatorGraph, prices: Prices, *, level: Level = "O2") -> None:
        self.graph = graph
        self.prices = prices
        self.level = level
        self._ties = _ties(graph)
        self._program = level == "O3" or prod(len(keys) for _, keys in self._ties) > _MOST_TIED
        tied = [number for group, _ in self._ties for number in group] if self._program else ()
        self._cones = Cones(graph, prices, tied=tied)
        self._segments: list[_Segment] | None = None
        self._solved: dict[object, dict[States, _Way]] = {}

    @property
    def num_segments(self) -> int:
        return len(self._segments or ())

    def best(self, banned: Collection[tuple[int, int]] = ()) -> Found:
        """The cheapest plan without the (operator, choice) that are banned.

        Raises:
            ModelError: There is none.
            PlanError: An integer program is needed, and scipy is not installed.
        """
        if self._program:
            return self._by_program(banned)
        found = None
        for more in _tied_bans(self.graph, self._ties):
            try:
                tried = self._along(self._cones.all({*banned, *more}))
            except ModelError:
                continue
            if found is None or tried.seconds < found.seconds:
                found = tried
        if found is None:
            raise ModelError("nothing is left of the ways to cut this model.", fix="Use tp=1.")
        return found

    def _by_program(self, banned: Collection[tuple[int, int]]) -> Found:
        """One program for all."""
        apart = {
            (number, index)
            for group, keys in self._ties
            for number in group
            for index, choice in enumerate(self.graph.operators[number].choices)
            if _tie_key(self.graph, group, choice) not in keys
        }
        cones = self._cones.all({*banned, *apart})
        if not all(cone.options for cone in cones):
            raise ModelError("nothing is left of the ways to cut this model.", fix="Use tp=1.")
        equal = []
        place = {n: (c, cone.members.index(n)) for c, cone in enumerate(cones)
                 for n in cone.members}  # fmt: skip
        for group, keys in self._ties:
            for key in keys:
                sides = []
                for number in group:
                    cone, at = place[number]
                    choices = self.graph.operators[number].choices
                    sides.append(
                        [
                            (cone, o)
                            for o, option in enumerate(cones[cone].options)
                            if _tie_key(self.graph, group, choices[option.picks[at]]) == key
                        ]
                    )
                equal += [(sides[0], other) for other in sides[1:]]
        found = _solve_ilp(cones, {}, {}, equal)
        if found is None:
            raise ModelError("nothing is left of the ways to cut this model.", fix="Use tp=1.")
        seconds, options = found
        return Found(seconds, self._picks(cones, options))

    def _along(self, cones: list[Cone]) -> Found:
        if self._segments is None:
            self._segments = _cut(cones)
        alive: dict[States, tuple[float, tuple[object, ...]]] = {(): (0.0, ())}
        for segment in self._segments:
            grown: dict[States, tuple[float, tuple[object, ...]]] = {}
            part = cones[segment.start : segment.stop]
            key = _segment_key(part, segment)
            for states, (seconds, way) in alive.items():
                for left, step in self._table(key, part, segment, states).items():
                    total = seconds + step.seconds
                    if left not in grown or total < grown[left][0]:
                        grown[left] = (total, (way, step.options))
            alive = grown
        if not alive:
            raise ModelError("nothing is left of the ways to cut this model.", fix="Use tp=1.")
        seconds, way = min(alive.values(), key=lambda found: found[0])
        parts: list[tuple[int, ...]] = []
        while way:
            way, options = way  # type: ignore[assignment]
            parts.append(options)  # type: ignore[arg-type]
        return Found(seconds, self._picks(cones, [o for part in reversed(parts) for o in part]))

    def _table(
        self, key: object, cones: Sequence[Cone], segment: _Segment, states: States
    ) -> dict[States, _Way]:
        """From states of what enters to states of what leaves, and the best way there."""
        full = (key, states)
        if full not in self._solved:
            given = dict(zip(segment.given, states, strict=True))
            found = _followed(cones, given, segment.left)
            if found is None:
                found = _programmed(cones, given, segment.left)
            self._solved[full] = found
        return self._solved[full]

    def _picks(self, cones: Sequence[Cone], options: Sequence[int]) -> tuple[int, ...]:
        picks = [0] * len(self.graph.operators)
        for cone, option in zip(cones, options, strict=True):
            for number, choice in zip(cone.members, cone.options[option].picks, strict=True):
                picks[number] = choice
        return tuple(picks)


def _cut(cones: Sequence[Cone]) -> list[_Segment]:
    """At critical values; in long stretches without any, where two values are alive."""
    last = {value: place for place, cone in enumerate(cones) for value in cone.inputs}
    alive: list[int] = []
    frontiers: list[tuple[int, ...]] = []
    for place, cone in enumerate(cones):
        alive = [value for value in (*alive, *cone.outputs) if last.get(value, -1) > place]
        frontiers.append(tuple(alive))
    ends = [place for place, values in enumerate(frontiers) if len(values) <= 1]
    if not ends or ends[-1] != len(cones) - 1:
        ends.append(len(cones) - 1)
    found: list[_Segment] = []
    start = 0
    for end in ends:
        stops = [end]
        if end - start >= _LONGEST:
            stops = [p for p in range(start, end) if len(frontiers[p]) <= 2] + [end]
        for stop in stops:
            given = frontiers[start - 1] if start else ()
            found.append(_Segment(start, stop + 1, given, frontiers[stop]))
            start = stop + 1
    return found


def _segment_key(cones: Sequence[Cone], segment: _Segment) -> object:
    """Equal for segments with equal tables."""
    names: dict[int, int] = {}
    for value in segment.given:
        names.setdefault(value, len(names))
    parts = []
    for cone in cones:
        for value in (*cone.inputs, *cone.outputs):
            names.setdefault(value, len(names))
        parts.append(
            (
                id(cone.options),
                tuple(names[v] for v in cone.inputs),
                tuple(names[v] for v in cone.outputs),
            )
        )
    return tuple(parts), len(segment.given), tuple(names[v] for v in segment.left)


def _followed(
    cones: Sequence[Cone], given: dict[int, str], left: Sequence[int]
) -> dict[States, _Way] | None:
    """Cone by cone with the states of what is alive; None where these are too many."""
    last = {value: place for place, cone in enumerate(cones) for value in cone.inputs}
    last.update(dict.fromkeys(left, len(cones)))
    alive: dict[tuple[tuple[int, str], ...], _Way] = {tuple(sorted(given.items())): _Way(0.0, ())}
    for place, cone in enumerate(cones):
        grown: dict[tuple[tuple[int, str], ...], _Way] = {}
        for key, way in alive.items():
            states = dict(key)
            for number, option in enumerate(cone.options):
                if all(
                    serves(states[value], needed)
                    for value, needed in zip(cone.inputs, option.inputs, strict=True)
                ):
                    made = zip(cone.outputs, option.outputs, strict=True)
                    now = tuple(
                        sorted(
                            (v, s) for v, s in {**states, **dict(made)}.items()
                            if last.get(v, -1) > place
                        )
                    )  # fmt: skip
                    seconds = way.seconds + option.seconds
                    if now not in grown or seconds < grown[now].seconds:
                        grown[now] = _Way(seconds, (*way.options, number))
        if len(grown) > _MOST_STATES:
            return None
        alive = grown
    found: dict[States, _Way] = {}
    for key, way in alive.items():
        states = dict(key)
        found[tuple(states[value] for value in left)] = way
    return found


def _programmed(
    cones: Sequence[Cone], given: dict[int, str], left: Sequence[int]
) -> dict[States, _Way]:
    """One integer program for each combination of states of what leaves."""
    ends: list[dict[int, str]] = [{}]
    for value in left:
        maker = next((cone for cone in cones if value in cone.outputs), None)
        if maker is None:
            states = [given[value]]
        else:
            at = maker.outputs.index(value)
            states = sorted({option.outputs[at] for option in maker.options})
        ends = [{**end, value: state} for end in ends for state in states]
    found = {}
    for end in ends:
        solved = _solve_ilp(cones, given, end, ())
        if solved is not None:
            found[tuple(end[value] for value in left)] = _Way(solved[0], tuple(solved[1]))
    return found


# -- weights that several operators share ----------------------------------------------------------
#
# They are cut alike. Few of them (an embedding and its head) are tried in all ways, one after the
# other; where many layers are called again and again, one program knows about all.

Tie = tuple[tuple[int, ...], tuple[object, ...]]


def _ties(graph: OperatorGraph) -> list[Tie]:
    found = []
    for group in graph.tied():
        keys = None
        for number in group:
            own = {_tie_key(graph, group, c) for c in graph.operators[number].choices}
            keys = own if keys is None else keys & own
        found.append((group, tuple(sorted(keys or (), key=repr))))
    return found


def _tie_key(graph: OperatorGraph, group: Sequence[int], choice: object) -> object:
    one = len({graph.operators[n].name for n in group}) == 1
    own = choice.split_dim, choice.segments  # type: ignore[attr-defined]
    if not one:
        return own
    # One layer that is called again: it is turned into another one once.
    return (*own, choice.style, choice.whole_input, choice.whole_output)  # type: ignore[attr-defined]


def _tied_bans(graph: OperatorGraph, ties: Sequence[Tie]) -> list[set[tuple[int, int]]]:
    """What to leave out for each way to cut the shared weights."""
    found: list[set[tuple[int, int]]] = [set()]
    for group, keys in ties:
        grown = []
        for key in keys:
            banned = {
                (number, index)
                for number in group
                for index, choice in enumerate(graph.operators[number].choices)
                if _tie_key(graph, group, choice) != key
            }
            grown += [before | banned for before in found]
        found = grown
    return found


_SECONDS = 60.0

# Two sets of (cone, option) of which equally many are taken.
_Equal = tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]


def _solve_ilp(
    cones: Sequence[Cone],
    given: Mapping[int, str],
    left: Mapping[int, str],
    equal: Sequence[_Equal],
) -> tuple[float, list[int]] | None:
    """Seconds, and the option of each cone by an integer program; None where there is no way.

    One 0-1 variable for each option of a cone, one of which is taken. Where a cone needs a value in
    a state, its producer leaves it so: the options that need it are no more than those that serve.
    Solved by HiGHS through scipy, which is an extra.

    Args:
        cones: In their order.
        given: States of values that no cone makes.
        left: States that values have to be left in.
        equal: What has to be taken together.

    Raises:
        PlanError: scipy is not installed, or a minute is not enough.
    """
    optimize, sparse, numpy = _scipy()
    first, count = [], 0
    for cone in cones:
        first.append(count)
        count += len(cone.options)
    program = _Program(count)
    maker = {value: place for place, cone in enumerate(cones) for value in cone.outputs}
    for place, cone in enumerate(cones):
        program.add({first[place] + o: 1.0 for o in range(len(cone.options))}, 1.0, 1.0)
        for at, value in enumerate(cone.inputs):
            for needed in sorted({option.inputs[at] for option in cone.options}):
                users = {
                    first[place] + o: 1.0
                    for o, option in enumerate(cone.options)
                    if option.inputs[at] == needed
                }
                if value in maker:
                    source = cones[maker[value]]
                    slot = source.outputs.index(value)
                    for o, option in enumerate(source.options):
                        if serves(option.outputs[slot], needed):
                            users[first[maker[value]] + o] = -1.0
                    program.add(users, -numpy.inf, 0.0)
                elif not serves(given[value], needed):
                    program.add(users, 0.0, 0.0)
        for at, value in enumerate(cone.outputs):
            if value in left:
                others = {
                    first[place] + o: 1.0
                    for o, option in enumerate(cone.options)
                    if option.outputs[at] != left[value]
                }
                program.add(others, 0.0, 0.0)
    for one, other in equal:
        row = {first[c] + o: 1.0 for c, o in one}
        for c, o in other:
            row[first[c] + o] = row.get(first[c] + o, 0.0) - 1.0
        program.add(row, 0.0, 0.0)
    costs = numpy.array([option.seconds for cone in cones for option in cone.options])
    scale = float(costs.max()) or 1.0
    result = optimize.milp(
        costs / scale,
        constraints=optimize.LinearConstraint(
            sparse.csr_array((program.data, (program.rows, program.columns)),
                             shape=(len(program.lows), count)),
            program.lows, program.highs,
        ),
        integrality=numpy.ones(count),
        bounds=optimize.Bounds(0.0, 1.0),
        options={"time_limit": _SECONDS, "mip_rel_gap": 1e-9},
    )  # fmt: skip
    if result.status == 2:  # infeasible
        return None
    if result.x is None or result.status != 0:
        raise PlanError(
            f"{len(cones)} groups of operators in one program, which took longer than "
            f"{_SECONDS:g} s. Try planner.level=O2, or tensor_parallel_plan() by hand."
        )
    options = [
        max(range(len(cone.options)), key=lambda o, p=place: result.x[first[p] + o])  # type: ignore[misc]
        for place, cone in enumerate(cones)
    ]
    seconds = sum(cone.options[o].seconds for cone, o in zip(cones, options, strict=True))
    return seconds, options


class _Program:
    """Rows of a sparse matrix with their bounds."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.data: list[float] = []
        self.lows: list[float] = []
        self.highs: list[float] = []

    def add(self, row: Mapping[int, float], low: float, high: float) -> None:
        for column, value in row.items():
            self.rows.append(len(self.lows))
            self.columns.append(column)
            self.data.append(value)
        self.lows.append(low)
        self.highs.append(high)


def _scipy() -> tuple[Any, Any, Any]:
    """scipy.optimize, scipy.sparse and numpy, only where they are needed."""
    try:
        names = ("scipy.optimize", "scipy.sparse", "numpy")
        optimize, sparse, numpy = map(importlib.import_module, names)
    except ImportError as error:
        raise PlanError(
            "this model's shardings need an integer program, which needs scipy, which is not "
            f"installed. Try {install_words('scipy')}, or tensor_parallel_plan() by hand."
        ) from error
    return optimize, sparse, numpy
