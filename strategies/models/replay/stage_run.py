"""One forward of one stage: follows the probed path, real between two cuts, holes before them.

Nothing survives a run but its result: microbatches interleave and a rank may hold several stages.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.collectives import ShapesFirst
from strategies.models.nested import rebuild, tensors
from strategies.models.replay.gate import StageDone, as_compiled
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
from strategies.models.replay.path import Boundary, Cut, Path, Position
from strategies.models.replay.shape_mode import ShapeMode
from strategies.models.stage_model import LogCall, Mode, StageOutput
from strategies.models.state import reseed

if TYPE_CHECKING:
    from strategies.models.replay.rows.draws import RunDraws
    from strategies.models.selective.region import SelectiveLayer


_MISSING: Any = object()


class StageRun(ShapeMode):
    """Replays one step for one stage, from the cut ``entry`` to ``leave`` (None: the step's end).

    ``inputs`` are received in the order of ``entry.tensors``, or come from a function of their
    places and shapes; ``seed`` is that of this step and microbatch; ``modules`` are the
    LightningModule's by global name, ``selective`` the units that recompute by index, ``compiled``
    says whether units may be compiled; at ``end`` a run of the last stage keeps what the rest of
    the step needs, and calls ``at_end``; the step draws from ``draws``; ``whole`` makes a whole
    value of one that lies cut over tensor-parallel ranks.
    The rest is as for ``ShapeMode``.
    """

    def __init__(
        self,
        units: list[nn.Module],
        path: Path,
        *,
        entry: Cut,
        leave: Cut | None,
        inputs: Sequence[Tensor] | Callable[[int, tuple[int, ...]], Tensor],
        seed: int | None,
        step: str,
        modules: dict[str, nn.Module],
        device: torch.device,
        cache: dict[Hashable, Outcome],
        selective: Mapping[int, SelectiveLayer],
        compiled: bool = False,
        end: Cut | None = None,
        at_end: Callable[[], Any] | None = None,
        draws: RunDraws | None = None,
        whole: Callable[[Tensor], Tensor] = lambda value: value,
    ) -> None:
        super().__init__(units, device, cache)
        self._whole = whole
        self.left = False
        self.effects: tuple[tuple[nn.Module, str], ...] = ()  # attributes that a layer sets
        self._attributes: list[tuple[nn.Module, str, Any]] = []
        self._draws = draws
        self._path = path
        self._selective = selective
        self._compiled = compiled
        self._entry = entry
        self._leave = leave
        self._inputs = inputs
        self._seed = seed
        self._step = step
        self._modules = modules
        self._position: Position = (0, 0)
        self._active = False
        self._processes = ShapesFirst()
        self._end = end
        self._at_end = at_end
        self.ends: tuple[Tensor, ...] = ()
        self.marks: Any = None
        self._wanted = _ordinals(entry, leave, end)
        self._found: dict[tuple[int, int, int], Tensor] = {}
        random = seed is not None and any(e.random for events in path.events for e in events)
        between = end is not None and any(
            b.key[1] > 0 and b.key[:2] > entry.position for b in end.tensors
        )
        self._counts = leave is not None or random or between
        self.names_parameters = any(e.parameters for events in path.events[:-1] for e in events)

    def begin(self) -> None:
        """Takes the start position; must run before the user's code, and ``close`` behind it."""
        self._processes.begin()
        self._arrive((0, 0))

    def outputs(self) -> tuple[Tensor, ...]:
        assert self._leave is not None
        return tuple(dense(self._whole(self._found[b.key]), b) for b in self._leave.tensors)

    def give(
        self, outcome: Outcome, holes: list[Hole], given: list[Any]
    ) -> tuple[Any, list[Tensor]]:
        self.effects = tuple((effect.module, effect.attribute) for effect in outcome.effects)
        for module, attribute in self.effects:
            self._attributes.append((module, attribute, getattr(module, attribute, _MISSING)))
        return super().give(outcome, holes, given)

    def close(self) -> None:
        """Forgets all tensors, and gives the layers the attributes back that they had."""
        for module, attribute, value in reversed(self._attributes):
            if value is _MISSING:
                module.__dict__.pop(attribute, None)
            else:
                setattr(module, attribute, value)
        self._attributes.clear()
        self._found.clear()
        self._twins.clear()
        self._inputs = ()
        self._processes.end()

    def seeding(self) -> AbstractContextManager[None]:
        """Around the step: its own seeds are for what it draws between layers."""
        return nullcontext() if self._draws is None else self._draws.seeding()

    def on_return(self, result: Any) -> None:
        """Checks that a step which returned was meant to."""
        call = self._position[0]
        if self.left:
            raise ModelError(
                f"{self._step} caught the exception by which a pipeline stage leaves it. Replace "
                "`except:` and `except BaseException:` around the network by `except Exception:`."
            )
        if call < len(self._path.calls):
            if result is None:
                raise ModelError(
                    f"{self._step} returned None before {self._path.name(call)}, and stages that "
                    "wait for the batch cannot go without. Leave it out in the loader (sampler, "
                    "collate_fn), or run all layers and multiply the loss by zero."
                )
            what = f"call {call} was {self._path.name(call)}, is now the end of the step"
            raise self._other_path(what, self._path.calls[call].line)
        if self._leave is not None and not self._due():
            raise self._other_path("it ended earlier", "its return")
        if self._draws is not None:
            self._draws.end()

    def on_log(self, value: Any) -> bool:
        """Whether a log call at this moment belongs to this stage."""
        self._exit_if_due()
        if self._position[0] == 0:  # All stages come here, and one of them has the parameter.
            if isinstance(value, Hole) and value.parameter is not None:
                return False
            if isinstance(value, nn.Parameter):
                return True
        return self._active

    # -- calls -----------------------------------------------------------------------------

    def on_unit(self, index: int, forward: Function, args: Args, kwargs: Kwargs) -> Any:
        self._exit_if_due()
        call = self._position[0]
        self._check_call(call, index)
        seen = self._path.calls[call]
        if self._active:
            layer = self._selective.get(index)
            with as_compiled() if self._compiled else nullcontext():
                if layer is None:
                    result = forward(*args, **kwargs)
                else:
                    result = layer.run(forward, args, kwargs)
            produced = tensors(result)
            for module, attribute in seen.effects:
                produced += tensors(getattr(self._modules[module], attribute))
        else:
            result, produced = self.skip(index, forward, args, kwargs, call)
        if len(produced) != len(seen.tracked):
            what = f"call {call}, {self._path.units[index]}, gave {len(seen.tracked)} tensors"
            raise self._other_path(f"{what}, gives now {len(produced)}", seen.line)
        self._arrive((call + 1, 0), produced, seen.tracked)
        return result

    # -- operations between calls ----------------------------------------------------------

    def on_operation(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        if self._active and not self._counts:
            return func(*args, **kwargs)
        known, answer = dataless(func, args, kwargs)
        if known:
            return answer
        self._exit_if_due()
        result = func(*args, **kwargs) if self._active else self._answer(func, args, kwargs)
        name = operation_name(func)
        produced = [args[0]] if name == "__setitem__" else tensors(result)
        if produced:
            self._count(name, produced)
        return result

    def plain(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        if self._draws is not None and self._inside is None:
            return self._draws.draw(func, args, kwargs)
        return func(*args, **kwargs)

    def _answer(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        outcome = self.answer(func, args, kwargs)
        if outcome.dependent:
            what = f"{operation_name(func)} needs data of another stage"
            raise self._other_path(what, "another line")
        return self.instantiate(outcome, None, args, kwargs)

    def _count(self, name: str, produced: list[Tensor]) -> None:
        call, event = self._position
        events = self._path.events[call]
        if event >= len(events) or events[event].name != name:
            if self._active and call == len(self._path.calls):
                self._position = (call, event + 1)
                return  # behind the last layer only one stage runs: its path is its own
            was, line = self._name(call), "its line"
            if event < len(events):
                was, line = events[event].name, events[event].line
            what = f"operation {event} before call {call} was {was}, is now {name}"
            raise self._other_path(what, line)
        seen = events[event]
        self._arrive((call, event + 1), produced, seen.tracked)
        if seen.random and self._seed is not None:
            reseed(self._seed, call, event + 1)

    # -- positions -------------------------------------------------------------------------

    def _arrive(
        self, position: Position, produced: Sequence[Tensor] = (), tracked: Sequence[bool] = ()
    ) -> None:
        """Moves on to ``position``: keeps what has to cross a cut, fills holes, reseeds."""
        self._position = position
        if self._active and self._counts:
            for tensor, depends in zip(produced, tracked, strict=False):
                if depends:
                    self.mark(tensor)
        for ordinal in self._wanted.get(position, ()):
            if ordinal >= len(produced):
                raise self._other_path("a result has fewer tensors", "the same line")
            self._found[*position, ordinal] = produced[ordinal]
        if not self._active and position == self._entry.position:
            self._fill()
            self._active = True
            self._processes.open()
        if self._end is not None and self._active and position == self._end.position:
            # Copies of what the rest of the step writes into.
            found = [(self._whole(self._found[b.key].detach()), b) for b in self._end.tensors]
            self.ends = tuple(value.clone() if b.written else value for value, b in found)
            self.marks = None if self._at_end is None else self._at_end()
        if position[1] == 0 and self._seed is not None:
            reseed(self._seed, position[0], 0)

    def _fill(self) -> None:
        if callable(self._inputs):
            for place, boundary in enumerate(self._entry.tensors):
                hole = self._found[boundary.key]
                given = self._inputs(place, tuple(hole.shape))
                received = given.clone() if boundary.written else given.view_as(given)
                self.mark(received)
                exchange(hole, received)
            return
        if len(self._inputs) != len(self._entry.tensors):
            raise ModelError(
                f"a stage of {self._step} got {len(self._inputs)} tensors, its cut has "
                f"{len(self._entry.tensors)}."
            )
        for tensor, boundary in zip(self._inputs, self._entry.tensors, strict=True):
            hole = self._found[boundary.key]
            received = like_sent(tensor, boundary)
            self.mark(received)
            exchange(hole, received)

    def _due(self) -> bool:
        return self._active and self._leave is not None and self._position == self._leave.position

    def _exit_if_due(self) -> None:
        if self._due():
            self.left = True
            raise StageDone

    # -- checks ----------------------------------------------------------------------------

    def _check_call(self, call: int, index: int) -> None:
        calls = self._path.calls
        if call < len(calls) and calls[call].unit == index:
            if self._position[1] == len(self._path.events[call]) or not self._counts:
                return
            event = self._path.events[call][self._position[1]]
            if self._active and self._leave is None:
                return
            what = f"operation {self._position[1]} before call {call} was {event.name}"
            raise self._other_path(f"{what}, is now call {call}", event.line)
        was = self._name(call)
        line = calls[call].line if call < len(calls) else "its return"
        raise self._other_path(f"call {call} was {was}, is now {self._path.units[index]}", line)

    def _name(self, call: int) -> str:
        return self._path.name(call) if call < len(self._path.calls) else "the end of the step"

    def _other_path(self, what: str, line: str) -> ModelError:
        return ModelError(
            f"{self._step} took another path than in the probe: {what} (now {user_line()}, then "
            f"{line}). A pipeline needs the same calls for all rows of a batch: replace early "
            "exits and branches on data by masks (torch.where), let hooks of modules come and go "
            "before the first batch of an epoch, or use pp=1."
        )


def _ordinals(*cuts: Cut | None) -> dict[Position, set[int]]:
    wanted: dict[Position, set[int]] = {}
    for cut in cuts:
        for boundary in cut.tensors if cut else ():
            call, event, ordinal = boundary.key
            wanted.setdefault((call, event), set()).add(ordinal)
    return wanted


def dense(tensor: Tensor, boundary: Boundary) -> Tensor:
    """What is sent of a tensor that crosses a cut."""
    if isinstance(tensor, Hole):
        raise never_computed()
    return tensor if boundary.order is None else tensor.permute(boundary.order)


def never_computed() -> ModelError:
    return ModelError(
        "a value that has to cross a cut was never computed on its stage; the step took another "
        "path than in the probe."
    )


def like_sent(tensor: Tensor, boundary: Boundary) -> Tensor:
    """An alias of a received tensor (or a copy, where it is written to) in the sent layout.

    The cut may be where the step takes no gradients (a teacher's layers), the value is needed by
    others that do.
    """
    with _gradients_of(tensor):
        order = boundary.order
        if order is not None:
            tensor = tensor.permute([order.index(dim) for dim in range(len(order))])
        return tensor.clone() if boundary.written else tensor.view_as(tensor)


@contextmanager
def _gradients_of(tensor: Tensor) -> Iterator[None]:
    if not tensor.requires_grad:
        yield
        return
    with torch.inference_mode(False), torch.enable_grad():
        yield


def final_output(
    result: Any, mode: Mode, logs: tuple[LogCall, ...], module: LightningModule
) -> StageOutput:
    if mode != "train":
        return StageOutput(result=result, logs=logs)
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, Tensor) or isinstance(loss, Hole):
        got = "None" if loss is None else type(loss).__name__
        raise ModelError(
            f"training_step of {type(module).__name__} returned {got} instead of a loss. A "
            "pipeline cannot skip a batch on one stage: return a loss tensor, or a dict with the "
            "key 'loss', and multiply it by zero to skip. A loss that is not finite is skipped by "
            "trainer.on_nan=skip."
        )
    if loss.numel() != 1:
        raise ModelError(
            f"training_step of {type(module).__name__} returned a loss of shape "
            f"{list(loss.shape)}; a scalar is needed. Return loss.mean()."
        )
    detached = rebuild(result, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
    return StageOutput(loss=loss, result=detached, logs=logs)
