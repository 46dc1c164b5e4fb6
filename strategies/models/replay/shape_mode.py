"""The function mode under which a step is replayed: operations on holes give holes.

Everything that concerns one replay, whatever its purpose: telling which tensors depend on
parameters ("tracked"), inferring operations and layers on holes. ``probe.py`` records a path under
it, ``stage_run.py`` follows one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from strategies.errors import ModelError
from strategies.models.collectives import is_collective, refuse_own_group
from strategies.models.contents import KeptObjects
from strategies.models.nested import is_plain, leaves, rebuild, signature, tensors
from strategies.models.replay.gate import (
    StageDone,
    enter_function,
    enter_unit,
    stepping,
    unwatched,
)
from strategies.models.replay.hole import (
    Args,
    Function,
    Hole,
    Kwargs,
    Spec,
    checks_arguments,
    dataless,
    exchange,
    operation_name,
    reads_gradient,
    user_line,
)
from strategies.models.replay.inference import (
    Effect,
    Given,
    New,
    Outcome,
    fill_template,
    infer_operation,
    run_on_made_up_data,
)
from strategies.models.replay.rows.packed_rows import infer_packing, packs, pads
from strategies.models.snapshot import restoring
from strategies.models.state import kept_generators

# Of their tracked argument these need shape, dtype and device only: real on every stage.
_LIKE = frozenset(
    {
        torch.zeros_like,
        torch.ones_like,
        torch.full_like,
        torch.empty_like,
        Tensor.new_zeros,
        Tensor.new_ones,
        Tensor.new_full,
        Tensor.new_empty,
        Tensor.new_tensor,
    }
)
# The same of what draws random numbers, between layers.
_DRAWN_LIKE = frozenset({torch.rand_like, torch.randn_like, torch.randint_like})
_MARK = "_replayed_by"
_TABLES = """
    _parameters _buffers _modules _non_persistent_buffers_set _forward_hooks _forward_pre_hooks
    _backward_hooks
"""
MODULE_TABLES = frozenset(_TABLES.split())


class DataNeededError(Exception):
    """Inside a layer: the layer looks at its data and has to run on made-up values."""


class ShapeMode(TorchFunctionMode):
    """Common part of probe and replay.

    Args:
        units: The unit modules.
        device: Where values live that stand on no other device.
        cache: Outcomes by signature, shared by all replays of a module and mode.
    """

    refuses_gradients = True  # manual optimization has words of its own for that

    def __init__(
        self, units: list[nn.Module], device: torch.device, cache: MutableMapping[Hashable, Outcome]
    ) -> None:
        super().__init__()
        self.units = units
        self._device = device
        self._cache = cache
        self._twins: dict[int, Tensor] = {}
        self._inside: int | None = None
        self._packings = 0
        self._turned: list[tuple[Tensor, Tensor]] = []  # inside a layer, and what they were before
        # Tensors carry this mark; the mode itself would keep everything it knows alive.
        self._token = object()

    @abstractmethod
    def on_unit(self, index: int, forward: Function, args: Args, kwargs: Kwargs) -> Any:
        """Answers a call of unit ``index`` made outside other units."""

    @abstractmethod
    def on_operation(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Answers an operation on a tracked value made outside units."""

    def plain(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Answers an operation on what no layer has a part in, which every stage has."""
        return func(*args, **kwargs)

    def on_inner_operation(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Answers an operation on a tracked value inside a unit that is being inferred."""
        outcome, metas = self.infer(func, args, kwargs)
        if outcome.dependent:
            raise DataNeededError(operation_name(func))
        return self.instantiate(outcome, metas, args, kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is enter_unit:
            _, index, forward, unit_args, unit_kwargs = args
            if self._inside is None:
                return self.on_unit(index, forward, unit_args, unit_kwargs)
            with self:  # a unit inside a unit that is being inferred
                return forward(*unit_args, **unit_kwargs)
        if func is enter_function:
            _, apply, given, named = args
            if self._inside is not None:
                with self:
                    return apply(*given, **named)
            tracked = self._any_tracked(given)
            return (self.on_operation if tracked else self.plain)(apply, given, named)
        if func is unwatched:
            return args[1]()
        kwargs = kwargs or {}
        if is_collective(func):
            refuse_own_group(func, kwargs)
        if not self._any_tracked(args) and not (kwargs and self._any_tracked(kwargs.values())):
            return self.plain(func, args, kwargs)
        if (
            self.refuses_gradients
            and getattr(func, "__self__", None) is Tensor.grad
            and reads_gradient()
            and (isinstance(args[0], nn.Parameter) or getattr(args[0], "parameter", None))
        ):
            raise stepping("reads or changes gradients (.grad, clip_grad_norm_)")
        like = func in _LIKE or (func in _DRAWN_LIKE and self._inside is None)
        if like and not any(self.tracked(a) for a in args[1:] if isinstance(a, Tensor)):
            model = args[0].spec.zeros() if isinstance(args[0], Hole) else args[0].detach()
            return self.plain(func, (model, *args[1:]), kwargs)
        if func is Tensor.__bool__ and isinstance(args[0], Hole) and checks_arguments():
            return True  # The stage that has the values checks them.
        if self._inside is not None:
            known, answer = dataless(func, args, kwargs)
            return answer if known else self.on_inner_operation(func, args, kwargs)
        return self.on_operation(func, args, kwargs)

    def escaped(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Answers an aten operation that reached a hole below Python's torch functions."""
        if self._inside is None:
            raise ModelError(
                f"{user_line()}: {func} works on a value of another pipeline stage below Python "
                "(vmap, TorchScript or a custom C++ operation between layers). Move it into a "
                "layer with parameters, or use pp=1."
            )
        return self.on_inner_operation(func, args, kwargs)

    def mark(self, tensor: Tensor) -> None:
        """Makes a real tensor count as tracked in this replay."""
        if not isinstance(tensor, Hole):
            tensor.__dict__[_MARK] = self._token

    def tracked(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` depends on parameters: a hole, a parameter, or marked."""
        return (
            type(tensor) is Hole
            or isinstance(tensor, nn.Parameter)
            or tensor.__dict__.get(_MARK) is self._token
        )

    def twin(self, tensor: Tensor) -> Tensor:
        """The meta tensor that stands for ``tensor``; one per hole and per parameter."""
        if isinstance(tensor, Hole) and tensor.parameter is None:
            return tensor.shape_tensor()
        if not isinstance(tensor, Hole | nn.Parameter):
            return Spec.of(tensor.detach()).meta()
        key = id(tensor)
        if key not in self._twins:
            spec = tensor.spec if isinstance(tensor, Hole) else Spec.of_parameter(tensor)
            meta = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
            self._twins[key] = meta.requires_grad_(spec.requires_grad)
        return self._twins[key]

    def on_packing(self, counts: Tensor) -> None:
        """Values have been packed, by a step or by a layer that is being inferred."""
        self._packings += 1

    def infer(self, func: Function, args: Args, kwargs: Kwargs) -> tuple[Outcome, list[Tensor]]:
        if packs(func) or pads(func):
            return infer_packing(func, args, self.tracked, self.on_packing)
        if not torch.is_inference_mode_enabled():
            return infer_operation(func, args, kwargs, twin=self.twin, device=self._device)
        with torch.inference_mode(False), torch.no_grad():  # It counts no versions.
            return infer_operation(func, args, kwargs, twin=self.twin, device=self._device)

    def skip(
        self, index: int, forward: Function, args: Args, kwargs: Kwargs, call: int
    ) -> tuple[Any, list[Tensor]]:
        """Answers a unit's call by holes; gives its result, and all tensors in it and its effects.

        What the unit did to its state and arguments while it was inferred is undone.
        """
        key = ("unit", index, torch.is_grad_enabled(), signature((args, kwargs)))
        given = list(leaves((args, kwargs)))
        hooked = _has_hooks(self.units[index])
        outcome = None if hooked else self._cache.get(key)
        if outcome is None or outcome.packs:
            arguments = KeptObjects((args, kwargs))
            with restoring(self.units[index]):
                outcome, holes = self.infer_unit(index, forward, args, kwargs, call)
            arguments.restore()
            if hooked:  # What they have gathered are these very holes.
                return self.give(outcome, holes, given)
            self._remember(key, outcome)
        return self.give(outcome, self.new_holes(outcome, None), given)

    def answer(self, func: Function, args: Args, kwargs: Kwargs) -> Outcome:
        """The outcome of an operation, inferred once per signature."""
        key = ("operation", func, torch.is_grad_enabled(), signature((args, kwargs)))
        outcome = self._cache.get(key)
        if outcome is None:
            with kept_generators():
                outcome, _ = self.infer(func, args, kwargs)
            if outcome.exact and not outcome.dependent:
                self._remember(key, outcome)
        return outcome

    def _remember(self, key: Hashable, outcome: Outcome) -> None:
        """Caches an outcome; forgets everything when step after step brings new shapes."""
        if len(self._cache) >= 4096:
            self._cache.clear()
        self._cache[key] = outcome

    def instantiate(
        self, outcome: Outcome, metas: list[Tensor] | None, args: Args, kwargs: Kwargs
    ) -> Any:
        """Makes the holes of an outcome, turns real arguments written to into holes as well."""
        new = self.new_holes(outcome, metas)
        if type(outcome.template) is New and not outcome.mutated:
            return new[outcome.template.index]
        given = list(leaves((args, kwargs)))
        for index, spec in outcome.mutated:
            self._turn_into_hole(given[index], spec)
        return fill_template(outcome.template, new, given)

    def new_holes(self, outcome: Outcome, metas: list[Tensor] | None) -> list[Hole]:
        new = []
        for index, spec in enumerate(outcome.specs):
            hole = Hole(spec, None if metas is None else metas[index], self)
            hole.unit = self._inside
            new.append(hole)
        return new

    def give(
        self, outcome: Outcome, holes: list[Hole], given: list[Any]
    ) -> tuple[Any, list[Tensor]]:
        """Sets a call's effects; returns its result, and all tensors in that and in them."""
        result = fill_template(outcome.template, holes, given)
        contents = []
        for effect in outcome.effects:
            contents.append(fill_template(effect.template, holes, given))
            setattr(effect.module, effect.attribute, contents[-1])
        return result, tensors((result, contents))

    def infer_unit(
        self, index: int, forward: Function, args: Args, kwargs: Kwargs, call: int
    ) -> tuple[Outcome, list[Hole]]:
        """Runs a unit on holes; gives its outcome and the very holes that it made.

        Effects are recorded but left in place: the caller undoes or overwrites them.
        """
        module = self.units[index]
        before = {(id(m), name): id(v) for m in module.modules() for name, v in vars(m).items()}
        arguments = KeptObjects((args, kwargs))
        given = list(leaves((args, kwargs)))  # before the layer may append to a list among them
        exact = True
        packings = self._packings
        self._inside = call
        try:
            try:
                # Compiled layers, too, run as written here; torch.compile cannot trace holes.
                with torch.compiler.set_stance("force_eager"), self:
                    result = forward(*args, **kwargs)
            except (ModelError, StageDone):
                raise
            except Exception as error:
                exact = False
                arguments.restore()
                for turned, tensor in self._turned:
                    exchange(turned, tensor)
                try:
                    result = run_on_made_up_data(module, forward, args, kwargs, self._device, call)
                except ModelError:
                    raise
                except Exception as second:
                    raise error from second
        finally:
            self._inside = None
            self._turned.clear()
        outcome, holes = self._describe_unit(module, result, given, before, exact, call)
        return replace(outcome, packs=self._packings > packings), holes

    def _describe_unit(
        self,
        module: nn.Module,
        result: Any,
        given: list[Any],
        before: dict[tuple[int, str], int],
        exact: bool,
        call: int,
    ) -> tuple[Outcome, list[Hole]]:
        places = {id(leaf): i for i, leaf in enumerate(given) if not is_plain(leaf)}
        new: dict[int, New] = {}
        holes: list[Hole] = []
        grad = torch.is_grad_enabled()

        def describe(leaf: Any) -> Any:
            if id(leaf) in places:
                return Given(places[id(leaf)])
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in new:
                new[id(leaf)] = New(len(holes))
                holes.append(self._as_hole(leaf, grad, call))
            return new[id(leaf)]

        template = rebuild(result, describe)
        effects = []
        for child in module.modules():
            for name, value in list(vars(child).items()):
                if name in MODULE_TABLES:
                    continue
                if self._made_here(value, before.get((id(child), name)), exact, call):
                    effects.append(Effect(child, name, rebuild(value, describe)))
        specs = tuple(hole.spec for hole in holes)
        return Outcome(template, specs, effects=tuple(effects), exact=exact), holes

    def _made_here(self, value: Any, before: int | None, exact: bool, call: int) -> bool:
        if isinstance(value, Tensor) and not isinstance(value, Hole):
            return not exact and id(value) != before and not isinstance(value, nn.Parameter)
        if isinstance(value, Hole | list | tuple | dict):
            holes = (leaf for leaf in leaves(value) if isinstance(leaf, Hole))
            return any(hole.unit == call and hole.owner is self for hole in holes)
        return False

    def _as_hole(self, tensor: Tensor, grad: bool, call: int) -> Hole:
        if isinstance(tensor, Hole):
            return tensor
        spec = Spec.of(tensor.detach())
        grad = grad and tensor.is_floating_point()
        hole = Hole(Spec(spec.shape, spec.stride, spec.dtype, self._device, grad), None, self)
        hole.unit = call
        return hole

    def _turn_into_hole(self, tensor: Tensor, spec: Spec) -> None:
        if not isinstance(tensor, Hole):
            before = Hole(spec, None, self)
            exchange(tensor, before)
            if self._inside is not None:
                self._turned.append((tensor, before))
        elif tensor.spec != spec and tensor.parameter is None:
            changed = Hole(spec, tensor._meta, self)
            changed.unit, changed.value = tensor.unit, tensor.value
            exchange(tensor, changed)

    def _any_tracked(self, values: Any) -> bool:
        for value in values:
            if isinstance(value, Tensor):
                if self.tracked(value):
                    return True
            elif isinstance(value, list | tuple):
                if self._any_tracked(value):
                    return True
            elif isinstance(value, dict) and self._any_tracked(value.values()):
                return True
        return False


def _has_hooks(layer: nn.Module) -> bool:
    """Whether a call of a layer runs hooks, which may gather what it is given or returns."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks)
