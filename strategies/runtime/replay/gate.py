"""The doors between the user's step and the replay: unit calls, log calls, leaving the step.

During a replay (and only then) the units' ``forward`` and the module's ``log`` are replaced on the
instances, so that recomputation inside backward meets the user's own code.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

from strategies.errors import ModelError
from strategies.runtime.stage_model import STEP_NAMES, Mode

MARKER = torch.zeros(())


class StageDone(BaseException):
    """Leaves the user's step once a stage's part is done; passes through ``except Exception``."""


def enter_unit(
    marker: torch.Tensor,
    index: int,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
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


@contextlib.contextmanager
def gated(
    module: LightningModule,
    units: Sequence[nn.Module],
    log: Callable[..., None],
    log_dict: Callable[..., None],
) -> Iterator[None]:
    """Replaces the units' forward and the module's log functions inside the context."""
    changed: list[tuple[dict[str, Any], str, Any]] = []

    def replace(table: dict[str, Any], name: str, value: Any) -> None:
        changed.append((table, name, table.get(name, _ABSENT)))
        table[name] = value

    try:
        for index, unit in enumerate(units):
            # ``module.compile()`` bypasses forward; its entry point is replaced instead.
            compiled = unit.__dict__.get("_compiled_call_impl") is not None
            name = "_compiled_call_impl" if compiled else "forward"
            replace(unit.__dict__, name, _gate(index, getattr(unit, name)))
        replace(module.__dict__, "log", log)
        replace(module.__dict__, "log_dict", log_dict)
        yield
    finally:
        for table, name, value in reversed(changed):
            if value is _ABSENT:
                table.pop(name, None)
            else:
                table[name] = value


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

_ABSENT = object()


def _gate(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
    def gate(*args: Any, **kwargs: Any) -> Any:
        return enter_unit(MARKER, index, forward, args, kwargs)

    return gate
