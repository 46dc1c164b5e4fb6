"""The doors between the user's step and the replay: unit calls, log calls, leaving the step.

During a replay (and only then) the units' ``forward`` and the module's ``log`` are replaced on the
instances, so that recomputation inside backward meets the user's own code.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from strategies.errors import ModelError
from strategies.models.nested import replaced
from strategies.models.replay.hole import Args, Function, Hole, Kwargs, exchange
from strategies.models.stage_model import STEP_NAMES, Mode
from strategies.models.state import kept_generators

MARKER = torch.zeros(())


class StageDone(BaseException):
    """Leaves the user's step once a stage's part is done; passes through ``except Exception``."""


def enter_unit(
    marker: torch.Tensor, index: int, forward: Function, args: Args, kwargs: Kwargs
) -> Any:
    """Calls a unit; an active replay sees this like a torch function and decides what happens.

    Torch disables a function mode while the mode handles a call, hence everything inside an owned
    unit runs at full speed, other modes of the user in place.
    """
    if has_torch_function((marker,)):
        return handle_torch_function(enter_unit, (marker,), marker, index, forward, args, kwargs)
    return forward(*args, **kwargs)


def unwatched(marker: torch.Tensor, function: Callable[[], Any]) -> Any:
    """Calls ``function`` with an active replay looking away; the same trick."""
    if has_torch_function((marker,)):
        return handle_torch_function(unwatched, (marker,), marker, function)
    return function()


def gated(
    module: LightningModule,
    units: Sequence[nn.Module],
    log: Callable[..., None],
    log_dict: Callable[..., None],
) -> AbstractContextManager[None]:
    changes: list[tuple[dict[str, Any], str, Any]] = []
    for index, unit in enumerate(units):
        # ``module.compile()`` bypasses forward; its entry point is replaced instead.
        compiled = unit.__dict__.get("_compiled_call_impl") is not None
        name = "_compiled_call_impl" if compiled else "forward"
        changes.append((unit.__dict__, name, _gate(index, getattr(unit, name))))
    changes += [(module.__dict__, "log", log), (module.__dict__, "log_dict", log_dict)]
    return replaced(changes)


def call_step(
    module: LightningModule, mode: Mode, batch: Any, batch_idx: int, dataloader_idx: int = 0
) -> Any:
    """Calls the user's step of ``mode`` with the arguments its signature asks for."""
    step = getattr(module, STEP_NAMES[mode])
    parameters = inspect.signature(step).parameters
    if "dataloader_iter" in parameters:
        raise ModelError(
            f"{STEP_NAMES[mode]} takes dataloader_iter; stages must all see the same microbatch. "
            "Take batch and batch_idx instead, or use pp=1."
        )
    if "dataloader_idx" in parameters:
        return step(batch, batch_idx, dataloader_idx=dataloader_idx)
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    if variadic or len(parameters) > 1 or "batch_idx" in parameters:
        return step(batch, batch_idx)
    return step(batch)


STEP_FRAME = call_step.__code__


def _gate(index: int, forward: Function) -> Callable[..., Any]:
    return lambda *args, **kwargs: enter_unit(MARKER, index, forward, args, kwargs)


# -- undoing what a trial run did to a module's state ----------------------------------------------


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Runs the body, then puts attributes, containers, buffers and random states back."""
    modules = [(child, dict(child.__dict__)) for child in module.modules()]
    containers: list[tuple[Any, Any]] = []
    tensors: dict[int, tuple[Tensor, Tensor]] = {}
    for _, state in modules:
        for value in state.values():
            _remember(value, containers, tensors)
    python_state = random.getstate()
    try:
        with kept_generators():
            yield
    finally:
        random.setstate(python_state)
        for child, state in modules:
            child.__dict__.clear()
            child.__dict__.update(state)
        for container, content in containers:
            _refill(container, content)
        for tensor, saved in tensors.values():
            _restore(tensor, saved)


class KeptObjects:
    """Objects and containers inside a call's arguments, as they were; tensors are shared.

    A layer may change a cache that it was given before it turns out that it has to run again.
    """

    def __init__(self, value: Any, depth: int = 6) -> None:
        self._saved: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        self._walk(value, depth)

    def restore(self) -> None:
        for container, content in self._saved:
            _refill(container, content)

    def _walk(self, value: Any, depth: int) -> None:
        if (
            isinstance(value, Tensor | nn.Module | type)
            or callable(value)
            or id(value) in self._seen
        ):
            return
        self._seen.add(id(value))
        items: Any = ()
        if isinstance(value, tuple):
            items = value
        elif type(value) is list or type(value) is dict:
            self._saved.append((value, value.copy()))
            items = value.values() if isinstance(value, dict) else value
        elif hasattr(value, "__dict__"):
            items = (vars(value),)
        for item in items if depth else ():
            self._walk(item, depth - 1)


def _remember(
    value: Any, containers: list[tuple[Any, Any]], tensors: dict[int, tuple[Tensor, Tensor]]
) -> None:
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter | Hole) and not value.is_meta:
            tensors[id(value)] = (value, value.detach().clone())
    elif type(value) in (list, dict, set) or isinstance(value, dict):
        containers.append((value, value.copy()))
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, Tensor):
                _remember(item, containers, tensors)


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
    else:
        container.clear()
        container.update(content)


def _restore(tensor: Tensor, saved: Tensor) -> None:
    if isinstance(tensor, Hole):
        exchange(tensor, saved)
    elif not torch.equal(tensor, saved):
        with torch.no_grad():
            tensor.copy_(saved)
