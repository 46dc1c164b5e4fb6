"""Which modules are units: blocks of a repeated stack as a whole, outside of it leaf by leaf."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from strategies.errors import ModelError

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def select_units(
    module: nn.Module, chain: str | None = None, opened: frozenset[str] = frozenset()
) -> dict[str, nn.Module]:
    """Chooses the units of ``module`` by their global names, in registration order.

    A module without parameters is no unit: it runs on every stage. Parameters that belong to a
    module above the units (position tables, class tokens) are found by the probe where used.

    Args:
        module: The whole model.
        chain: Name of the container whose children are units, whatever they contain.
        opened: Names of modules that are no units although they look like it; their children are.

    Raises:
        ModelError: If ``chain`` names no container, or there is no parameter at all.
    """
    forced: nn.Module | None = None
    if chain is not None:
        forced = dict(module.named_modules()).get(chain)
        if forced is None or not any(True for _ in forced.children()):
            raise ModelError(
                f"model.pipeline_layers={chain} names no container of layers. Containers are: "
                f"{', '.join(_containers(module)) or 'none'}."
            )
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for name, unit in _select(module, "", forced, opened):
        if id(unit) not in seen:
            seen.add(id(unit))
            found[name] = unit
    if not found and not any(True for _ in module.parameters()):
        raise ModelError(
            f"{type(module).__name__} has no parameters, so there is nothing to cut into stages. "
            "Build the network in __init__ or configure_model, or use pp=1."
        )
    return found


def _select(
    module: nn.Module, name: str, forced: nn.Module | None, opened: frozenset[str]
) -> Iterator[tuple[str, nn.Module]]:
    repeated = _repeated_children(module, forced)
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if not _has_parameters(child):
            continue
        contains_forced = forced is not None and any(m is forced for m in child.modules())
        whole = child_name in repeated or _is_leaf(child)
        if whole and not contains_forced and path not in opened:
            yield path, child
        else:
            yield from _select(child, path, forced, opened)


def _repeated_children(module: nn.Module, forced: nn.Module | None) -> frozenset[str]:
    """Children that are blocks of a stack: two or more composite ones of the same class."""
    if module is forced:
        return frozenset(name for name, _ in module.named_children())
    composite = {
        name: child
        for name, child in module.named_children()
        if _has_parameters(child)
        and not isinstance(child, _CONTAINERS)
        and any(True for _ in child.children())
    }
    if not isinstance(module, _CONTAINERS):
        # Blocks kept as attributes (down1, down2, ...); two towers are looked into instead.
        composite = {name: child for name, child in composite.items() if not _has_stack(child)}
    counts = Counter(type(child) for child in composite.values())
    return frozenset(name for name, child in composite.items() if counts[type(child)] > 1)


def _has_stack(module: nn.Module) -> bool:
    return any(
        isinstance(child, _CONTAINERS) and _repeated_children(child, None)
        for child in module.modules()
    )


def _is_leaf(module: nn.Module) -> bool:
    """Modules that are never looked into: those without children, and torch's own layers."""
    children = any(_has_parameters(child) for child in module.children())
    library = type(module).__module__.startswith("torch.nn.") and not isinstance(
        module, _CONTAINERS
    )
    return not children or (library and not _has_stack(module))


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _containers(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if isinstance(child, _CONTAINERS)]
