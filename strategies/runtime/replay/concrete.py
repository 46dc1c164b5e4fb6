"""Running one layer on made-up data, for layers whose Python code looks at its tensors.

A mixture of experts that loops over the experts hit, for instance, cannot run on shapes alone. Only
the shapes of what it returns are of interest, and those it has to keep on any data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from strategies.runtime.replay.hole import Hole, Spec
from strategies.runtime.replay.structure import rebuild, tensors


def run_on_made_up_data(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
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

    with torch.no_grad(), _made_up_parameters(module, device, generator), _Marking(call):
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


_MARK = "_made_up_by"


class _Marking(TorchFunctionMode):
    def __init__(self, call: int) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors(result):
            tensor.__dict__[_MARK] = self._call
        return result


@contextlib.contextmanager
def _made_up_parameters(
    module: nn.Module, device: torch.device, generator: torch.Generator
) -> Iterator[None]:
    """Stands in for parameters that are on another rank or not materialised yet."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for child in module.modules():
            parameters: dict[str, Any] = child._parameters
            for table in (parameters, child.__dict__):
                for name, value in list(table.items()):
                    if isinstance(value, Hole) and value.parameter is not None:
                        spec = value.spec
                    elif isinstance(value, nn.Parameter) and value.is_meta:
                        spec = Spec.of(value)
                    else:
                        continue
                    replaced.append((table, name, value))
                    table[name] = _random(spec, device, generator)
        yield
    finally:
        for table, name, value in replaced:
            table[name] = value


def _random(spec: Spec, device: torch.device, generator: torch.Generator) -> Tensor:
    if not spec.dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    values = torch.randn(spec.shape, generator=generator) * 0.1
    return values.to(device=device, dtype=spec.dtype)
