"""Which modules are the units that a step is cut between.

Blocks of a repeated stack are units as a whole; outside of one they are looked for leaf by leaf.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from strategies.errors import ModelError
from strategies.models.replay.path import ParameterTable, Path


def units_to_open(units: dict[str, nn.Module], path: Path, table: ParameterTable) -> frozenset[str]:
    """Units that the step never calls although it uses what is in them, piece by piece."""
    called = {path.units[call.unit] for call in path.calls}
    used = {name for events in path.events for event in events for name in event.parameters}
    by_identity = table.by_identity()
    return frozenset(
        name
        for name, unit in units.items()
        if name not in called
        and any(True for _ in unit.children())
        and any(by_identity[id(parameter)] in used for parameter in unit.parameters())
    )


def alike(units: dict[str, nn.Module]) -> dict[int, frozenset[str]]:
    """Units with units inside, by index, and the names of all of their kind."""
    return {
        index: frozenset(name for name, other in units.items() if type(other) is type(unit))
        for index, unit in enumerate(units.values())
        if not _is_leaf(unit)
    }


_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def keeper_of(module: nn.Module, buffer: str) -> str:
    """The outermost module around a buffer, by their names, that has no parameters; "" if none."""
    names = buffer.split(".")[:-1]
    inside = (".".join(names[: depth + 1]) for depth in range(len(names)))
    return next((n for n in inside if not _has_parameters(module.get_submodule(n))), "")


def select_units(
    module: nn.Module,
    chain: str | None,
    opened: frozenset[str],
    keepers: frozenset[str] = frozenset(),
) -> dict[str, nn.Module]:
    """Chooses the units of ``module`` by their global names, in registration order.

    A module without parameters is no unit, but for ``keepers``: it runs on every stage. Parameters
    that belong to a module above the units (position tables, class tokens) are found by the probe
    where used. The children of ``chain`` are units whatever they contain; ``opened`` modules are
    none although they look like it, but their children are.

    Raises:
        ModelError: If ``chain`` names no container, or there is no parameter at all.
    """
    forced: nn.Module | None = None
    if chain is not None:
        forced = dict(module.named_modules()).get(chain)
        if forced is None or not any(True for _ in forced.children()):
            others = [n for n, child in module.named_modules() if isinstance(child, _CONTAINERS)]
            raise ModelError(
                f"model.pipeline_layers={chain} names no container of layers. Choose one of: "
                f"{', '.join(others) or 'none'}."
            )
    first: dict[int, tuple[str, nn.Module]] = {}
    for name, unit in _select(module, "", forced, opened, keepers):
        first.setdefault(id(unit), (name, unit))
    if not first and not _has_parameters(module):
        raise ModelError(
            f"{type(module).__name__} has no parameters, so there is nothing to cut into stages. "
            "Build the network in __init__ or configure_model, or use pp=1."
        )
    return dict(first.values())


def _select(
    module: nn.Module,
    name: str,
    forced: nn.Module | None,
    opened: frozenset[str],
    keepers: frozenset[str],
) -> Iterator[tuple[str, nn.Module]]:
    repeated = _repeated_children(module, forced)
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if path in keepers:
            yield path, child
        if not _has_parameters(child):
            continue
        contains_forced = forced is not None and any(m is forced for m in child.modules())
        whole = child_name in repeated or _is_leaf(child)
        if whole and not contains_forced and path not in opened:
            yield path, child
        else:
            yield from _select(child, path, forced, opened, keepers)


def _repeated_children(module: nn.Module, forced: nn.Module | None) -> frozenset[str]:
    """Children that are blocks of a stack: two or more composite ones of the same class."""
    if module is forced:
        return frozenset(name for name, _ in module.named_children())
    composite = {
        name: child
        for name, child in module.named_children()
        if _has_parameters(child)
        and not issubclass(_kind(child), _CONTAINERS)
        and any(True for _ in getattr(child, "_orig_mod", child).children())
    }
    if not isinstance(module, _CONTAINERS):
        # Blocks kept as attributes (down1, down2, ...); two towers are looked into instead.
        composite = {name: child for name, child in composite.items() if not _has_stack(child)}
    counts = Counter(_kind(child) for child in composite.values())
    return frozenset(name for name, child in composite.items() if counts[_kind(child)] > 1)


def _kind(module: nn.Module) -> type[nn.Module]:
    """The class of a module, compiled or not."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return type(inner)


def _has_stack(module: nn.Module) -> bool:
    return any(
        isinstance(child, _CONTAINERS) and _repeated_children(child, None)
        for child in module.modules()
    )


def _is_leaf(module: nn.Module) -> bool:
    """Modules that are never looked into: those without children, and torch's own layers."""
    if isinstance(module, torch._dynamo.OptimizedModule):
        return _is_leaf(module._orig_mod)
    if not any(_has_parameters(child) for child in module.children()):
        return True
    library = type(module).__module__.startswith("torch.nn.")
    return library and not isinstance(module, _CONTAINERS) and not _has_stack(module)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
