"""Recording a step: one run of the user's Python on placeholders, up to its last layer.

It follows the path of a probe, as a run of the last stage does behind it (``stage_run.py``), and
refuses a step that takes another one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.logs import LogCapture
from strategies.models.nested import leaves, rebuild, tensors
from strategies.models.replay.gate import STEP_FRAME
from strategies.models.replay.hole import (
    Args,
    Function,
    Hole,
    Kwargs,
    dataless,
    operation_name,
    user_line,
)
from strategies.models.replay.path import Cut, Path
from strategies.models.replay.recording import Entry, Fresh, LogEntry, Recording, Tape
from strategies.models.replay.stage_run import StageRun

_HOOKS = frozenset({"register_hook", "retain_grad"})


class Recorder(StageRun):
    """Records one microbatch; arguments as for ``StageRun``."""

    def __init__(
        self, units: list[nn.Module], path: Path, *, device: torch.device, **others: Any
    ) -> None:
        nowhere = Cut((-1, 0), ())
        end = Cut((len(path.calls), 0), ())
        super().__init__(
            units, path, entry=nowhere, leave=end, inputs=(), seed=None, device=device,
            selective={}, **others,
        )  # fmt: skip
        self._counts = True
        self._tape = Tape(device, copies=path.rewrites)
        self._before: list[tuple[nn.Module, str, Any]] = []

    def recording(self) -> Recording:
        if self._tape.is_rewritten() and not self._path.rewrites:
            raise ModelError(
                f"{self._step} writes into a tensor that it has given to a layer, and did not do "
                "so when it was looked at first. Do the same for every batch, or use pp=1."
            )
        return self._tape.recording()

    def close(self) -> None:
        """Also gives the layers the attributes back that they had."""
        for module, attribute, value in reversed(self._before):
            if value is _MISSING:
                module.__dict__.pop(attribute, None)
            else:
                setattr(module, attribute, value)
        self._before.clear()
        super().close()

    def on_unit(self, index: int, forward: Function, args: Args, kwargs: Kwargs) -> Any:
        call = self._position[0]
        self._check_call(call, index)
        self._exit_if_due()
        seen = self._path.calls[call]
        for name, attribute in seen.effects:
            module = self._modules[name]
            self._before.append((module, attribute, getattr(module, attribute, _MISSING)))
        entry = self._tape.begin(index, forward, args, kwargs, STEP_FRAME)
        known = {id(leaf) for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result, produced = self.skip(index, forward, args, kwargs, call)
        entry.effects = tuple((self._modules[name], name_) for name, name_ in seen.effects)
        self._tape.end(entry, (call + 1, 0), produced, known)
        if len(produced) != len(seen.tracked):
            what = f"call {call}, {self._path.units[index]}, gave {len(seen.tracked)} tensors"
            raise self._other_path(f"{what}, gives now {len(produced)}", seen.line)
        self._arrive((call + 1, 0), produced, seen.tracked)
        return result

    def on_operation(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        known, answer = dataless(func, args, kwargs)
        name = operation_name(func)
        if known and name not in _HOOKS:
            return answer
        self._exit_if_due()
        entry = self._tape.begin(None, func, args, kwargs, STEP_FRAME)
        if known:
            self._tape.end(entry, self._position, [], set())
            return answer
        outcome = self.answer(func, args, kwargs)
        if outcome.dependent:
            what = f"{name} needs data of another stage"
            raise self._other_path(what, "another line")
        given = list(leaves((args, kwargs)))
        changed = [index for index, _ in outcome.mutated]
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
        if produced:
            self._count(name, produced)
        return result

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
        frozen = rebuild(value, self._tape.frozen)
        self._tape.log(self._position, LogEntry(name, frozen, options, metric))

    def _due(self) -> bool:
        return self._leave is not None and self._position == self._leave.position


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


_MISSING: Any = object()
