"""A step by what flows where: which stage computes what, whatever the order of its lines.

A step with manual optimization goes through its layers several times: a GAN's second half calls the
discriminator, then the generator, then the discriminator again. So stages are no ranges of lines
here. Every unit has a stage, and an operation between units is computed where the last of its
inputs is made; each stage goes through the whole step and has holes for what others compute.

``manual_backward`` ends a *segment*, and so does an optimizer's step (a toggle, ...) behind layers
that have run since: each segment is one pass of a program. ``segments.py`` follows what is found
here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.nested import tensors
from strategies.models.replay.hole import Args, Function, Hole, Kwargs, user_line
from strategies.models.replay.path import Boundary, Key, Path, Position
from strategies.models.replay.probe import Probe, Record
from strategies.models.replay.probing import dense_order

# What separates segments where layers have run before it; ``zero_grad`` changes nothing that a
# forward could see, and stands between forward and backward in most of all steps.
BARRIERS = frozenset({"step", "clip_gradients", "toggle", "untoggle", "schedule"})


@dataclass(frozen=True, slots=True)
class Node:
    """A call of a unit, or a tracked operation between calls.

    Attributes:
        position: Where the step is once it has returned.
        unit: Name of the unit; None for an operation.
        uses: Numbers of the values that it takes.
        parameters: Names of those that it uses.
        clock: First and last moment of it, on the clock of the probe.
    """

    position: Position
    unit: str | None
    uses: tuple[int, ...]
    parameters: tuple[str, ...]
    line: str
    name: str
    cost: float
    clock: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Made:
    """A value: what crosses where it crosses, its maker's number, and who writes to it later."""

    boundary: Boundary
    maker: int
    writers: tuple[int, ...]
    aliased: bool


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of a segment.

    Attributes:
        position: Where the step is.
        loss: Number of the value whose backward it is; None where there is none.
        retain: Whether the graph is kept for another backward.
    """

    position: Position
    loss: int | None
    retain: bool


@dataclass(frozen=True, slots=True)
class Flow:
    """What a probe has seen of one step; ``result`` are the values that it returns.

    ``last`` says whether what follows the last call belongs to the last stage, as in evaluation,
    where the other stages need not go on. ``read`` are values that are looked at there.
    """

    path: Path
    nodes: tuple[Node, ...]
    values: tuple[Made, ...]
    marks: tuple[Mark, ...]
    result: tuple[int, ...]
    read: tuple[int, ...]
    joined: tuple[tuple[str, ...], ...]
    last: bool

    @property
    def num_segments(self) -> int:
        return len(self.marks) + 1

    def segment_of(self, position: Position) -> int:
        return sum(mark.position < position for mark in self.marks)

    def ends_with_backward(self, segment: int) -> bool:
        return segment < len(self.marks) and self.marks[segment].loss is not None

    def reached(self, segment: int) -> frozenset[int]:
        """The values into which the segment's backward brings a gradient."""
        if not self.ends_with_backward(segment):
            return frozenset()
        loss = self.marks[segment].loss
        assert loss is not None
        found: set[int] = set()
        waiting = [loss]
        while waiting:
            number = waiting.pop()
            value = self.values[number]
            if number not in found and value.boundary.spec.requires_grad:
                found.add(number)
                waiting.extend(self.nodes[value.maker].uses)
        return frozenset(found)


class FlowProbe(Probe):
    """Also records which values each call and operation takes, and where segments end."""

    def __init__(self, *args: Any, lenient: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.nodes: list[Node] = []
        self.marks: list[Mark] = []
        self.trace: list[Any] = []
        self.read: dict[int, None] = {}
        self.stale: dict[int, str] = {}  # values of an earlier batch, by identity
        self._lenient = lenient
        self._used: dict[int, None] = {}
        self._since_mark = 0

    def on_unit(self, index: int, forward: Function, args: Args, kwargs: Kwargs) -> Any:
        self._used, clock = {}, self._clock
        result = super().on_unit(index, forward, args, kwargs)
        call = self.record.calls[-1]
        position = (len(self.record.calls), 0)
        name = self._names[index]
        self._add(position, name, call.parameters, call.line, name, call.cost, clock)
        self.trace.append(index)
        return result

    def on_operation(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        refuse_gradients(func, args)
        if func is Tensor.backward and not self._lenient:
            return self.backward(args[0], *args[1:], **kwargs)
        if reads_number(func, args) and not self._lenient:
            return Unknown()
        events = self.record.events[-1]
        before = len(events)
        self._used, clock = {}, self._clock
        result = super().on_operation(func, args, kwargs)
        if len(events) > before:
            event = events[-1]
            position = (len(self.record.calls), len(events))
            self._add(position, None, event.parameters, event.line, event.name, 0.0, clock)
            self.trace.append(event.name)
        else:
            self.read.update(self._used)
        return result

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        """``manual_backward`` of the step: the end of a segment."""
        retain = retained(args, kwargs)
        number = check_loss(loss, self._step).value
        assert number is not None
        self._end_segment(number, retain)

    def act(self, kind: str, signature: Any) -> None:
        """Something that is to happen once per batch, whatever the number of microbatches."""
        if kind in BARRIERS and self._since_mark:
            self._end_segment(None, False)
        self._twins.clear()  # Flags of parameters may change with it.
        self.trace.append(signature)

    def on_read(self, value: Any) -> None:
        super().on_read(value)
        self.read.update(dict.fromkeys(_numbers(value)))

    def _end_segment(self, loss: int | None, retain: bool) -> None:
        position = (len(self.record.calls), len(self.record.events[-1]))
        self.marks.append(Mark(position, loss, retain))
        self.trace.append(("segment", loss is not None, retain))
        self._since_mark = 0

    def _add(
        self,
        position: Position,
        unit: str | None,
        parameters: tuple[str, ...],
        line: str,
        name: str,
        cost: float,
        clock: int,
    ) -> None:
        self._since_mark += 1
        span = (clock + 1, self._clock)
        uses = tuple(self._used)
        self.nodes.append(Node(position, unit, uses, parameters, line, name, cost, span))

    def _note_uses(self, args: Any, kwargs: Any = None) -> tuple[str, ...]:
        self._used.update(dict.fromkeys(_numbers((args, kwargs))))
        for tensor in tensors((args, kwargs)) if self.stale else ():
            if id(tensor) in self.stale:
                raise ModelError(
                    f"{user_line()}: {self._step} uses self.{self.stale[id(tensor)]} of the batch "
                    "before, which it then assigns anew from values of this batch. With manual "
                    "optimization it runs once per microbatch and stage, so that would be another "
                    "value. Do it in on_train_batch_end, from self.trainer.callback_metrics."
                )
        return super()._note_uses(args, kwargs)

    def _note_running_statistics(self, index: int, call: int) -> None:
        """All calls of a unit are on its stage, wherever they stand in the step."""

    def flow(self, names: tuple[str, ...], result: Any, *, clones_batch: bool) -> Flow:
        """What has been seen, once the step has returned ``result``.

        Raises:
            ModelError: If the step looks at data that only one stage has.
        """
        record = self.record
        num_calls = len(record.calls)
        for call, what in record.deferred:
            if not self._lenient:
                raise ModelError(
                    f"{what}. With manual optimization every stage goes through the whole "
                    f"{self._step}, and only the one that computes a value can look at it (item, "
                    "numpy, a Python branch). Keep it a tensor (torch.where, masks), log the "
                    "tensor itself, or look at it in on_train_batch_end."
                )
            if call < num_calls:
                raise ModelError(
                    f"{what}, before the last layer of {self._step} has run. Only the stage that "
                    "computes a value can look at it (item, numpy, a Python branch). Keep it a "
                    "tensor (torch.where, masks), or do it after the last layer."
                )
        for call, what in record.collectives:
            if not self._lenient or call < num_calls:
                raise ModelError(
                    f"{what} on a value of {self._step}. Only the ranks of one stage get to that "
                    "line. Do it inside a layer with parameters, on the batch itself, or in "
                    "on_train_batch_end."
                )
        path = Path(
            names,
            tuple(record.calls),
            tuple(tuple(events) for events in record.events),
            (),
            clones_batch,
        )
        return Flow(
            path,
            tuple(self.nodes),
            tuple(self._values()),
            tuple(self.marks),
            _numbers(result),
            tuple(self.read),
            tuple(_joined_units(record, names)),
            self._lenient,
        )

    def _values(self) -> Iterator[Made]:
        makers = {node.position: number for number, node in enumerate(self.nodes)}
        storages = [id(value.storage) for value in self.record.values]
        writes: dict[int, list[int]] = {}
        for clock, storage in self.record.writes:
            writes.setdefault(id(storage), []).append(clock)
        for value in self.record.values:
            boundary = Boundary(value.key, value.spec, dense_order(value.spec), written=False)
            later = [clock for clock in writes.get(id(value.storage), ()) if clock > value.born]
            writers = tuple(
                number
                for number, node in enumerate(self.nodes)
                if any(node.clock[0] <= clock <= node.clock[1] for clock in later)
            )
            aliased = storages.count(id(value.storage)) > 1
            yield Made(boundary, makers[value.key[:2]], writers, aliased)


def refuse_gradients(func: Function, args: Args) -> None:
    """Refuses what a step with manual optimization cannot do with gradients of its own.

    Raises:
        ModelError: With what to do instead.
    """
    name = getattr(func, "__name__", "")
    what = getattr(getattr(func, "__self__", None), "__name__", "")
    parameter = bool(args) and (
        isinstance(args[0], nn.Parameter)
        or (isinstance(args[0], Hole) and args[0].parameter is not None)
    )
    if parameter and name == "__get__" and what == "grad":
        raise ModelError(
            f"{user_line()}: the step reads .grad of a parameter. Each stage has the gradients of "
            "its own parameters only, and those of one replica. Use self.clip_gradients(optimizer, "
            "gradient_clip_val=...) to clip, and on_before_optimizer_step to look."
        )
    if parameter and (name == "requires_grad_" or (name == "__set__" and what == "requires_grad")):
        raise ModelError(
            f"{user_line()}: the step sets requires_grad of parameters, some of which are on other "
            "stages. Use self.toggle_optimizer(optimizer) and self.untoggle_optimizer(optimizer)."
        )


class Unknown(float):
    """What ``item`` gives of another stage's value: a number to be logged where it is known.

    Arithmetic goes on with it; it decides nothing.
    """

    def __new__(cls) -> Unknown:
        return super().__new__(cls, math.nan)

    def _unknown(self, *_: Any) -> Unknown:
        return self

    def _refused(self, *_: Any) -> Any:
        raise ModelError(
            f"{user_line()}: the step looks at a number (item) that only one stage has. It may be "
            "logged or printed, but not decide anything. Keep it a tensor (torch.where, masks), or "
            "look at it in on_train_batch_end, in self.trainer.callback_metrics."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _unknown
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _unknown
    __neg__ = __abs__ = __pos__ = _unknown
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refused
    __bool__ = __int__ = __float__ = __round__ = __hash__ = _refused
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refused


def reads_number(func: Function, args: Args) -> bool:
    """Whether a call asks a tensor of one element for its number."""
    return func is Tensor.item and isinstance(args[0], Hole) and args[0].numel() == 1


def retained(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether arguments of a backward keep its graph.

    Raises:
        ModelError: If they ask for more.
    """
    given = dict(zip(("gradient", "retain_graph", "create_graph", "inputs"), args, strict=False))
    given |= kwargs
    other = [name for name, value in given.items() if name != "retain_graph" and value]
    if other:
        raise ModelError(
            f"{user_line()}: manual_backward(..., {other[0]}=...) cannot be cut into stages: the "
            "pipeline runs the backward from a scalar loss to all parameters. Leave "
            f"{other[0]} out, or use pp=1."
        )
    return bool(given.get("retain_graph"))


def check_loss(loss: Any, step: str) -> Hole:
    """A loss as a probe sees it: the value of a scalar that wants a gradient."""
    where = f"{user_line()}: manual_backward in {step}"
    if not isinstance(loss, Hole) or loss.value is None:
        raise ModelError(
            f"{where} got a {type(loss).__name__} that depends on no parameter. Give it a loss "
            "of what layers return."
        )
    if loss.numel() != 1:
        raise ModelError(
            f"{where} got a loss of shape {list(loss.shape)}; a scalar is needed. Take its mean()."
        )
    if not loss.requires_grad:
        raise ModelError(
            f"{where} got a loss through which no gradient flows: its parameters are frozen or "
            "toggled off, or it was computed under torch.no_grad() or detached. Toggle the "
            "optimizer whose parameters made it, or leave this backward out."
        )
    return loss


def _numbers(value: Any) -> tuple[int, ...]:
    """The numbers of the values among the tensors of something nested."""
    holes = (tensor for tensor in tensors(value) if isinstance(tensor, Hole))
    return tuple(hole.value for hole in holes if hole.value is not None)


def _joined_units(record: Record, names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Units between which nothing can be cut, for other reasons than their order."""
    units = [names[call.unit] for call in record.calls]
    for first, final, _ in record.uncuttable:
        yield tuple(units[first - 1 : final + 1])
    regions: dict[int, list[str]] = {}
    for region, unit in zip(record.regions, units, strict=True):
        if region is not None:
            regions.setdefault(id(region), []).append(unit)
    yield from (tuple(members) for members in regions.values())


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
                    "generation loops and the like need pp=1."
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
