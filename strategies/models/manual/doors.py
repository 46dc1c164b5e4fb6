"""What a step with manual optimization does to its optimizers and to its module.

While a step is looked at or run, whatever it does to optimizers, schedules and toggles is led to
whoever watches it (``Doors``): it has to happen once per batch, not once per microbatch and stage.
What it leaves on the module is looked through here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric

from strategies.errors import ModelError
from strategies.models.contents import CONTAINERS, MISSING
from strategies.models.manual.dataflow import FlowProbe
from strategies.models.manual.flow_run import Action
from strategies.models.nested import leaves, tensors
from strategies.models.replay.gate import MARKER, unwatched
from strategies.models.replay.hole import Hole, Spec
from strategies.models.replay.path import ParameterTable
from strategies.models.snapshot import Snapshot, StateRef

Rates = dict[tuple[int, int, str], Any]
"""Entries of parameter groups (a learning rate), by optimizer, group and name."""


class Stale:
    """What a step has assigned to its module, as the step of the next batch finds it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._left: dict[str, Hole] = {}
        self._kept: list[Hole] = []  # An identity is one object's as long as it lives.

    def note(self, changes: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in changes.items() if isinstance(value, Hole)}

    @property
    def specs(self) -> dict[str, Spec]:
        """Of values of layers, by the attribute that the step has left them in."""
        return {name: value.spec for name, value in self._left.items()}

    def leave(self) -> dict[int, str]:
        """Puts them there, as values that nobody knows; gives their names by identity."""
        found = {}
        for name, value in self._left.items():
            hole = Hole(value.spec)
            self._module.__dict__[name] = hole
            self._kept.append(hole)
            found[id(hole)] = name
        return found


class StateCheck:
    """Refuses what a step leaves on its module that cannot be once per batch."""

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module]) -> None:
        self._module = module
        self._state = Snapshot(module, layers).take()

    def changes(self) -> dict[str, Any]:
        """The attributes of the module that the step has assigned.

        Raises:
            ModelError: It has changed something else, or in another way.
        """
        found = {}
        for ref in self._state.changed():
            value = self._state.value(ref)
            before = self._state.before(ref)
            surface = not ref.module and not self._state.is_buffer(ref)
            assigned = surface and value is not before
            holes = any(isinstance(leaf, Hole) for leaf in leaves(value))
            gathers = holes and isinstance(before, CONTAINERS)
            if not assigned or gathers:
                raise ModelError(self._refusal(ref))
            found[ref.key] = value
        return found

    def _refusal(self, ref: StateRef) -> str:
        owner: Any = self._module
        if ref.module != "trainer":
            owner = owner.get_submodule(ref.module)
        what = f"self.{ref.module or ref.name}"
        often = (
            "With manual optimization the step runs once per microbatch and stage, so that would "
            "happen too often."
        )
        name = f"training_step of {type(self._module).__name__}"
        if isinstance(owner, Metric):
            return (
                f"{name} updates the metric {what}. {often} Update it in validation_step, or log "
                "tensors (self.log takes means and sums over the batch)."
            )
        return (
            f"{name} changes self.{ref.name} in place. {often} Log it (self.log takes means and "
            "sums), assign plain attributes anew (self.n = self.n + 1), or do it in "
            "on_train_batch_end."
        )


class Doors:
    """What a step does to its optimizers and schedules, led to whoever watches the step."""

    def __init__(self, module: LightningModule, current: Callable[[], Any]) -> None:
        self._current = current
        self._changes: list[tuple[dict[str, Any], str, Any]] = []
        strategy: Any = module.trainer.strategy
        self._raw = list(strategy.optimizers)
        self._put(module, "manual_backward", self._backward)
        for name, kind in (("toggle_optimizer", "toggle"), ("untoggle_optimizer", "untoggle")):
            self._put(module, name, partial(self._about, kind, getattr(module, name)))
        clip = partial(self._about, "clip_gradients", module.clip_gradients)
        self._put(module, "clip_gradients", clip)
        for number, optimizer in enumerate(strategy._lightning_optimizers):
            self._put(optimizer, "step", partial(self._step, number, optimizer.step, False))
            zero = partial(self._zero, number, optimizer.zero_grad)
            self._put(optimizer, "zero_grad", zero)
        for number, raw in enumerate(self._raw):
            self._put(raw, "step", partial(self._step, number, raw.step, True))
            self._put(raw, "zero_grad", partial(self._zero, number, raw.zero_grad))
        for number, config in enumerate(strategy.lr_scheduler_configs):
            scheduler = config.scheduler
            self._put(scheduler, "step", partial(self._schedule, number, scheduler.step))

    def changes(self) -> list[tuple[dict[str, Any], str, Any]]:
        return self._changes

    def rates(self) -> Rates:
        """All that optimizers have of numbers: a step may set them by hand."""
        return {
            (number, place, name): value
            for number, optimizer in enumerate(self._raw)
            for place, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        }

    def set_rates(self, rates: Rates) -> None:
        for (number, place, name), value in rates.items():
            self._raw[number].param_groups[place][name] = value

    @contextmanager
    def kept_rates(self) -> Iterator[Rates]:
        """Puts them back afterwards; gives those that have been another then."""
        before = self.rates()
        changed: Rates = {}
        try:
            yield changed
        finally:
            now = self.rates()
            changed |= {key: now[key] for key in now if now[key] is not before.get(key, MISSING)}
            if changed:
                self.set_rates(before)

    def _put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._changes.append((owner.__dict__, name, function))

    def _backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        self._current().backward(loss, *args, **kwargs)

    def _step(
        self, number: int, original: Callable[..., Any], raw: bool, *args: Any, **kwargs: Any
    ) -> Any:
        closure, args = (args[0], args[1:]) if args else (kwargs.pop("closure", None), ())
        # What it computes belongs to this microbatch; the update follows, once for all of them.
        loss = None if closure is None else closure()
        self._act("step", number, ("raw",) if raw else (), original, args, kwargs)
        return loss

    def _zero(self, number: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._act("zero_grad", number, (), original, args, kwargs)

    def _schedule(
        self, number: int, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if any(isinstance(value, Hole) for value in tensors((args, kwargs))):
            raise ModelError(
                "training_step steps a schedule by a value that only one stage has. Log the value "
                "and step the schedule in on_train_epoch_end, by "
                "self.trainer.callback_metrics[name]."
            )
        return self._act("schedule", number, (), original, args, kwargs)

    def _about(
        self, kind: str, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        plain = getattr(optimizer, "_optimizer", optimizer)
        number = next((n for n, raw in enumerate(self._raw) if raw is plain), None)
        if number is None:
            raise ModelError(
                f"training_step calls {kind} with an optimizer that configure_optimizers() has "
                "not returned. Return it from there."
            )
        return self._act(kind, number, (), original, (optimizer, *args), kwargs)

    def _act(
        self,
        kind: str,
        number: int,
        more: tuple[str, ...],
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        about = None if kind == "schedule" else number
        plain = tuple(a for a in (*args, *kwargs.values()) if isinstance(a, int | float | str))
        signature = (kind, number, *more, *plain)
        perform = partial(original, *args, **kwargs)
        return self._current().act(Action(kind, signature, perform, about))


class Flags:
    """Toggles as a probe sees them: of parameters that are elsewhere, too; undone at the end."""

    def __init__(self, table: ParameterTable, optimized: Sequence[Sequence[str]]) -> None:
        self._table = table
        self._optimized = optimized
        self._toggled: dict[str, bool] = {}
        self._before: dict[str, bool] = {}

    def __enter__(self) -> Flags:
        self._before = {name: self._get(name) for names in self._optimized for name in names}
        return self

    def __exit__(self, *_: object) -> None:
        for name, flag in self._before.items():
            self._set(name, flag)

    def toggle(self, number: int) -> None:
        self._toggled = {}
        for name in (name for names in self._optimized for name in names):
            self._toggled.setdefault(name, self._get(name))
            self._set(name, False)
        for name in self._optimized[number]:
            self._set(name, self._toggled[name])

    def untoggle(self, number: int) -> None:
        for other, names in enumerate(self._optimized):
            for name in names if other != number else ():
                if name in self._toggled:
                    self._set(name, self._toggled[name])
        self._toggled = {}

    def _get(self, name: str) -> bool:
        found = self._table.find(name)
        return found.spec.requires_grad if isinstance(found, Hole) else found.requires_grad

    def _set(self, name: str, flag: bool) -> None:
        found = self._table.find(name)
        if isinstance(found, Hole):
            found.spec = replace(found.spec, requires_grad=flag)
        else:
            unwatched(MARKER, lambda: found.requires_grad_(flag))


@dataclass(frozen=True)
class Probing:
    """A probe behind the doors of a step: actions are noted, and toggles followed."""

    probe: FlowProbe
    flags: Flags

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        self.probe.backward(loss, *args, **kwargs)

    def act(self, action: Action) -> None:
        self.probe.act(action.kind, action.signature)
        if action.kind == "toggle" and action.optimizer is not None:
            self.flags.toggle(action.optimizer)
        elif action.kind == "untoggle" and action.optimizer is not None:
            self.flags.untoggle(action.optimizer)
