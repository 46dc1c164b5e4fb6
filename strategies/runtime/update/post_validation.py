"""An update that is made before the norm is known, and made again where the norm says otherwise.

``analysis/late_verdict.py`` has what ranks may do meanwhile. Here is the other half: what a rank
keeps to undo its update bit for bit (weights and the optimizer's state, in buffers that are made
once), and who makes it again. The gradients of the step stay as they are until the verdict is in:
nothing is added to them before, because forwards add nothing, and where somebody takes them from
the parameters, as Lightning does before a validation, they are held here.

All ranks hear the same norm, so all undo or none does, and all decide alike whether to go on
without waiting: not for some steps after one that had to be undone, because clipping that strikes
often costs more than a wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.runtime.update.grad_sync import clip_
from strategies.runtime.update.main_weights import AllMainWeights

# Steps that wait after one that was undone: an undone one costs about what three gain.
_CALM_STEPS = 3


class UpdateUndone(Exception):  # noqa: N818 - no error but the way out of a list
    """All ranks raise it at their cut: what they have run since the update counts for nothing."""


@dataclass
class Question:
    """A norm, or the flag of a step that is not finite, on its way.

    Attributes:
        value: This rank's part; the sum of squares, or the flag, when ``work`` has ended.
        limit: What the norm is clipped to; None where only the flag is asked for.
    """

    value: Tensor
    work: dist.Work | None
    limit: float | None

    def answer(self) -> Tensor:
        """The norm, or the flag."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.value if self.limit is None else self.value.sqrt()


class KeptUpdate:
    """Weights and state of an optimizer as they were before a step, and the step's gradients."""

    def __init__(self) -> None:
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] = []
        self._weights: list[tuple[nn.Parameter, Tensor]] = []
        self._state: list[tuple[nn.Parameter, dict[str, Any]]] = []
        self._groups: list[dict[str, Any]] = []
        self._dtype = torch.float32
        self._buffers: dict[tuple[int, str], Tensor] = {}

    @torch.no_grad()
    def keep(self, optimizer: Optimizer) -> None:
        """Copies what the next step changes: whatever has a gradient."""
        self.let_go()
        self._weights.clear()
        self._state.clear()
        self._dtype = torch.get_default_dtype()
        self._groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        for parameter in _updated(optimizer):
            self._gradients.append((parameter, parameter.grad))
            self._weights.append((parameter, self._copy(parameter, "", parameter.detach())))
            entry = {
                key: self._copy(parameter, key, value) if isinstance(value, Tensor) else value
                for key, value in optimizer.state.get(parameter, {}).items()
            }
            self._state.append((parameter, entry))

    def _copy(self, parameter: nn.Parameter, key: str, value: Tensor) -> Tensor:
        known = self._buffers.get((id(parameter), key))
        if known is None or known.shape != value.shape or known.dtype != value.dtype:
            known = self._buffers[id(parameter), key] = torch.empty_like(value)
        known.copy_(value)
        return known

    @torch.no_grad()
    def put_back(self, optimizer: Optimizer) -> None:
        """Undoes the step, bit for bit."""
        for parameter, kept in self._weights:
            parameter.detach().copy_(kept)
        for parameter, entry in self._state:
            if not entry:
                optimizer.state.pop(parameter, None)  # It was its first step.
                continue
            state = optimizer.state[parameter]
            for key, kept in entry.items():
                if isinstance(kept, Tensor):
                    state[key].copy_(kept)
                else:
                    state[key] = kept

    def let_go(self) -> None:
        """Of the gradients: nobody will ask for that step again."""
        self._gradients.clear()

    @contextmanager
    def gradients_shown(self) -> Iterator[None]:
        """The step's gradients are where optimizers look, whoever has taken them away since."""
        now = [(parameter, parameter.grad) for parameter, _ in self._gradients]
        try:
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            yield
        finally:
            for parameter, later in now:
                parameter.grad = later

    def step_again(self, optimizer: Optimizer) -> None:
        """Makes the step anew, with the rates that it had: schedulers have moved on meanwhile."""
        now = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        default = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            for group, then in zip(optimizer.param_groups, self._groups, strict=True):
                group.update(then)
            optimizer.step()
        finally:
            torch.set_default_dtype(default)
            for group, later in zip(optimizer.param_groups, now, strict=True):
                group.update(later)

    @property
    def num_bytes(self) -> int:
        """What the copies take."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._buffers.values())


def _updated(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if parameter.grad is not None)


@dataclass
class PostValidation:
    """Updates of one rank that wait for their verdict.

    Attributes:
        mains: What the optimizer updates where that is not the model's own parameters.
        updated: All that it updates.
        looks: Whether a step that is not finite is left out.
        device_type: Of the weights.
        left_out: Called with the step where none must update, behind the undoing; it may raise.
        repairs: Updates that were undone so far.
    """

    mains: Callable[[], AllMainWeights]
    updated: Callable[[], Iterable[nn.Parameter]]
    looks: bool
    device_type: str
    left_out: Callable[[int], None] = lambda step: None
    repairs: int = 0
    kept: KeptUpdate = field(default_factory=KeptUpdate)
    _question: Question | None = None
    _optimizer: Optimizer | None = None
    _step: int = 0
    _calm: int = 0  # steps to wait

    @property
    def open(self) -> bool:
        """Whether an update has been made whose verdict is not in."""
        return self._question is not None

    @property
    def calm(self) -> bool:
        """Whether the next update may be made before its verdict; the same on all ranks."""
        return self._calm == 0

    def waited(self, *, struck: bool) -> None:
        """Notes the verdict of a step that has been waited for; the same on all ranks."""
        self._calm = _CALM_STEPS if struck else max(0, self._calm - 1)

    def begin(self, question: Question, optimizer: Optimizer, *, step: int) -> None:
        """Keeps what the update will change; the caller makes it now."""
        assert self._question is None
        self._question, self._optimizer, self._step = question, optimizer, step
        self.kept.keep(optimizer)

    def strikes(self) -> bool:
        """Whether the update must be made otherwise, or not at all; waits for the verdict.

        Where not, it is confirmed with that.
        """
        assert self._question is not None
        answer, limit = self._question.answer(), self._question.limit
        if limit is None:
            struck = bool(answer)
        else:
            # As `clip_` computes it, and a comparison with NaN is false.
            struck = not bool(torch.clamp(limit / (answer + 1e-6), max=1.0) == 1.0)
        if not struck:
            self._question = self._optimizer = None
            self.kept.let_go()
        return struck

    def repair(self) -> None:
        """Undoes the update and makes the right one, which may be none; ``strikes`` has said so."""
        question, optimizer = self._question, self._optimizer
        assert question is not None
        assert optimizer is not None
        self._question = self._optimizer = None
        self.repairs += 1
        self._calm = _CALM_STEPS
        mains = self.mains()
        for stage in mains.stages():
            stage.wait()  # Others' shares may still be on their way into the same memory.
        self.kept.put_back(optimizer)
        mains.updated()  # Also what has been rounded, or gathered, since.
        norm = question.answer()
        if question.limit is None or (self.looks and not math.isfinite(float(norm))):
            self.kept.let_go()
            self.left_out(self._step)
            return
        with self.kept.gradients_shown():
            clip_(self.updated(), norm, question.limit)
            with torch.autocast(self.device_type, enabled=False):
                self.kept.step_again(optimizer)
        self.kept.let_go()
        mains.updated()

    def settle(self) -> None:
        """Waits for the verdict, if one is open, and repairs where nothing has been run since."""
        if self.open and self.strikes():
            self.repair()
