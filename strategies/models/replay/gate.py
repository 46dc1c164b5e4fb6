"""The doors between the user's step and the replay: unit calls, log calls, leaving the step.

During a replay (and only then) the units' ``forward`` and the module's ``log`` are replaced on the
instances, so that recomputation inside backward meets the user's own code.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.hooks import BackwardHook

from strategies.errors import ModelError
from strategies.models.nested import replaced
from strategies.models.replay.hole import Args, Function, Hole, Kwargs, user_line
from strategies.models.replay.side_effects import watched
from strategies.models.stage_model import STEP_NAMES, Mode

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


def enter_function(marker: torch.Tensor, apply: Function, args: Args, kwargs: Kwargs) -> Any:
    """Calls an autograd function; an active replay takes it for one operation.

    So the backward that its author has written comes with it.
    """
    if has_torch_function((marker,)):
        return handle_torch_function(enter_function, (marker,), marker, apply, args, kwargs)
    return apply(*args, **kwargs)


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
        changes += _gates_of(unit, index)
    changes += [(module.__dict__, "log", log), (module.__dict__, "log_dict", log_dict)]
    trainer = getattr(module, "_trainer", None)
    loggers = getattr(trainer, "_loggers", None)
    if loggers:
        changes.append((vars(trainer), "_loggers", [_Unwritten(each) for each in loggers]))
    changes.append((vars(torch.nn.modules.module), "BackwardHook", _BackwardHook))
    if module.automatic_optimization:
        strategy: Any = getattr(trainer, "strategy", None)
        names = ("_optimizers", "_lightning_optimizers", "lr_scheduler_configs")
        changes += steps_refused(module, *(getattr(strategy, name, ()) for name in names))
    return replaced(changes)


def steps_refused(
    module: LightningModule | None, *steppers: Any
) -> list[tuple[dict[str, Any], str, Any]]:
    """Changes by which an automatic step cannot do what is done once per batch.

    ``steppers`` are lists of optimizers and of schedules' configurations; those that are made when
    a step asks for them have changes of their own.
    """
    changes: list[tuple[dict[str, Any], str, Any]] = [
        (vars(module), name, _Stepping(name)) for name in _BY_HAND if module is not None
    ]
    for each in (each for found in steppers if type(found) is list for each in found):
        stepper = getattr(each, "scheduler", each)
        groups = getattr(stepper, "param_groups", ())
        changes += [(vars(stepper), "param_groups", [*map(_Rates, groups)])] if groups else []
        kind = type(getattr(stepper, "_optimizer", stepper)).__name__
        changes += [
            (vars(stepper), name, _Stepping(f"{kind}.{name}"))
            for name in ("step", "zero_grad")
            if hasattr(stepper, name)
        ]
    return changes


class _Rates(dict[str, Any]):
    """A group of an optimizer, of which an automatic step must not change the rate."""

    def __setitem__(self, name: str, value: Any) -> None:
        raise stepping(f"sets {name} of an optimizer")

    def update(self, *_: Any, **__: Any) -> None:
        raise stepping("sets values of an optimizer")


_BY_HAND = ("manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients")


class _Stepping:
    """Stands for a method that an automatic step must not call."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise stepping(f"calls {self._name}")


def stepping(what: str) -> ModelError:
    return ModelError(
        f"{user_line()}: a step {what}. A pipeline runs it once per microbatch and stage, before "
        "the gradients are complete. Look at gradients in on_before_optimizer_step, which sees "
        "those of all parameters, let configure_optimizers() return schedules, or set "
        "self.automatic_optimization = False, with which that happens once per batch."
    )


class _BackwardHook(BackwardHook):
    """Ties the hooks of a module's gradients to its tensors, where these are here."""

    def _apply_on_tensors(self, fn: Any, args: Any) -> Any:
        if any(isinstance(arg, Hole) for arg in args):
            return args, None
        apply: Callable[..., Any] = super()._apply_on_tensors
        return apply(fn, args)


class _Unwritten:
    """A logger inside a step: it has its name and its folder, but nothing is written to it.

    Rank 0 alone writes, where the last stage's values mostly are not, and it would do so once for
    each microbatch.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._logger)  # Steps ask which kind of logger it is.

    def __getattr__(self, name: str) -> Any:
        value = None if name == "experiment" else getattr(self._logger, name)
        if name == "experiment" or (name.startswith("log_") and callable(value)):
            raise ModelError(
                f"{user_line()}: a step uses {type(self._logger).__name__}.{name}, which rank 0 "
                "alone can, and a pipeline runs the step once per microbatch and stage. Log "
                "numbers with self.log; return the rest from the step and write it in "
                "on_train_batch_end, on_validation_batch_end and the like, which get it as outputs."
            )
        return value


def call_step(
    module: LightningModule,
    mode: Mode,
    batch: Any,
    batch_idx: int,
    dataloader_idx: int | None = None,
    *,
    whole: bool = False,
) -> Any:
    """Calls the user's step of ``mode`` with the arguments that Lightning gives it.

    A ``whole`` one runs once per batch, and may write files.

    ``dataloader_idx`` is the evaluation loader's; of a training step it says which way it goes, and
    the step is not told.
    """
    step = getattr(module, STEP_NAMES[mode])
    function = getattr(step, "__func__", step)
    if function not in _ARGUMENTS:
        takes_loader = "dataloader_iter" in inspect.signature(step).parameters
        _ARGUMENTS[function] = takes_loader, takes_batch_idx(step)
    takes_loader, takes_index = _ARGUMENTS[function]
    if takes_loader:
        raise ModelError(
            f"{STEP_NAMES[mode]} takes dataloader_iter; stages must all see the same microbatch. "
            "Take batch and batch_idx instead."
        )
    arguments = [batch, batch_idx] if takes_index else [batch]
    if dataloader_idx is not None and mode != "train":
        arguments.append(dataloader_idx)
    with _STEPS.versions_counted():
        return step(*arguments) if whole else watched(step, *arguments)


STEP_FRAME = call_step.__code__
# Of a step: whether it takes a loader, and whether the batch's number.
_ARGUMENTS: WeakKeyDictionary[Any, tuple[bool, bool]] = WeakKeyDictionary()


class _StepThreads:
    """Which threads are inside a step, and the one patch that serves them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._own = threading.local()
        self._enter: Callable[[Any], None] = torch.inference_mode.__enter__
        self._apply: Any = vars(torch.autograd.Function)["apply"]

    @contextlib.contextmanager
    def versions_counted(self) -> Iterator[None]:
        """A step's own ``torch.inference_mode()`` takes no gradients, and no more than that.

        Its tensors would count no versions, by which shapes are followed, and nothing could be
        filled in there that needs a gradient.

        Steps of manual optimization run in threads and end in any order, so the first one that
        begins patches the class, and the last one that ends restores it.
        """
        with self._lock:
            self._running += 1
            if self._running == 1:
                self._enter = torch.inference_mode.__enter__
                torch.inference_mode.__enter__ = _enter_inference  # type: ignore[method-assign]
                self._apply = vars(torch.autograd.Function)["apply"]
                torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment]
        self._own.depth = self._depth + 1
        try:
            yield
        finally:
            self._own.depth -= 1
            with self._lock:
                self._running -= 1
                if self._running == 0:
                    torch.inference_mode.__enter__ = self._enter  # type: ignore[method-assign]
                    torch.autograd.Function.apply = self._apply  # type: ignore[method-assign]

    @property
    def _depth(self) -> int:
        return getattr(self._own, "depth", 0)

    def apply(self, function: type, args: Args, kwargs: Kwargs) -> Any:
        own = self._apply.__get__(None, function)
        if not self._depth or function.__module__.startswith(("torch.", "strategies.")):
            return own(*args, **kwargs)
        return enter_function(MARKER, own, args, kwargs)

    def enter(self, mode: Any) -> None:
        if mode.mode and self._depth:
            mode._inference_mode_context = torch.no_grad()
            mode._inference_mode_context.__enter__()
        else:
            self._enter(mode)


_STEPS = _StepThreads()


def _enter_inference(mode: Any) -> None:
    _STEPS.enter(mode)


def _apply(function: type, *args: Any, **kwargs: Any) -> Any:
    return _STEPS.apply(function, args, kwargs)


def takes_batch_idx(step: Callable[..., Any]) -> bool:
    """Lightning's rule: the name ``batch_idx``, any second argument, or ``*args``."""
    return is_param_in_hook_signature(step, "batch_idx", min_args=2)


def _gates_of(unit: nn.Module, index: int) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """A layer's call, with its hooks, and ``forward`` for steps that call that by itself."""
    own = unit.__dict__
    call = own.get("_compiled_call_impl")
    if call is None:  # Else its code is compiled as it is, and must not be changed.
        gate = _gate(index, unit.forward)
        yield own, "forward", gate
        call = _call_of(unit, gate)
    yield own, "_compiled_call_impl", _gate(index, call)


def _call_of(unit: nn.Module, gate: Any) -> Callable[..., Any]:
    """A layer's call, with its hooks, past the gate that is for steps that call ``forward``."""
    own = unit.__dict__
    forward = own.get("forward")
    run: Any = unit._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        if own.get("forward") is not gate:
            return run(*args, **kwargs)
        if forward is None:
            del own["forward"]
        else:
            own["forward"] = forward
        try:
            return run(*args, **kwargs)
        finally:
            own["forward"] = gate

    return call


def _gate(index: int, forward: Function) -> Callable[..., Any]:
    return lambda *args, **kwargs: enter_unit(MARKER, index, forward, args, kwargs)


# -- what the user has compiled -------------------------------------------------------------------
#
# Dynamo cannot trace a replay, but inside a layer there is none. So what is compiled above layers
# (a stack of them, a function, ``forward`` itself) runs as it is written, and layers run compiled.


def has_compiled() -> bool:
    """Whether anybody has called ``torch.compile`` in this process."""
    patcher: Any = getattr(torch._dynamo.eval_frame, "TorchPatcher", None)
    return patcher is None or patcher.patch.cache_info().currsize > 0


def as_written() -> AbstractContextManager[Any]:
    """Inside, compiled code runs uncompiled."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def as_compiled() -> AbstractContextManager[Any]:
    """Inside a layer: as the user has asked for."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("default")
    return stance


def compiled_above(module: nn.Module, units: Sequence[nn.Module]) -> list[str]:
    """Names of compiled modules that are no units and lie in none."""
    inside = {id(child) for unit in units for child in unit.modules()}
    return [
        name or type(module).__name__
        for name, child in module.named_modules()
        if id(child) not in inside
        and any(True for _ in child.parameters())
        and (
            isinstance(child, torch._dynamo.OptimizedModule)
            or child.__dict__.get("_compiled_call_impl") is not None
        )
    ]
