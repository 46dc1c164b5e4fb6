"""What an operation or a layer would return, from shapes alone.

Operations run on meta tensors. The few that need data to know their result's shape (indexing with
a mask) run a second time on zeros and on ones; if even the answer depends on the data (``item``,
a Python branch), the outcome says so and the caller decides.

Torch's own operations run once per description of their arguments and process: many do so in
Python there, which takes most of a probe's time, and layers repeat each other.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from strategies.models.flops import CostCounter
from strategies.models.nested import is_plain, leaves, rebuild, replaced, tensors
from strategies.models.replay.hole import Args, Function, Hole, Kwargs, Spec


class New:
    """Place of the ``index``-th new tensor in an outcome's template."""

    # No dataclass: containers are searched for places, and dataclasses are containers.
    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Given:
    """Place of the ``index``-th leaf of the arguments, returned as it came."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@dataclass(frozen=True, slots=True)
class Effect:
    """An attribute that a layer sets on a module inside it (an auxiliary loss, say)."""

    module: nn.Module
    attribute: str
    template: Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """The description of a result.

    Attributes:
        template: The result with ``New`` and ``Given`` in place of its tensors.
        specs: Of the new tensors.
        mutated: Indices of argument leaves changed in place, with their description afterwards.
        effects: Attributes set by a layer; empty for operations.
        dependent: Whether the result (not only its data) depends on data we do not have.
        exact: Whether equal signatures are sure to give equal outcomes.
        packs: Whether a layer packs sequences, whose lengths no signature tells.
    """

    template: Any
    specs: tuple[Spec, ...]
    mutated: tuple[tuple[int, Spec], ...] = ()
    effects: tuple[Effect, ...] = ()
    dependent: bool = False
    exact: bool = True
    packs: bool = False


def fill_template(template: Any, new: Sequence[Tensor], given: Sequence[Any]) -> Any:
    def place(leaf: Any) -> Any:
        if isinstance(leaf, New):
            return new[leaf.index]
        return given[leaf.index] if isinstance(leaf, Given) else leaf

    return rebuild(template, place)


def infer_operation(
    func: Function,
    args: Args,
    kwargs: Kwargs,
    *,
    twin: Callable[[Tensor], Tensor],
    device: torch.device,
) -> tuple[Outcome, list[Tensor]]:
    """Infers the outcome of ``func(*args, **kwargs)``; also gives the new meta tensors.

    Among the arguments are real tensors, parameters and holes; ``twin`` gives the meta tensor that
    stands for each. The result lives on ``device`` unless they tell otherwise.
    """
    given = list(leaves((args, kwargs)))
    twins: dict[int, Tensor] = {id(leaf): twin(leaf) for leaf in given if isinstance(leaf, Tensor)}
    target = _target_device(func, args, kwargs)
    where = target or _common_device(given) or device
    run, rest = _without_device(func, args, kwargs)

    def to_meta(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return twins[id(leaf)]
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    key = None if target is not None else _description(func, args, kwargs, twins, where)
    if key is not None and key in _known:
        return _known[key].again()
    counted = _Counted()
    versions = {key: meta._version for key, meta in twins.items()}
    meta_args, meta_kwargs = rebuild(rest, to_meta)
    try:
        result = run(*meta_args, **meta_kwargs)
    except Exception:  # which one says "needs data" differs from operation to operation
        return _infer_from_data(run, rest, given, where, twins)
    by_twin = {id(twins[id(leaf)]): i for i, leaf in enumerate(given) if isinstance(leaf, Tensor)}
    moved = target is not None and any(
        isinstance(leaf, Hole) and leaf.spec.device != target for leaf in given
    )
    template, metas = _describe(result, {} if moved else by_twin)
    if moved:  # A copy on another device must not share its shape tensor with the original.
        metas = [meta.clone() for meta in metas]
    mutated = tuple(
        (i, Spec.of(twins[id(leaf)], _device_of(leaf, device)))
        for i, leaf in enumerate(given)
        if isinstance(leaf, Tensor) and twins[id(leaf)]._version != versions[id(leaf)]
    )
    if not metas and not mutated and _has_value(template):
        return _infer_from_data(run, rest, given, where, twins)
    outcome = Outcome(template, tuple(Spec.of(meta, where) for meta in metas), mutated)
    if key is not None and not mutated and _stands_alone(template, metas, list(twins.values())):
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = counted.since(outcome)
    return outcome, metas


@dataclass(frozen=True, slots=True)
class _Known:
    """An outcome, and what the counters behind it made of finding it."""

    outcome: Outcome
    cost: float
    random: bool

    def again(self) -> tuple[Outcome, list[Tensor]]:
        counters = _counters()
        costs = [counter.cost for counter in counters]
        metas = [spec.meta() for spec in self.outcome.specs]
        for counter, cost in zip(counters, costs, strict=True):
            counter.cost = cost + self.cost
            counter.random = counter.random or self.random
        return self.outcome, metas


class _Counted:
    """The counters from here on."""

    def __init__(self) -> None:
        self._begun = [(counter, counter.cost, counter.draws) for counter in _counters()]

    def since(self, outcome: Outcome) -> _Known:
        cost, random = 0.0, False
        for counter, before, draws in self._begun:
            cost, random = counter.cost - before, counter.draws > draws
        return _Known(outcome, cost, random)


_known: dict[Hashable, _Known] = {}  # Of this process.
_MOST = 8192
_C: Any = torch._C
_OWNERS = (_C._VariableFunctions, _C._nn, _C._special, _C._linalg, _C._fft)
_PYTHON = ("torch.nn.functional", "torch.functional", "torch._tensor")


def _description(
    func: Function, args: Args, kwargs: Kwargs, twins: dict[int, Tensor], device: torch.device
) -> Hashable:
    """All that the outcome depends on; None where nobody can tell, or something else looks on."""
    if not _torchs_own(func) or not all(type(c) is CostCounter for c in _modes()):
        return None
    try:
        given = (_described(args, twins), _described(kwargs, twins))
    except TypeError:
        return None
    kinds = ("cpu", "cuda")
    return (
        func,
        given,
        device,
        bool(_counters()),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
    )


def _described(value: Any, twins: dict[int, Tensor]) -> Hashable:
    if isinstance(value, Tensor):
        twin = twins[id(value)]
        return (twin.shape, twin.stride(), twin.dtype, twin.requires_grad)
    if isinstance(value, list | tuple):
        return (type(value), *(_described(item, twins) for item in value))
    if type(value) is dict:
        return (dict, *((key, _described(item, twins)) for key, item in value.items()))
    if is_plain(value):
        return (type(value), value)
    raise TypeError(type(value))


def _torchs_own(func: Function) -> bool:
    """Whether it is written by torch; what others add (custom operations) may do as it likes."""
    if isinstance(func, types.MethodDescriptorType | types.WrapperDescriptorType):
        return func.__objclass__ is _C.TensorBase
    if isinstance(func, types.BuiltinFunctionType):
        return any(getattr(owner, func.__name__, None) == func for owner in _OWNERS)
    return isinstance(func, types.FunctionType) and func.__module__ in _PYTHON


def _modes() -> list[Any]:
    """Who looks on while an operation runs, besides this package's own function modes."""
    functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    strange = [m for m in functions if not type(m).__module__.startswith("strategies.")]
    return [*_get_current_dispatch_mode_stack(), *strange]


def _counters() -> list[CostCounter]:
    return [mode for mode in _get_current_dispatch_mode_stack() if type(mode) is CostCounter]


def _stands_alone(template: Any, metas: list[Tensor], twins: list[Tensor]) -> bool:
    """Whether a result is new tensors only, no views of anything, which any such would do for."""
    if not all(leaf is None or isinstance(leaf, New) for leaf in leaves(template)):
        return False
    storages = {meta.untyped_storage()._cdata for meta in metas}
    if len(storages) < len(metas):
        return False
    given = {twin.untyped_storage()._cdata for twin in twins}
    return storages.isdisjoint(given) and all(_is_dense(meta) for meta in metas)


def _is_dense(tensor: Tensor) -> bool:
    """Whether a copy of it has its strides."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _infer_from_data(
    func: Function, rest: Any, given: list[Any], device: torch.device, twins: dict[int, Tensor]
) -> tuple[Outcome, list[Tensor]]:
    """Runs ``func`` on zeros and on ones (on the CPU: a bad index must not kill a GPU)."""
    cpu = torch.device("cpu")
    versions: dict[int, int] = {}

    def run(fill: float) -> tuple[Any, dict[int, Tensor]]:
        made: dict[int, Tensor] = {}

        def concrete(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return cpu
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in made:
                if isinstance(leaf, Hole | nn.Parameter):
                    spec = leaf.spec if isinstance(leaf, Hole) else Spec.of_parameter(leaf)
                    made[id(leaf)] = torch.full(spec.shape, fill, dtype=spec.dtype)
                else:
                    made[id(leaf)] = leaf.detach().cpu().clone()
            return made[id(leaf)]

        with torch.no_grad():
            args, kwargs = rebuild(rest, concrete)
            versions.update((key, tensor._version) for key, tensor in made.items())
            result = func(*args, **kwargs)
        return result, made

    zeros, made = run(0)
    places = {id(made[id(leaf)]): i for i, leaf in enumerate(given) if id(leaf) in made}
    template, metas = _describe(zeros, places)
    try:
        ones, _ = run(1)
        same = [tensor.shape for tensor in tensors(ones)] == [t.shape for t in tensors(zeros)]
    except (RuntimeError, IndexError, ValueError):
        same = False
    grad = torch.is_grad_enabled() and any(
        leaf.spec.requires_grad if isinstance(leaf, Hole) else leaf.requires_grad
        for leaf in given
        if isinstance(leaf, Hole | nn.Parameter)
    )
    specs = []
    for i, meta in enumerate(metas):
        floating = meta.is_floating_point() or meta.is_complex()
        spec = Spec(tuple(meta.shape), meta.stride(), meta.dtype, device, grad and floating)
        specs.append(spec)
        metas[i] = spec.meta()
    mutated = []
    for i, leaf in enumerate(given):
        if id(leaf) in made and made[id(leaf)]._version != versions[id(leaf)]:
            with torch.no_grad():
                twins[id(leaf)].zero_()  # for whoever looks at versions to see what is written
            spec = Spec.of(twins[id(leaf)], _device_of(leaf, device))
            floating = leaf.is_floating_point()
            mutated.append((i, replace(spec, requires_grad=grad and floating)))
    dependent = _has_value(template) or not same
    return Outcome(template, tuple(specs), tuple(mutated), dependent=dependent, exact=False), metas


def _describe(result: Any, places: dict[int, int]) -> tuple[Any, list[Tensor]]:
    metas: list[Tensor] = []
    seen: dict[int, New] = {}

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in places:
            return Given(places[id(value)])
        if id(value) not in seen:
            seen[id(value)] = New(len(metas))
            metas.append(value)
        return seen[id(value)]

    return rebuild(result, leaf), metas


def _has_value(template: Any) -> bool:
    return any(leaf is not None and not isinstance(leaf, New | Given) for leaf in leaves(template))


def _device_of(tensor: Tensor, default: torch.device) -> torch.device:
    device = tensor.spec.device if isinstance(tensor, Hole) else tensor.device
    return default if device.type == "meta" else device


def _common_device(given: list[Any]) -> torch.device | None:
    """The device torch would compute on: a tensor with dimensions decides, holes first."""
    found = [leaf for leaf in given if isinstance(leaf, Tensor)]
    found.sort(key=lambda leaf: (_rank(leaf) == 0, not isinstance(leaf, Hole)))
    for tensor in found:
        if isinstance(tensor, Hole) and tensor.parameter is not None:
            continue  # named before the module moved to its device
        device = tensor.spec.device if isinstance(tensor, Hole) else tensor.device
        if device.type != "meta":
            return device
    return None


def _rank(tensor: Tensor) -> int:
    return len(tensor.spec.shape) if isinstance(tensor, Hole) else tensor.dim()


def _target_device(func: Function, args: Args, kwargs: Kwargs) -> torch.device | None:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    if func is Tensor.cpu:
        return torch.device("cpu")
    if func is Tensor.cuda:
        index = args[1] if len(args) > 1 else None
        return torch.device(index) if index is not None else torch.device("cuda")
    if func is Tensor.to and len(args) > 1:
        if isinstance(args[1], Tensor):
            return _device_of(args[1], torch.device("cpu"))
        if isinstance(args[1], torch.device | str | int):
            return torch.device(args[1])
    return None


def _without_device(
    func: Function, args: Args, kwargs: Kwargs
) -> tuple[Callable[..., Any], tuple[tuple[Any, ...], dict[str, Any]]]:
    """The same call with every device spelt as a ``torch.device``, so that it can be replaced."""
    if func is Tensor.cpu or func is Tensor.cuda:
        return Tensor.to, ((args[0], torch.device("meta")), {})
    if func is Tensor.to and len(args) > 1 and isinstance(args[1], str | int):
        args = (args[0], torch.device(args[1]), *args[2:])
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device(kwargs["device"])}
    return func, (args, kwargs)


# -- made-up data, for layers whose Python code looks at its tensors -------------------------------
#
# A mixture of experts that loops over the experts hit, for instance, cannot run on shapes alone.
# Only the shapes of what it returns are of interest, and those it has to keep on any data.

_MARK = "_made_up_by"


def run_on_made_up_data(
    module: nn.Module,
    forward: Function,
    args: Args,
    kwargs: Kwargs,
    device: torch.device,
    call: int,
) -> Any:
    """Runs ``forward`` of ``module`` with random floats and zero integers in place of holes.

    Arguments that come back unchanged are given back as the caller's own objects. Everything that
    is computed carries a mark, see ``made_up_by``: it must not be taken for data of the batch.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    made: dict[int, Tensor] = {}
    source: dict[int, Any] = {}

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, Hole):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = _random(leaf.spec, device, generator)
            source[id(made[id(leaf)])] = leaf
        return made[id(leaf)]

    made_up = replaced(_made_up_parameters(module, device, generator))
    with torch.no_grad(), made_up, _Marking(call):
        own_args, own_kwargs = _exchange((args, kwargs), make)
        result = forward(*own_args, **own_kwargs)
    _exchange((args, kwargs), lambda leaf: source.get(id(leaf), leaf))
    return rebuild(result, lambda leaf: source.get(id(leaf), leaf))


def _exchange(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Like ``rebuild``, but lists and dicts stay the same objects: a layer may write into them."""
    if type(value) is list:
        value[:] = [_exchange(item, leaf) for item in value]
        return value
    if type(value) is dict:
        for key, item in value.items():
            value[key] = _exchange(item, leaf)
        return value
    if type(value) is tuple:
        return tuple(_exchange(item, leaf) for item in value)
    return rebuild(value, leaf)


def made_up_by(tensor: Tensor) -> int | None:
    """The unit call that computed ``tensor`` from made-up data; None for all other tensors."""
    call: int | None = tensor.__dict__.get(_MARK)
    return call


class _Marking(TorchFunctionMode):
    def __init__(self, call: int) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors(result):
            tensor.__dict__[_MARK] = self._call
        return result


def _made_up_parameters(
    module: nn.Module, device: torch.device, generator: torch.Generator
) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """What stands in for parameters that are on another rank or not materialised yet."""
    for child in module.modules():
        parameters: dict[str, Any] = child._parameters
        for table in (parameters, child.__dict__):
            for name, value in list(table.items()):
                if isinstance(value, Hole) and value.parameter is not None:
                    yield table, name, _random(value.spec, device, generator)
                elif isinstance(value, nn.Parameter) and value.is_meta:
                    yield table, name, _random(Spec.of(value), device, generator)


def _random(spec: Spec, device: torch.device, generator: torch.Generator) -> Tensor:
    if not spec.dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    values = torch.randn(spec.shape, generator=generator) * 0.1
    return values.to(device=device, dtype=spec.dtype)
