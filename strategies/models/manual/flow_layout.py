"""Where the layers of a step with manual optimization go, and what passes between stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from strategies.errors import ModelError
from strategies.models.manual.dataflow import Flow
from strategies.models.replay.path import Boundary, Key, Position

# -- cells: what has a stage, in an order in which nothing flows back ------------------------------


class Cells:
    """Units, and parameters outside of units that operations start from.

    ``homes`` has the unit of each parameter that is in one.
    """

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = homes

    def of_parameter(self, name: str) -> str:
        return self._homes.get(name, name)

    def groups(self, flows: Sequence[Flow]) -> list[tuple[tuple[str, ...], float]]:
        """Cells that share a stage, each group with its cost, in an order to be cut.

        Two units each of which feeds the other (the generators of a CycleGAN) are one group.
        """
        costs: dict[str, float] = {}
        edges: set[tuple[str, str]] = set()
        for flow in flows:
            own: dict[str, float] = {}
            for cell, cost, sources in self._steps(flow):
                own[cell] = own.get(cell, 0.0) + cost
                edges |= {(source, cell) for source in sources if source != cell}
            for cell, cost in own.items():
                costs[cell] = max(costs.get(cell, 0.0), cost)
            for members in flow.joined:
                edges |= {(a, b) for a in members for b in members if a != b}
        return ordered_groups(costs, edges)

    def _steps(self, flow: Flow) -> Iterator[tuple[str, float, frozenset[str]]]:
        """Cells as they are used: what it costs there, and which cells feed it."""
        direct: list[frozenset[str]] = []
        for node in flow.nodes:
            makers = (direct[flow.values[number].maker] for number in node.uses)
            sources = frozenset().union(*makers)
            if node.unit is not None:
                yield node.unit, node.cost, sources
                direct.append(frozenset({node.unit}))
                continue
            if not node.uses:
                sources = frozenset(self.of_parameter(name) for name in node.parameters)
                for cell in sorted(sources):
                    yield cell, 1.0, frozenset()
            direct.append(sources)


def ordered_groups(
    costs: Mapping[str, float], edges: set[tuple[str, str]]
) -> list[tuple[tuple[str, ...], float]]:
    """Groups of cells and their costs; ``costs`` has the cells in the order of use."""
    cells = list(costs)
    place = {cell: number for number, cell in enumerate(cells)}
    reach = [1 << number for number in range(len(cells))]
    for source, target in edges:
        reach[place[source]] |= 1 << place[target]
    for middle in range(len(cells)):
        for number in range(len(cells)):
            if reach[number] >> middle & 1:
                reach[number] |= reach[middle]
    groups: dict[int, list[int]] = {}
    for number in range(len(cells)):
        first = next(
            n for n in range(number + 1) if reach[n] >> number & 1 and reach[number] >> n & 1
        )
        groups.setdefault(first, []).append(number)
    ordered = []
    waiting = list(groups)
    while waiting:
        # The first in the order of use of those that nothing which still waits leads to.
        chosen = next(g for g in waiting if not any(o != g and reach[o] >> g & 1 for o in waiting))
        waiting.remove(chosen)
        members = tuple(cells[number] for number in groups[chosen])
        ordered.append((members, max(1.0, sum(costs[cell] for cell in members))))
    return ordered


# -- stages of a flow ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FlowLayout:
    """How a flow is divided.

    Attributes:
        homes: The stage of each node, by position.
        handed: Per segment and stage, what it hands to the next one; sorted by key.
        starts: Per segment where its pass begins, at the latest: before the first node that needs
            it. None where nothing does.
        reached: Per segment the keys of values into which its backward brings a gradient.
        parameters: Per stage those that it uses.
        result_stage: Where the step's result is complete.
    """

    flow: Flow
    homes: Mapping[Position, int]
    handed: tuple[tuple[tuple[Boundary, ...], ...], ...]
    starts: tuple[Position | None, ...]
    reached: tuple[frozenset[Key], ...]
    parameters: tuple[tuple[str, ...], ...]
    result_stage: int

    def passes(self, segment: int) -> bool:
        """Whether the segment needs a pass of a program."""
        return self.flow.ends_with_backward(segment) or self.starts[segment] is not None

    def received(self, segment: int, stage: int) -> tuple[Boundary, ...]:
        return self.handed[segment][stage - 1] if stage else ()


def lay_out(
    flow: Flow, cells: Cells, stages: Mapping[str, int], num_stages: int, step: str
) -> FlowLayout:
    """Divides a flow, given the stage of each cell.

    Raises:
        ModelError: If something would have to flow back, or memory is shared across stages.
    """
    homes = _homes(flow, cells, stages, num_stages, step)
    made_at = [homes[value.maker] for value in flow.values]
    last = num_stages - 1
    needed = list(made_at)
    parameters: list[dict[str, None]] = [{} for _ in range(num_stages)]
    for node, home in zip(flow.nodes, homes, strict=True):
        parameters[home].update(dict.fromkeys(node.parameters))
        for number in node.uses:
            needed[number] = max(needed[number], home)
    wanted = [mark.loss for mark in flow.marks if mark.loss is not None]
    if flow.last:
        wanted += [*flow.result, *flow.read]
    for number in wanted:
        needed[number] = last
    crossing = [
        _crossing(flow, number, homes, step) if needed[number] > made_at[number] else None
        for number in range(len(flow.values))
    ]
    handed = []
    reaches = [flow.reached(segment) for segment in range(flow.num_segments)]
    for segment, reached in enumerate(reaches):
        part: list[list[Boundary]] = [[] for _ in range(num_stages)]
        for number, boundary in enumerate(crossing):
            if boundary is None:
                continue
            born = flow.segment_of(flow.nodes[flow.values[number].maker].position)
            # Again where a later backward brings a gradient: it goes back the same way.
            if born == segment or (born < segment and number in reached):
                for stage in range(made_at[number], needed[number]):
                    part[stage].append(boundary)
        handed.append(tuple(tuple(sorted(each, key=_key)) for each in part))
    return FlowLayout(
        flow,
        {node.position: home for node, home in zip(flow.nodes, homes, strict=True)},
        tuple(handed),
        tuple(_starts(flow, crossing)),
        tuple(frozenset(flow.values[n].boundary.key for n in reached) for reached in reaches),
        tuple(tuple(used) for used in parameters),
        max((made_at[number] for number in flow.result), default=last),
    )


def _key(boundary: Boundary) -> Key:
    return boundary.key


def _homes(
    flow: Flow, cells: Cells, stages: Mapping[str, int], num_stages: int, step: str
) -> list[int]:
    homes: list[int] = []
    num_calls = len(flow.path.calls)
    for node in flow.nodes:
        before = max((homes[flow.values[number].maker] for number in node.uses), default=0)
        if node.unit is not None:
            home = stages[node.unit]
            if before > home:
                raise ModelError(
                    f"{node.line}: {step} calls {node.unit}, which is on stage {home}, with a "
                    f"value of stage {before}. Every step must run the layers in the same order; "
                    "generation loops and the like need Trainer(strategy='auto')."
                )
        elif flow.last and node.position[0] == num_calls:
            home = num_stages - 1
        elif node.uses:
            home = before
        else:
            home = max((stages[cells.of_parameter(name)] for name in node.parameters), default=0)
        homes.append(home)
    return homes


def _crossing(flow: Flow, number: int, homes: Sequence[int], step: str) -> Boundary:
    value = flow.values[number]
    here = [n for n in value.writers if homes[n] <= homes[value.maker]]
    if here or (value.writers and value.aliased):
        line = flow.nodes[(here or value.writers)[0]].line
        raise ModelError(
            f"{line}: {step} changes in place a value of {flow.nodes[value.maker].line}, which "
            "another stage needs as it was. Use the operation that returns a new tensor, or "
            "choose other stages with units_per_stage."
        )
    return replace(value.boundary, written=bool(value.writers))


def _starts(flow: Flow, crossing: Sequence[Boundary | None]) -> Iterator[Position | None]:
    crosses = {b.key[:2] for b in crossing if b is not None}
    for segment in range(flow.num_segments):
        yield next(
            (
                node.position
                for node in flow.nodes
                if flow.segment_of(node.position) == segment
                and (node.unit is not None or node.parameters or node.position in crosses)
            ),
            None,
        )


def homes_of_parameters(units: Mapping[str, nn.Module], names: Mapping[int, str]) -> dict[str, str]:
    """The unit of each parameter that is in one; ``names`` by identity of the parameter."""
    found: dict[str, str] = {}
    for unit, module in units.items():
        for parameter in module.parameters():
            found.setdefault(names[id(parameter)], unit)
    return found
