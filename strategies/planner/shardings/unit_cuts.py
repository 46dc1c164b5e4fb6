"""What a plan of shardings leaves of each unit on one rank, and what its ranks add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from strategies.costs.kernels import Product, Work
from strategies.planner.shardings.operators import ENTERED, WHOLE, Choice, OperatorGraph
from strategies.planner.shardings.prices import Prices


@dataclass(slots=True)
class _Sums:
    """Whole and on one rank, of one unit."""

    work: list[float] = field(default_factory=lambda: [0.0, 0.0])
    weights: list[float] = field(default_factory=lambda: [0.0, 0.0])
    made: list[float] = field(default_factory=lambda: [0.0, 0.0])
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)

    def kernels(self) -> Work:
        """All operations as those of one unit."""
        products: tuple[Product, ...] = tuple(p for work in self.works for p in work.products)
        return Work(
            products=products,
            forward_elements=sum(work.forward_elements for work in self.works),
            backward_elements=sum(work.backward_elements for work in self.works),
            forward_kernels=sum(work.forward_kernels for work in self.works),
            backward_kernels=sum(work.backward_kernels for work in self.works),
            weights=sum(work.weights for work in self.works),
        )


@dataclass(frozen=True, slots=True)
class UnitCut:
    """A unit on one of the ranks that share it.

    Attributes:
        work: Share of its FLOPs.
        weights: Share of its parameters.
        kept: Share of what it keeps for its backward.
        forward_sums: Elements per row of a microbatch that a forward adds up over the ranks, tensor
            by tensor; a gather, which takes half as long, counts half.
        backward_sums: The same of a backward.
        kernels: All its operations on one rank, for the given microbatch.
    """

    work: float = 1.0
    weights: float = 1.0
    kept: float = 1.0
    forward_sums: tuple[float, ...] = ()
    backward_sums: tuple[float, ...] = ()
    kernels: Work = field(default_factory=Work)


def unit_cuts(
    graph: OperatorGraph, picks: Sequence[int], units: Sequence[str], prices: Prices
) -> tuple[UnitCut, ...]:
    """One for each unit; operations between units belong to the one before.

    Args:
        graph: All operators.
        picks: The number of each operator's choice.
        units: Their names, in the order in which they run.
        prices: Say how large the microbatch is.
    """
    sums = [_Sums() for _ in units]
    entered: set[int] = set()
    counted: set[tuple[str, ...]] = set()
    at = 0
    for operator, pick in zip(graph.operators, picks, strict=True):
        at = _unit(operator.name, units, at)
        own, choice = sums[at], operator.choices[pick]
        _add(own.work, operator.flops, choice.work)
        own.works.append(prices.work(operator, choice))
        if operator.parameters and operator.parameters not in counted:
            counted.add(operator.parameters)
            _add(own.weights, operator.weights, choice.weights)
        for value, state in zip(operator.outputs, choice.outputs, strict=True):
            part = 1.0 if state in (WHOLE, ENTERED) else 1.0 / graph.tp
            _add(own.made, graph.values[value].elements, part)
        _add_messages(own, choice, graph.rows)
        for value, state in zip(operator.inputs, choice.inputs, strict=True):
            if state == ENTERED and value not in entered:
                entered.add(value)
                own.backward.append(graph.values[value].elements / graph.rows)
    return tuple(
        UnitCut(_ratio(s.work), _ratio(s.weights), _ratio(s.made), tuple(s.forward),
                tuple(s.backward), s.kernels())
        for s in sums
    )  # fmt: skip


def _add(pair: list[float], whole: float, part: float) -> None:
    pair[0] += whole
    pair[1] += whole * part


def _add_messages(own: _Sums, choice: Choice, rows: int) -> None:
    for message in choice.messages:
        if not message.once:
            size = message.elements / rows * (0.5 if message.kind == "gather" else 1.0)
            (own.backward if message.backward else own.forward).append(size)


def _unit(name: str, units: Sequence[str], before: int) -> int:
    for number in range(before, len(units)):
        if name == units[number] or name.startswith(f"{units[number]}."):
            return number
    for number in range(before):
        if name == units[number] or name.startswith(f"{units[number]}."):
            return number
    return before


def _ratio(pair: Sequence[float]) -> float:
    return pair[1] / pair[0] if pair[0] else 1.0
