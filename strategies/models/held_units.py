"""The declared units of a module: whose they are, their names, and where their weights lie.

A rank holds the units of its stages; those of others stay in the module without their weights. How
units are run, and how their matrices lie over several ranks, this does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.stage_model import Unit, filled


class Elsewhere(nn.Module):
    """Stands for a unit that lives on another rank; holds nothing.

    ``listed`` is called when its parameters are listed, which are not all of the module's then.
    """

    def __init__(self, listed: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        vars(self)["_parameters"] = _NoParameters(listed)

    def forward(self, *inputs: Tensor) -> Tensor:
        raise ModelError(
            "a unit of another pipeline rank was called outside of the pipeline. Use pp=1 where "
            "the whole model is needed at once."
        )


class _NoParameters(dict[str, Any]):
    """Those of a unit that is not here; a copy is a plain dict."""

    def __init__(self, listed: Callable[[], None]) -> None:
        super().__init__()
        self._listed = listed

    def items(self) -> Any:
        self._listed()
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._listed()
        return dict, ()


class HeldUnits:
    """All units at first; see ``keep``.

    Attributes:
        units: In execution order.
        here: Those that this rank runs, by their place.
        parameter_names: All of the module's.
        canonical: Any name of a parameter -> the name at its first use.
        listed: Called when parameters of units are listed that are not here.
    """

    def __init__(self, module: nn.Module, declared: Sequence[tuple[str, nn.Module]]) -> None:
        """Raises: ModelError: What is declared is not all of the module, once."""
        modules = dict(module.named_modules())
        for name, unit in declared:
            if modules.get(name) is not unit:
                raise ModelError(
                    f"pipeline_units() names {name!r}, which is not that module's name. Return "
                    "pairs as named_modules() gives them."
                )
        if len({name for name, _ in declared}) != len(declared):
            raise ModelError(
                "pipeline_units() names a unit twice, and a unit runs once per step. "
                "Give each once."
            )
        self._module = module
        self.listed: Callable[[], None] = lambda: None
        self.units = _with_costs(module, declared)
        self.here: dict[int, nn.Module] = {i: unit for i, (_, unit) in enumerate(declared)}
        self._away: dict[int, nn.Module] = {}  # units of other ranks, without their weights
        self.parameter_names = tuple(name for name, _ in module.named_parameters())
        covered = {id(p) for _, unit in declared for p in unit.parameters()}
        for name, parameter in module.named_parameters():
            if id(parameter) not in covered:
                raise ModelError(
                    f"parameter {name} belongs to no unit of pipeline_units(), so no stage would "
                    "train it. Put its module into the list."
                )
        self._users, self.canonical = _users(declared)

    def keep(self, kept: Collection[int]) -> list[int]:
        """Takes all others for those of other ranks, and names them; see ``release``."""
        gone = [index for index in self.here if index not in kept]
        for index in gone:
            self._away[index] = self.here.pop(index)
        return gone

    def release(self) -> None:
        """Frees the weights of other ranks' units, which cannot be called then."""
        held = {id(p) for unit in self.here.values() for p in unit.parameters()}
        for index, unit in self._away.items():
            for parameter in unit.parameters():
                if id(parameter) not in held:
                    parameter.data = parameter.data.new_empty(0)
            self._put(index, Elsewhere(lambda: self.listed()))

    def restore(self, values: Mapping[str, Tensor], placed: dict[str, nn.Parameter]) -> None:
        """Puts other ranks' units back, with these weights.

        Args:
            values: By every name that a parameter has.
            placed: Parameters that are here anyway, by their canonical names; others are added.
        """
        for index, unit in self._away.items():
            prefix = self.units[index].name
            names = {id(p): self.canonical[f"{prefix}.{n}"] for n, p in unit.named_parameters()}
            for path, child in unit.named_modules(prefix=prefix):
                for attribute, parameter in child._parameters.items():
                    if parameter is not None:
                        name = names[id(parameter)]
                        if name not in placed:
                            placed[name] = filled(parameter, values[f"{path}.{attribute}"])
                        # Assigning to a known key is no change of the dict that is gone through.
                        child._parameters[attribute] = placed[name]
            self._put(index, unit)

    def _put(self, index: int, unit: nn.Module) -> None:
        parent, _, child = self.units[index].name.rpartition(".")
        setattr(self._module.get_submodule(parent), child, unit)

    def parameters(self, units: range) -> Iterator[tuple[str, nn.Parameter]]:
        """Of units that are here, each once."""
        seen: set[int] = set()
        for index in units:
            unit_name = self.units[index].name
            for name, parameter in self.here[index].named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    # A tied weight goes by one name wherever it lies.
                    yield self.canonical[f"{unit_name}.{name}"], parameter

    def shared(self, stages: Sequence[range]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Tied embeddings, say: of several units, which lie in several stages."""
        shared = []
        for name, users in self._users.items():
            where = sorted({s for s, units in enumerate(stages) if users & set(units)})
            if len(where) > 1:
                shared.append((name, tuple(where)))
        return tuple(shared)


def _with_costs(module: nn.Module, declared: Sequence[tuple[str, nn.Module]]) -> tuple[Unit, ...]:
    sizes = [float(sum(p.numel() for p in unit.parameters())) for _, unit in declared]
    costs = getattr(module, "unit_costs", lambda: sizes)()
    if len(costs) != len(declared):
        raise ModelError(
            f"unit_costs() has {len(costs)} figures for {len(declared)} units. Return one per unit."
        )
    return tuple(
        Unit(name, max(float(cost), 1.0)) for (name, _), cost in zip(declared, costs, strict=True)
    )


def _users(declared: Sequence[tuple[str, nn.Module]]) -> tuple[dict[str, set[int]], dict[str, str]]:
    """Name of each parameter's first use -> the units that hold it; any name -> that name."""
    first: dict[int, str] = {}
    users: dict[str, set[int]] = {}
    canonical_names: dict[str, str] = {}
    for index, (unit_name, unit) in enumerate(declared):
        for name, parameter in unit.named_parameters():
            canonical = first.setdefault(id(parameter), f"{unit_name}.{name}")
            users.setdefault(canonical, set()).add(index)
            canonical_names[f"{unit_name}.{name}"] = canonical
    return users, canonical_names
