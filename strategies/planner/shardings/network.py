"""The search's own view of an operator graph: values with states, operators with priced options.

A *cone* is an operator with a choice of its own and what hangs on it: operators that read one value
only, and that follow from what stands above them. Its options are found by dynamic programming and
are as many as there are states at its ends, so the levels above see a fifth of the operators
(TePDist, https://github.com/alibaba/TePDist, has the same three levels: cones, segments, graph).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from strategies.planner.shardings.operators import ENTERED, WHOLE, OperatorGraph
from strategies.planner.shardings.prices import Prices


class Option(NamedTuple):
    """One way to run a cone.

    Attributes:
        inputs: States that it needs of the cone's inputs; ``E`` serves where ``R`` is needed.
        outputs: States of the values that other cones read.
        seconds: Of all its operators.
        picks: The number of each operator's choice.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    seconds: float
    picks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cone:
    """Operators that are decided together.

    Attributes:
        root: The first of them.
        members: All of them; options pick by their place here.
        inputs: Values that it reads.
        outputs: Values that others read.
        kind: Equal for cones with equal options.
    """

    root: int
    members: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: tuple[Option, ...]
    kind: object


def serves(state: str, needed: str) -> bool:
    """Whether a value in a state is what an operator needs."""
    return state == needed or (state == ENTERED and needed == WHOLE)


class Cones:
    """All cones of a graph; those with equal options share them.

    Of options with equal ends the cheapest stays; but all choices of the ``tied`` operators do,
    which something else than their ends decides about.
    """

    def __init__(self, graph: OperatorGraph, prices: Prices, *, tied: Collection[int] = ()) -> None:
        self._graph = graph
        self._prices = prices
        self._tied = frozenset(tied)
        self._known: dict[object, tuple[Option, ...]] = {}
        self._entered = {
            number
            for operator in graph.operators
            for choice in operator.choices
            for number, state in zip(operator.inputs, choice.inputs, strict=True)
            if state == ENTERED
        }
        self.root_of = _roots(graph)
        self._members: dict[int, list[int]] = {}
        for number, root in enumerate(self.root_of):
            self._members.setdefault(root, []).append(number)
        self._shown = _shown(graph, self.root_of)

    def all(self, banned: Collection[tuple[int, int]] = ()) -> list[Cone]:
        """In the order of their roots; without the (operator, choice) that are banned."""
        without: dict[int, set[tuple[int, int]]] = {}
        for number, choice in banned:
            without.setdefault(self.root_of[number], set()).add((number, choice))
        return [self._cone(root, without.get(root, set())) for root in self._members]

    def _cone(self, root: int, banned: set[tuple[int, int]]) -> Cone:
        own = self._members[root]
        shown = self._shown.get(root, ())
        kind = self._kind(own, shown, banned)
        if kind not in self._known:
            self._known[kind] = tuple(self._options(own, shown, banned))
        inputs = tuple(dict.fromkeys(self._graph.operators[root].inputs))
        return Cone(root, tuple(own), inputs, shown, self._known[kind], kind)

    def _options(
        self, own: Sequence[int], shown: Sequence[int], banned: set[tuple[int, int]]
    ) -> Iterable[Option]:
        """Operator by operator; of equal ends the cheapest stays."""
        operators = self._graph.operators
        names = tuple(dict.fromkeys(operators[own[0]].inputs))
        last_use = {v: place for place, n in enumerate(own) for v in operators[n].inputs}
        start: tuple[dict[int, str], Option] = ({}, Option((), (), 0.0, ()))
        alive = [start]
        for place, number in enumerate(own):
            operator = operators[number]
            best: dict[object, tuple[dict[int, str], Option]] = {}
            for states, option in alive:
                for index, choice in enumerate(operator.choices):
                    if (number, index) in banned:
                        continue
                    pairs = list(zip(operator.inputs, choice.inputs, strict=True))
                    inputs = option.inputs
                    if place == 0:
                        needs: dict[int, str] = {}
                        if not all(_agree(needs, v, s) for v, s in pairs):
                            continue
                        inputs = tuple(needs[v] for v in names)
                    elif not all(serves(states[v], s) for v, s in pairs):
                        continue
                    seconds = option.seconds + self._prices.worth(number, operator, choice)
                    for made, more in self._made(operator.outputs, choice.outputs):
                        now = {
                            v: s
                            for v, s in {**states, **made}.items()
                            if v in shown or last_use.get(v, -1) > place
                        }
                        new = Option(inputs, (), seconds + more, (*option.picks, index))
                        kept = tuple(
                            pick for n, pick in zip(own, new.picks, strict=False) if n in self._tied
                        )
                        key = (inputs, tuple(sorted(now.items())), kept)
                        if key not in best or new.seconds < best[key][1].seconds:
                            best[key] = (now, new)
            alive = list(best.values())
        for states, option in alive:
            yield option._replace(outputs=tuple(states[v] for v in shown))

    def _made(
        self, values: Sequence[int], states: Sequence[str]
    ) -> list[tuple[dict[int, str], float]]:
        """States of an operator's outputs: whole ones may be entered, which costs a message."""
        found: list[tuple[dict[int, str], float]] = [({}, 0.0)]
        for value, state in zip(values, states, strict=True):
            grown = [({**made, value: state}, cost) for made, cost in found]
            if state == WHOLE and value in self._entered:
                price = self._prices.entrance(self._graph.values[value])[0]
                grown += [({**made, value: ENTERED}, cost + price) for made, cost in found]
            found = grown
        return found

    def _kind(
        self, own: Sequence[int], shown: Sequence[int], banned: set[tuple[int, int]]
    ) -> object:
        places: dict[int, int] = {}
        parts: list[object] = []
        for number in own:
            operator = self._graph.operators[number]
            values = (*operator.inputs, *operator.outputs)
            for value in values:
                places.setdefault(value, len(places))
            parts.append(
                (
                    id(operator.choices),
                    tuple(places[v] for v in values),
                    tuple(v in self._entered for v in operator.outputs),
                    tuple(self._graph.values[v] for v in operator.outputs),
                    operator.product,
                    operator.flops,
                    operator.moved,
                    operator.weights,
                    number in self._prices.light,
                    number in self._tied,
                    tuple(index for n, index in banned if n == number),
                )
            )
        return tuple(parts), tuple(places[v] for v in shown)


def _roots(graph: OperatorGraph) -> list[int]:
    """The root of each operator's cone.

    What reads a value that others read, too, is a root: their states would multiply.
    """
    producer: dict[int, int] = {}
    readers: dict[int, int] = {}
    for operator in graph.operators:
        for value in set(operator.inputs):
            readers[value] = readers.get(value, 0) + 1
    found: list[int] = []
    for number, operator in enumerate(graph.operators):
        root = number
        read = set(operator.inputs)
        if operator.kind is None and len(read) == 1 and readers[next(iter(read))] == 1:
            above = producer.get(next(iter(read)))
            if above is not None:
                root = found[above]
        found.append(root)
        producer.update(dict.fromkeys(operator.outputs, number))
    return found


def _shown(graph: OperatorGraph, root_of: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """By root: values that other cones read."""
    maker = {v: root_of[n] for n, o in enumerate(graph.operators) for v in o.outputs}
    found: dict[int, set[int]] = {}
    for number, operator in enumerate(graph.operators):
        for value in operator.inputs:
            if value in maker and maker[value] != root_of[number]:
                found.setdefault(maker[value], set()).add(value)
    return {root: tuple(sorted(values)) for root, values in found.items()}


def _agree(needs: dict[int, str], value: int, state: str) -> bool:
    """Notes what a value has to be; an operator may read it twice."""
    before = needs.setdefault(value, state)
    if {before, state} == {WHOLE, ENTERED}:
        needs[value] = ENTERED
        return True
    return before == state
