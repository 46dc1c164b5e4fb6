"""A pass of a user's step over one stage: what it computes here, and holes for what others compute.

A ``FlowRun`` goes through the whole step and stops, or leaves it, where a segment ends; a ``Scout``
only looks which way the step takes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.logs import LogCapture
from strategies.models.manual.dataflow import (
    BARRIERS,
    Mark,
    Unknown,
    reads_number,
    refuse_gradients,
    retained,
)
from strategies.models.manual.flow_layout import FlowLayout
from strategies.models.nested import tensors
from strategies.models.replay.gate import StageDone
from strategies.models.replay.hole import (
    Args,
    Function,
    Hole,
    Kwargs,
    dataless,
    exchange,
    operation_name,
    user_line,
)
from strategies.models.replay.inference import Outcome
from strategies.models.replay.path import Boundary, Key, Position
from strategies.models.replay.rows.draws import RunDraws
from strategies.models.replay.shape_mode import ShapeMode
from strategies.models.replay.stage_run import dense, like_sent
from strategies.models.stage_model import LogCall
from strategies.models.state import reseed

if TYPE_CHECKING:
    from strategies.models.selective.region import SelectiveLayer


@dataclass(frozen=True)
class Action:
    """Something that happens once per batch: an optimizer's step, a toggle, a schedule's step.

    Attributes:
        signature: What it is, to tell whether all microbatches do the same.
        perform: Does it.
        optimizer: The number of the optimizer that it is about; None for a schedule.
    """

    kind: str
    signature: Hashable
    perform: Callable[[], Any]
    optimizer: int | None


@dataclass(frozen=True)
class Waits:
    """A strand needs the pass of a segment."""

    segment: int


@dataclass(frozen=True)
class Reached:
    """A strand has come to the end of a segment."""

    segment: int


@dataclass(frozen=True)
class Returned:
    """The step has returned."""

    result: Any


Report = Action | Waits | Reached | Returned


class Scout(ShapeMode):
    """Goes through a step without any value, to see which way it takes this time."""

    refuses_gradients = False

    def __init__(
        self, units: list[nn.Module], device: torch.device, cache: dict[Hashable, Outcome]
    ) -> None:
        super().__init__(units, device, cache)
        self.trace: list[Any] = []
        self.others: set[str] = set()  # operations in which no layer has a part
        self._since_mark = 0
        self._calls = 0

    def plain(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        if self._inside is None:
            self.others.add(operation_name(func))
        return super().plain(func, args, kwargs)

    def on_unit(self, index: int, forward: Function, args: Args, kwargs: Kwargs) -> Any:
        result, _ = self.skip(index, forward, args, kwargs, self._calls)
        self._calls += 1
        self._note(index)
        return result

    def on_operation(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        refuse_gradients(func, args)
        if func is Tensor.backward:
            return self.backward(args[0], *args[1:], **kwargs)
        known, answer = dataless(func, args, kwargs)
        if known:
            return answer
        if reads_number(func, args):
            return Unknown()
        outcome = self.answer(func, args, kwargs)
        result = self.instantiate(outcome, None, args, kwargs)
        name = operation_name(func)
        if name == "__setitem__" or tensors(result):
            self._note(name)
        return result

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        self._end_segment(("segment", True, retained(args, kwargs)))

    def act(self, action: Action) -> None:
        if action.kind in BARRIERS and self._since_mark:
            self._end_segment(("segment", False, False))
        self.trace.append(action.signature)

    def _note(self, what: Any) -> None:
        self.trace.append(what)
        self._since_mark += 1

    def _end_segment(self, what: Any) -> None:
        self.trace.append(what)
        self._since_mark = 0


class FlowRun(ShapeMode):
    """Goes through one step for one stage: real where the layout says so, holes elsewhere.

    ``seed`` is that of this step and microbatch, ``modules`` are the LightningModule's by name; the
    rest is as for ``StageRun``. ``pause`` stops the step and tells why; the step draws from
    ``draws``.
    """

    refuses_gradients = False

    def __init__(
        self,
        units: list[nn.Module],
        layout: FlowLayout,
        stage: int,
        *,
        seed: int | None,
        step: str,
        module: nn.Module,
        modules: Mapping[str, nn.Module],
        device: torch.device,
        cache: dict[Hashable, Outcome],
        selective: Mapping[int, SelectiveLayer],
        pause: Callable[[Report], Any] | None = None,
        draws: RunDraws | None = None,
    ) -> None:
        super().__init__(units, device, cache)
        self.segment = 0
        self._draws = draws
        self.loss: Any = None
        self.logs = LogCapture(self._keeps, module)
        self._root = module
        self._path = layout.flow.path
        self._layout = layout
        self._stage = stage
        self._last = stage == len(layout.parameters) - 1
        self._seed = seed
        self._step = step
        self._modules = modules
        self._selective = selective
        self._pause = pause
        self._position: Position = (0, 0)
        self._since_mark = 0
        self._open = pause is None
        self._incoming: dict[Key, tuple[Tensor, Boundary]] = {}
        self._leaves: dict[Key, Tensor] = {}
        self._expected: frozenset[Key] = frozenset()
        self._found: dict[Key, Tensor] = {}
        self._wanted = {b.key for part in layout.handed for b in part[stage]}
        self._awaited = {b.key for b in layout.handed[0][stage]} if pause is None else set()
        self.names_parameters = any(e.parameters for events in self._path.events for e in events)

    # -- what comes and goes ---------------------------------------------------------------

    def begin(self) -> None:
        if self._seed is not None:
            reseed(self._seed, 0, 0)
        self._leave_if_done()

    def feed(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Takes what a pass has brought; gives the leaves at which its gradients arrive.

        A value may want a gradient in a later pass, whose leaf is this one's.
        """
        boundaries = self._layout.received(self.segment, self._stage)
        if len(inputs) != len(boundaries):
            raise ModelError(
                f"a stage of {self._step} got {len(inputs)} tensors, its cut has {len(boundaries)}."
            )
        self._check_leaves()
        reached = self._layout.reached[self.segment]
        leaves = []
        for tensor, boundary in zip(inputs, boundaries, strict=True):
            key = boundary.key
            if key not in self._leaves:
                leaf = tensor
                if self._pause is not None:
                    leaf = tensor.detach().requires_grad_(boundary.spec.requires_grad)
                self._leaves[key] = leaf
                self._incoming[key] = (leaf, boundary)
            leaves.append(self._leaves[key] if key in reached else tensor)
        self._expected = reached
        return tuple(leaves)

    def outputs(self) -> tuple[Tensor, ...]:
        handed = self._layout.handed[self.segment][self._stage]
        reached = self._layout.reached[self.segment]
        made = ((b, dense(self._found[b.key], b)) for b in handed)
        return tuple(t if b.key in reached else t.detach() for b, t in made)

    def take_logs(self) -> tuple[LogCall, ...]:
        """The log calls since the last time."""
        calls, self.logs = self.logs.calls(), LogCapture(self._keeps, self._root)
        return calls

    def close(self) -> None:
        """Forgets all tensors: holes left on the user's modules refer to this object."""
        self._found.clear()
        self._twins.clear()
        self._leaves.clear()
        self._incoming.clear()
        self.loss = None

    def _check_leaves(self) -> None:
        for key, leaf in self._leaves.items():
            if leaf.grad is not None and key not in self._expected:
                raise ModelError(
                    f"a backward of {self._step} brought a gradient to a value of an earlier "
                    "segment that another stage has made, which the probe has not seen. Compute "
                    "the value again, or use Trainer(strategy='auto')."
                )
            leaf.grad = None

    def _keeps(self, value: Any) -> bool:
        if isinstance(value, nn.Module):
            return self._last
        return not isinstance(value, Hole | Unknown)

    # -- segments --------------------------------------------------------------------------

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        mark = self._mark()
        if mark.loss is None or mark.retain != retained(args, kwargs):
            raise self._other_path("manual_backward", "another line")
        self.loss = loss
        self._end_segment()

    def act(self, action: Action) -> Any:
        if action.kind in BARRIERS and self._since_mark:
            if self._mark().loss is not None:
                raise self._other_path(action.kind, "another line")
            self._end_segment()
        assert self._pause is not None
        return self._pause(action)

    def ended(self) -> None:
        """Checks that a step which returned was meant to."""
        calls, events = len(self._path.calls), len(self._path.events[-1])
        marks = self._layout.flow.marks
        if self._position != (calls, events) or self.segment != len(marks):
            raise self._other_path("it ended earlier", "its return")

    def _mark(self) -> Mark:
        marks = self._layout.flow.marks
        if self.segment >= len(marks) or marks[self.segment].position != self._position:
            raise self._other_path("a segment ends here", "another line")
        return marks[self.segment]

    def _end_segment(self) -> None:
        assert self._pause is not None
        if self._layout.passes(self.segment):
            self._pause(Reached(self.segment))
        self.segment += 1
        self.loss = None
        self._open = False
        self._since_mark = 0
        if self._seed is not None:
            # Others have drawn meanwhile: what follows depends on this microbatch alone.
            call, event = self._position
            reseed(self._seed, call, self.segment << 20 | event)

    def _reach(self, position: Position) -> None:
        """Waits for the pass before the first thing that needs it."""
        start = self._layout.starts[self.segment]
        if not self._open and start is not None and position >= start:
            assert self._pause is not None
            self._pause(Waits(self.segment))
            self._open = True

    def _leave_if_done(self) -> None:
        """In evaluation, a stage that has made what it hands on need not see the rest."""
        if self._pause is None and not self._last and not self._awaited:
            raise StageDone

    # -- calls and operations --------------------------------------------------------------

    def on_unit(self, index: int, forward: Function, args: Args, kwargs: Kwargs) -> Any:
        call = self._position[0]
        calls = self._path.calls
        if call >= len(calls) or calls[call].unit != index:
            was = self._path.name(call) if call < len(calls) else "the end of the step"
            what = f"call {call} was {was}, is now {self._path.units[index]}"
            raise self._other_path(what, calls[call].line if call < len(calls) else "its return")
        if self._position[1] != len(self._path.events[call]):
            raise self._other_path(f"call {call} comes earlier", calls[call].line)
        seen = calls[call]
        position = (call + 1, 0)
        self._reach(position)
        if self._layout.homes[position] == self._stage:
            layer = self._selective.get(index)
            result = forward(*args, **kwargs) if layer is None else layer.run(forward, args, kwargs)
            produced = tensors(result)
            for module, attribute in seen.effects:
                produced += tensors(getattr(self._modules[module], attribute))
        else:
            result, produced = self.skip(index, forward, args, kwargs, call)
        if len(produced) != len(seen.tracked):
            what = f"call {call}, {self._path.units[index]}, gave {len(seen.tracked)} tensors"
            raise self._other_path(f"{what}, gives now {len(produced)}", seen.line)
        self._arrive(position, produced, seen.tracked)
        return result

    def on_operation(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        if self._pause is not None:
            refuse_gradients(func, args)
            if func is Tensor.backward:
                return self.backward(args[0], *args[1:], **kwargs)
        known, answer = dataless(func, args, kwargs)
        if known:
            return answer
        if self._pause is not None and reads_number(func, args) and isinstance(args[0], Hole):
            return Unknown()
        if self._last and self._pause is None and self._position[0] == len(self._path.calls):
            return func(*args, **kwargs)  # behind the last layer only one stage runs
        call, event = self._position
        events = self._path.events[call]
        name = operation_name(func)
        position = (call, event + 1)
        due = event < len(events) and events[event].name == name
        if due:
            self._reach(position)
            real = self._layout.homes[position] == self._stage
        else:
            real = not any(isinstance(t, Hole) for t in tensors((args, kwargs)))
        result = func(*args, **kwargs) if real else self._answer(func, args, kwargs)
        produced = [args[0]] if name == "__setitem__" else tensors(result)
        if produced:
            if not due:
                was = events[event].name if event < len(events) else "the next layer"
                line = events[event].line if event < len(events) else "its line"
                what = f"operation {event} before call {call} was {was}, is now {name}"
                raise self._other_path(what, line)
            self._arrive(position, produced, events[event].tracked)
            if events[event].random and self._seed is not None:
                reseed(self._seed, call, event + 1)
        return result

    def plain(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        if self._draws is not None and self._inside is None:
            return self._draws.draw(func, args, kwargs)
        return func(*args, **kwargs)

    def _answer(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        outcome = self.answer(func, args, kwargs)
        if outcome.dependent:
            raise self._other_path(f"{operation_name(func)} needs data of another stage", "nowhere")
        return self.instantiate(outcome, None, args, kwargs)

    def _arrive(
        self, position: Position, produced: Sequence[Tensor], tracked: Sequence[bool]
    ) -> None:
        """Moves on to ``position``: fills holes with what was received, keeps what is sent."""
        self._position = position
        self._since_mark += 1
        for ordinal, (tensor, depends) in enumerate(zip(produced, tracked, strict=False)):
            if not depends:
                continue
            key = (*position, ordinal)
            if key in self._incoming:
                received = like_sent(*self._incoming.pop(key))
                self.mark(received)
                exchange(tensor, received)
            else:
                self.mark(tensor)
            if key in self._wanted:
                self._found[key] = tensor
                self._awaited.discard(key)
        self._leave_if_done()
        if position[1] == 0 and self._seed is not None:
            reseed(self._seed, position[0], 0)

    def _other_path(self, what: str, line: str) -> ModelError:
        return ModelError(
            f"{self._step} took another path than in the probe: {what} (now {user_line()}, then "
            f"{line}). A pipeline needs the same calls for every microbatch: replace layer-drop, "
            "early exits and branches on data by masks (torch.where), or use "
            "Trainer(strategy='auto')."
        )
