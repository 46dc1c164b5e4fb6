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
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.nested import tensors
from strategies.models.replay.hole import Args, Function, Hole, Kwargs, user_line
from strategies.models.replay.path import Boundary, Path, Position
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

    refuses_gradients = False

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

    def on_packing(self, counts: Tensor) -> None:
        raise ModelError(
            f"{user_line()}: {self._step} packs sequences, and uses manual optimization, which is "
            "cut by shapes that the batch's shape decides. Give the recurrent layer the padded "
            "tensor and take its outputs at the lengths (gather), or use automatic optimization."
        )

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
            drew=record.drew,
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
            f"{other[0]} out, or use Trainer(strategy='auto')."
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
