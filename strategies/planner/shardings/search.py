"""The cheapest shardings of a graph that fit together: one integer program over its operators.

A 0-1 variable stands for each choice of an operator, one of which is taken. Where a choice reads a
value in a state, the value's maker leaves it so: the choices that need it are no more than those
that make it. A value that is entered (``E``) is made whole, and its gradient is added up once for
all readers: a variable of its own, which costs the message. Operators that share a weight cut it
alike. HiGHS solves it (through scipy); its linear relaxation alone is nearly always integral.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from strategies.errors import ModelError
from strategies.planner.shardings.operators import ENTERED, WHOLE, Choice, OperatorGraph
from strategies.planner.shardings.prices import Prices

_TIME_LIMIT_S = 60.0
_RELATIVE_GAP = 1e-9

Row = dict[int, float]


class Found(NamedTuple):
    """The number of each operator's choice, and the seconds of all."""

    seconds: float
    picks: tuple[int, ...]


class Search:
    """Finds the best plans of one graph; its matrix is built once."""

    def __init__(self, graph: OperatorGraph, prices: Prices) -> None:
        self.graph = graph
        self._costs: list[float] = []
        self._first: list[int] = []  # the variable of each operator's first choice
        self._never: set[int] = set()  # variables that no plan can have
        self._rows: list[Row] = []
        self._lows: list[float] = []
        for number, operator in enumerate(graph.operators):
            self._first.append(len(self._costs))
            self._costs += [prices.worth(number, operator, each) for each in operator.choices]
        self._entered: dict[int, int] = {}
        for value, state in dict.fromkeys(_needs(graph)):
            if state == ENTERED and value not in self._entered:
                self._entered[value] = len(self._costs)
                self._costs.append(prices.entrance(graph.values[value])[0])
        self._add_choices()
        self._add_values()
        self._add_ties()

    def best(self, banned: Collection[tuple[int, int]] = ()) -> Found:
        """The cheapest plan without the (operator, choice) that are banned.

        Raises:
            ModelError: There is none, or a minute is not enough to find it.
        """
        optimize, sparse, numpy = (
            importlib.import_module(name) for name in ("scipy.optimize", "scipy.sparse", "numpy")
        )
        costs = numpy.array(self._costs)
        highest = numpy.ones(len(costs))
        highest[[*self._never, *(self._first[number] + choice for number, choice in banned)]] = 0.0
        entries = [(at, c, v) for at, row in enumerate(self._rows) for c, v in row.items()]
        at, columns, values = zip(*entries, strict=True)
        # Rows of one choice, and of equal shares, come to their bound; the others stay below it.
        lows = numpy.array(self._lows)
        result = optimize.milp(
            costs / (float(costs.max()) or 1.0),
            constraints=optimize.LinearConstraint(
                sparse.csr_array((values, (at, columns)), shape=(len(lows), len(costs))),
                lows,
                numpy.maximum(lows, 0.0),
            ),
            integrality=numpy.ones(len(costs)),
            bounds=optimize.Bounds(0.0, highest),
            options={"time_limit": _TIME_LIMIT_S, "mip_rel_gap": _RELATIVE_GAP},
        )
        if result.status == 2:  # infeasible
            raise ModelError("nothing is left of the ways to cut this model.", fix="Use tp=1.")
        if result.status != 0:
            raise ModelError(
                f"the best shardings of {len(self.graph.operators)} operators were not found in "
                f"{_TIME_LIMIT_S:g} s.",
                fix="Declare tensor_parallel_plan(), or use tp=1.",
            )
        taken = result.x > 0.5
        picks = tuple(
            next(c for c in range(len(operator.choices)) if taken[first + c])
            for operator, first in zip(self.graph.operators, self._first, strict=True)
        )
        return Found(float(costs[taken].sum()), picks)

    def _add(self, row: Row, low: float) -> None:
        self._rows.append(row)
        self._lows.append(low)

    def _add_choices(self) -> None:
        """Each operator runs in one way."""
        for operator, first in zip(self.graph.operators, self._first, strict=True):
            self._add({first + c: 1.0 for c in range(len(operator.choices))}, 1.0)

    def _add_values(self) -> None:
        """What reads a value in a state finds it so."""
        operators, none = self.graph.operators, float("-inf")
        made: dict[tuple[int, str], Row] = {}
        for operator, first in zip(operators, self._first, strict=True):
            for c, choice in enumerate(operator.choices):
                for value, state in zip(operator.outputs, choice.outputs, strict=True):
                    made.setdefault((value, state), {})[first + c] = -1.0
        makers = {value for operator in operators for value in operator.outputs}
        for operator, first in zip(operators, self._first, strict=True):
            for place, value in enumerate(operator.inputs):
                readers: dict[str, Row] = {}
                for c, choice in enumerate(operator.choices):
                    readers.setdefault(choice.inputs[place], {})[first + c] = 1.0
                for state, row in readers.items():
                    if state == ENTERED:
                        self._add({**row, self._entered[value]: -1.0}, none)
                    needed = WHOLE if state == ENTERED else state
                    if value in makers:
                        self._add({**row, **made.get((value, needed), {})}, none)
                    elif needed != WHOLE:
                        self._never |= row.keys()  # Nothing cuts what the step is given.

    def _add_ties(self) -> None:
        """Operators that share a weight cut it alike."""
        for group in self.graph.tied():
            one = len({self.graph.operators[number].name for number in group}) == 1
            sides: list[dict[object, Row]] = []
            for number in group:
                side: dict[object, Row] = {}
                for c, choice in enumerate(self.graph.operators[number].choices):
                    side.setdefault(_cut(choice, one=one), {})[self._first[number] + c] = 1.0
                sides.append(side)
            for key in dict.fromkeys(key for side in sides for key in side):
                rows = [side.get(key, {}) for side in sides]
                for other in rows[1:]:
                    self._add({**rows[0], **dict.fromkeys(other, -1.0)}, 0.0)


def _needs(graph: OperatorGraph) -> Iterable[tuple[int, str]]:
    """Values with the states in which choices read them."""
    for operator in graph.operators:
        for choice in operator.choices:
            yield from zip(operator.inputs, choice.inputs, strict=True)


def _cut(choice: Choice, *, one: bool) -> Sequence[object]:
    """How a choice cuts its weight; one layer that is called again is also rewritten once."""
    own = choice.split_dim, choice.segments
    return (*own, choice.style, choice.whole_input, choice.whole_output) if one else own
