"""Recording a step: one run of the user's Python on placeholders, up to its last layer.

It follows the path of a probe, as a run of the last stage does behind it
(``replay/stage_run.py``), and refuses a step that takes another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.logs import LogCapture
from strategies.models.nested import leaves, rebuild, tensors
from strategies.models.recording.recording import Entry, Fresh, Recording, Tape
from strategies.models.replay.gate import STEP_FRAME, StageDone
from strategies.models.replay.hole import (
    Args,
    Function,
    Hole,
    Kwargs,
    dataless,
    operation_name,
    user_line,
)
from strategies.models.replay.path import Cut, Path, Position
from strategies.models.replay.rows.batch_rows import same_values
from strategies.models.replay.stage_run import StageRun

_HOOKS = frozenset({"register_hook", "retain_grad"})


class Recorder(StageRun):
    """Records one microbatch, ``until`` a position or its last layer; the rest as for ``StageRun``.

    A ``free`` one goes wherever the step goes, up to its return or to a look at a layer's value.

    Attributes:
        others: Names of what a free run does to values without a layer's part.
        returns: Numbers of the values that it returns.
        returned: Whether it came to its return.
        failed: Whether it ended by an error of its own.
    """

    def __init__(
        self,
        units: list[nn.Module],
        path: Path,
        *,
        device: torch.device,
        until: Position | None = None,
        free: bool = False,
        copies: bool = False,
        **others: Any,
    ) -> None:
        nowhere, end = Cut((-1, 0), ()), Cut(until or (len(path.calls), 0), ())
        super().__init__(
            units, path, entry=nowhere, leave=end, inputs=(), seed=None, device=device,
            selective={}, **others,
        )  # fmt: skip
        self._counts = True
        self._free = free
        self._copies = copies
        self._tape = Tape(copies=copies or path.rewrites)
        self._apart = False
        self.others: set[str] = set()
        self.returns: tuple[int, ...] = ()
        self.returned = self.failed = False

    @property
    def entries(self) -> list[Entry]:
        return self._tape.entries

    def recording(self) -> Recording:
        if self._tape.is_rewritten() and not (self._copies or self._path.rewrites):
            raise ModelError(
                f"{self._step} writes into a tensor that it has given to a layer, and did not do "
                "so when it was looked at first. Do the same for every batch, or use pp=1."
            )
        return self._tape.recording()

    def differs(self, other: Recorder, *, up_to: Position) -> bool:
        """Whether another run's layers and operations get other values, up to a position."""
        for one, two in zip(self.entries, other.entries, strict=False):
            if one.position > up_to:
                break
            first, second = (list(leaves((e.args, e.kwargs))) for e in (one, two))
            if one.mark != two.mark or len(first) != len(second):
                return True
            for was, now in zip(first, second, strict=True):
                if type(was) is Tensor and not (type(now) is Tensor and _is_same(was, now)):
                    return True
        return False

    @contextmanager
    def metric(self) -> Iterator[None]:
        """Inside, a metric resamples rows or counts them, of which nothing comes back to layers."""
        before, self._apart = self._apart, True
        try:
            yield
        finally:
            self._apart = before

    def on_unit(self, index: int, forward: Function, args: Args, kwargs: Kwargs) -> Any:
        call = self._position[0]
        if not self._free:
            if call == len(self._path.calls):
                self._check_call(call, index)
            self._exit_if_due()
            self._check_call(call, index)
        entry = self._tape.begin(index, forward, args, kwargs, STEP_FRAME)
        known = {id(leaf) for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result, produced = self.skip(index, forward, args, kwargs, call)
        entry.effects = self.effects
        self._tape.end(entry, (call + 1, 0), produced, known)
        if not self._free:
            seen = self._path.calls[call]
            if len(produced) != len(seen.tracked):
                what = f"call {call}, {self._path.units[index]}, gave {len(seen.tracked)} tensors"
                raise self._other_path(f"{what}, gives now {len(produced)}", seen.line)
        self._position = (call + 1, 0)
        return result

    def on_operation(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        known, answer = dataless(func, args, kwargs)
        name = operation_name(func)
        if known and name not in _HOOKS:
            return answer
        if self._free and func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
            raise StageDone
        if not known:
            self._exit_if_due()
        entry = self._tape.begin(None, func, args, kwargs, STEP_FRAME)
        if known:
            self._tape.end(entry, self._position, [], set())
            return answer
        outcome = self.answer(func, args, kwargs)
        if outcome.dependent:
            if self._free:
                raise StageDone  # The step looks at a value of a layer.
            what = f"{name} needs data of another stage"
            raise self._other_path(what, "another line")
        changed = [index for index, _ in outcome.mutated]
        given = list(leaves((args, kwargs))) if changed else []
        if any(not isinstance(given[index], Hole) for index in changed):
            self._write_fresh(entry, changed)
        result = self.instantiate(outcome, None, args, kwargs)
        produced = [args[0]] if name == "__setitem__" else tensors(result)
        call, event = self._position
        position = (call, event + 1) if produced else self._position
        self._tape.end(entry, position, produced, set())
        for index in changed:
            if given[index].value is None:
                self._tape.write(entry, index, given[index])
        if produced and self._free:
            self._position = position
        elif produced:
            self._count(name, produced)
        return result

    def plain(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        if self._free and self._inside is None and not self._apart:
            self.others.add(operation_name(func))
        return super().plain(func, args, kwargs)

    def on_return(self, result: Any) -> None:
        if not self._free:
            super().on_return(result)
            return
        self.returned = True
        found = (leaf.value for leaf in tensors(result) if isinstance(leaf, Hole))
        self.returns = tuple(number for number in found if number is not None)

    def _write_fresh(self, entry: Entry, changed: list[int]) -> None:
        """What the entry writes into becomes each execution's own."""
        places = iter(range(len(list(leaves((entry.args, entry.kwargs))))))

        def fresh(leaf: Any) -> Any:
            tensor = isinstance(leaf, Tensor) and not isinstance(leaf, Hole | nn.Parameter)
            return Fresh(leaf) if next(places) in changed and tensor else leaf

        entry.args, entry.kwargs = rebuild((entry.args, entry.kwargs), fresh)

    def on_log(self, value: Any) -> bool:
        """Log calls are entries; see ``RecordedLogs``."""
        raise NotImplementedError

    def log(self, name: str, value: Any, options: dict[str, Any], metric: str | None) -> None:
        self._exit_if_due()
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ModelError(
                f"{user_line()}: self.log({name!r}) got a tensor of shape {list(value.shape)}; "
                "only single numbers can be logged. Log its mean()."
            )
        self._tape.log(self._position, name, value, options, metric)

    def _due(self) -> bool:
        return not self._free and self._leave is not None and self._position == self._leave.position


class RecordedLogs(LogCapture):
    """Stands in for ``self.log`` while a step is recorded."""

    def __init__(self, recorder: Recorder, module: nn.Module) -> None:
        super().__init__(lambda _: True, module)
        self._recorder = recorder

    def _add(self, name: str, value: Any, options: dict[str, Any]) -> None:
        metric = None
        if isinstance(value, nn.Module):
            metric = self._name_of(name, value)
            value = getattr(value, "_forward_cache", None)
            if not isinstance(value, Tensor) or value.numel() != 1:
                value = None
        self._recorder.log(name, value, options, metric)


def _is_same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and same_values(first, second)
