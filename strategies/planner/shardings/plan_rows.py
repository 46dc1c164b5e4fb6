"""From the search's choices to a ``ShardingPlan``: rows per pattern."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from strategies.errors import ModelError
from strategies.planner.shardings.operators import (
    ENTERED,
    Choice,
    Operator,
    OperatorGraph,
)
from strategies.planner.shardings.prices import LIGHT_SHARE, Prices, pattern_of, small_operators
from strategies.planner.shardings.search import Found, Search
from strategies.sharding_plan import LayerSharding, ShardingPlan, matches

# Cutting light layers has to save more than this of a microbatch.
_LEAST_GAIN = 0.005
_SHOWN_US = 1e6


@dataclass(frozen=True, slots=True)
class Excluded:
    """A way to cut layers that does not work, and why.

    Attributes:
        pattern: Of the layers' names.
        styles: That are excluded; () for all but ``replicated``.
    """

    pattern: str
    reason: str
    styles: tuple[str, ...] = ()

    def hits(self, name: str, choice: Choice) -> bool:
        return (
            choice.cut
            and (not self.styles or choice.style in self.styles)
            and matches(self.pattern, name)
        )


class Solved(NamedTuple):
    """A plan, and the number of each operator's choice."""

    plan: ShardingPlan
    picks: tuple[int, ...]


class Planner:
    """Plans of one graph on one machine; searches share what they have solved."""

    def __init__(self, graph: OperatorGraph, prices: Prices) -> None:
        self.graph = graph
        self.prices = replace(prices, light=small_operators(graph))
        self._search = Search(graph, self.prices)

    def found(self, bans: Sequence[Excluded] = ()) -> ShardingPlan:
        """The best plan without what is banned."""
        return self.solved(bans).plan

    def solved(self, bans: Sequence[Excluded] = ()) -> Solved:
        """The same, and what each operator does."""
        banned = self._numbers(bans)
        best = self._search.best(banned)
        small = self._too_small(best, banned)
        if small:
            bans = (*bans, *(Excluded(p, _too_little(), ("column", "row")) for p in small))
            best = self._search.best(self._numbers(bans))
        return Solved(self._plan(best.picks, self._rows(best.picks), bans), best.picks)

    def priced(self, styles: Mapping[str, Collection[str]]) -> ShardingPlan | None:
        """The best plan of given styles, by layer name; None where they do not fit together.

        ``styles`` has all that a layer may be; a layer that it does not name is whole.
        """
        banned = {
            (number, index)
            for number, operator in enumerate(self.graph.operators)
            if operator.kind is not None
            for index, choice in enumerate(operator.choices)
            if choice.style not in styles.get(operator.name, ("replicated",))
        }
        try:
            best = self._search.best(banned)
        except ModelError:
            return None
        return self._plan(best.picks, self._rows(best.picks), ())

    def _numbers(self, bans: Sequence[Excluded]) -> set[tuple[int, int]]:
        return {
            (number, index)
            for number, operator in enumerate(self.graph.operators)
            for index, choice in enumerate(operator.choices)
            if choice.cut and any(ban.hits(operator.name, choice) for ban in bans)
        }

    def _too_small(self, best: Found, banned: set[tuple[int, int]]) -> list[str]:
        """Patterns of light layers that are cut and save next to nothing."""
        cut: dict[str, set[int]] = {}
        for number, (operator, pick) in enumerate(
            zip(self.graph.operators, best.picks, strict=True)
        ):
            choice = operator.choices[pick]
            light = number in self.prices.light and operator.kind != "embedding"
            if light and choice.style in ("column", "row"):
                cut.setdefault(operator.name, set()).add(number)
        groups: dict[str, set[str]] = {}
        for name in cut:
            groups.setdefault(pattern_of(name), set()).add(name)
        whole = self.prices.whole(self.graph)
        found = []
        # One by one where there are few; else what they could save at the most.
        for names in groups.values():
            numbers = {n for name in names for n in cut[name]}
            gain = sum(
                self.prices.of(o, o.choices[0]).seconds
                - self.prices.of(o, o.choices[best.picks[n]]).seconds
                for n in numbers
                for o in (self.graph.operators[n],)
            )
            if gain < _LEAST_GAIN * whole:
                found += sorted(names)
        return found

    def _plan(
        self, picks: Sequence[int], rows: Sequence[LayerSharding], bans: Sequence[Excluded]
    ) -> ShardingPlan:
        graph, prices = self.graph, self.prices
        seconds = sum(
            prices.of(o, o.choices[p]).seconds for o, p in zip(graph.operators, picks, strict=True)
        )
        seconds += sum(prices.entrance(graph.values[v])[0] for v in self._entered(picks))
        whole = prices.whole(graph)
        if not any(picks):
            seconds = whole  # Ranks that share nothing do not wait.
        before = self._weights([0] * len(picks))
        now = self._weights(picks)
        unknown: dict[tuple[str, str], float] = {}
        for operation, module, number in graph.unknown:
            operator = graph.operators[number]
            key = (operation, pattern_of(module))
            took = prices.of(operator, operator.choices[0]).seconds
            unknown[key] = unknown.get(key, 0.0) + took
        plan = ShardingPlan(
            tp=graph.tp,
            layers=tuple(rows),
            rows=round(graph.rows * prices.rows),
            seconds=seconds,
            seconds_whole=whole,
            weight_bytes=now,
            weight_bytes_whole=before,
            unknown=tuple((*key, took) for key, took in unknown.items()),
        )
        reasons = (*self._reasons(plan, bans), *self._own_weights(picks, before))
        return replace(plan, reasons=reasons)

    def _reasons(self, plan: ShardingPlan, bans: Sequence[Excluded]) -> Iterator[str]:
        if not plan.worth:
            yield (
                f"nothing is worth cutting over {plan.tp} ranks: tp=1 is as good. "
                "More replicas (dp) use the ranks better"
            )
        for ban in bans:
            if ban.reason != _too_little():
                yield f"{ban.pattern}: {ban.reason}"
        for operation, module, took in plan.unknown:
            yield (
                f"{operation} in {module or 'the step'} has no known shardings: every rank does "
                f"the whole of it, {took * _SHOWN_US:.0f} us"
            )

    def _own_weights(self, picks: Sequence[int], total: float) -> Iterator[str]:
        """Of weights that modules use by themselves (recurrences, attention of torch's): whole."""
        known = {number for _, _, number in self.graph.unknown}
        counted: set[str] = set()
        found: dict[str, tuple[float, float]] = {}
        for number, (operator, pick) in enumerate(zip(self.graph.operators, picks, strict=True)):
            choice = operator.choices[pick]
            if operator.kind is not None or not operator.parameters or choice.work < 1.0:
                continue
            price = self.prices.of(operator, choice)
            size, seconds = found.get(pattern_of(operator.name), (0.0, 0.0))
            if number not in known and not counted.issuperset(operator.parameters):
                size += price.weight_bytes
            counted.update(operator.parameters)
            found[pattern_of(operator.name)] = (size, seconds + price.seconds)
        for pattern, (size, seconds) in found.items():
            if size > LIGHT_SHARE * total:
                yield (
                    f"{pattern or 'the step'} uses {size / 1e6:.3g} MB of weights by itself: every "
                    f"rank has them whole and does all of it, {seconds * _SHOWN_US:.0f} us"
                )

    def _weights(self, picks: Sequence[int]) -> float:
        """Bytes on one rank; tied weights once."""
        counted: set[str] = set()
        total = 0.0
        for operator, pick in zip(self.graph.operators, picks, strict=True):
            if operator.parameters and not counted.issuperset(operator.parameters):
                counted.update(operator.parameters)
                total += self.prices.of(operator, operator.choices[pick]).weight_bytes
        return total

    def _entered(self, picks: Sequence[int]) -> list[int]:
        """Values whose gradients are added up, in the order of their first reader."""
        return list(self._readers(picks))

    def _readers(self, picks: Sequence[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        for number, (operator, pick) in enumerate(zip(self.graph.operators, picks, strict=True)):
            choice = operator.choices[pick]
            for value, state in zip(operator.inputs, choice.inputs, strict=True):
                if state == ENTERED:
                    found.setdefault(value, number)
        return found

    # -- rows --------------------------------------------------------------------------------------

    def _rows(self, picks: Sequence[int]) -> list[LayerSharding]:
        """One for all layers of a pattern where they are cut alike; else one for each name."""
        single: dict[str, LayerSharding] = {}
        entrances = {reader: value for value, reader in self._readers(picks).items()}
        paid = self._counted()
        for number, (operator, pick) in enumerate(zip(self.graph.operators, picks, strict=True)):
            choice = operator.choices[pick]
            for name in self._layers_of(operator, choice):
                row = self._row(operator, choice, name, weights=number in paid)
                if number in entrances:
                    took, sent = self.prices.entrance(self.graph.values[entrances[number]])
                    row = replace(
                        row,
                        seconds=row.seconds + took,
                        backward_bytes=row.backward_bytes + sent,
                    )
                single[name] = _joined(single[name], row) if name in single else row
        left = dict(single)
        rows: dict[str, LayerSharding] = {}
        for spelled in (pattern_of, _inner_pattern, str):
            groups: dict[tuple[str, LayerSharding], list[str]] = {}
            for name, row in left.items():
                groups.setdefault((spelled(name), _alike(row)), []).append(name)
            for (pattern, _), members in groups.items():
                if all(name in members for name in single if matches(pattern, name)):
                    rows[members[0]] = _summed([left.pop(name) for name in members], pattern)
        return [rows[name] for name in single if name in rows]

    def _counted(self) -> set[int]:
        """Operators whose weights no earlier one has."""
        counted: set[str] = set()
        found = set()
        for number, operator in enumerate(self.graph.operators):
            if operator.parameters and not counted.issuperset(operator.parameters):
                found.add(number)
            counted.update(operator.parameters)
        return found

    def _layers_of(self, operator: Operator, choice: Choice) -> list[str]:
        if operator.kind is not None:
            return [operator.name]
        # Weights that a module uses by itself: named where their gradients have to be added up.
        if not choice.partial:
            return []
        return sorted({name.rpartition(".")[0] for name in operator.parameters})

    def _row(
        self, operator: Operator, choice: Choice, name: str, *, weights: bool
    ) -> LayerSharding:
        price = self.prices.of(operator, choice)
        style = choice.style or "replicated"
        return LayerSharding(
            pattern=name,
            style=style,
            kind=operator.kind or "parameter",
            split_dim=choice.split_dim,
            block=choice.block,
            segments=choice.segments,
            whole_input=choice.whole_input if operator.kind else False,
            whole_output=choice.whole_output if operator.kind else False,
            partial=choice.partial,
            forward_bytes=price.forward_bytes,
            backward_bytes=price.backward_bytes,
            weight_bytes=price.weight_bytes if weights else 0.0,
            seconds=price.seconds,
        )


def _inner_pattern(name: str) -> str:
    """With stars for numbers, but for one at the end: a place in a Sequential."""
    front, _, last = name.rpartition(".")
    return f"{pattern_of(front)}.{last}" if front else name


def _too_little() -> str:
    return (
        f"holds less than {LIGHT_SHARE:.0%} of the weights and would save less than "
        f"{_LEAST_GAIN:.1%} of the time"
    )


def _alike(row: LayerSharding) -> LayerSharding:
    """What rows of one pattern have in common."""
    return replace(
        row, pattern="", forward_bytes=0.0, backward_bytes=0.0, weight_bytes=0.0, seconds=0.0
    )


def _joined(first: LayerSharding, second: LayerSharding) -> LayerSharding:
    """A layer that is called again."""
    return replace(
        first,
        forward_bytes=first.forward_bytes + second.forward_bytes,
        backward_bytes=first.backward_bytes + second.backward_bytes,
        weight_bytes=first.weight_bytes + second.weight_bytes,
        seconds=first.seconds + second.seconds,
    )


def _summed(rows: Sequence[LayerSharding], pattern: str) -> LayerSharding:
    found = rows[0]
    for row in rows[1:]:
        found = _joined(found, row)
    return replace(found, pattern=pattern, count=len(rows))
