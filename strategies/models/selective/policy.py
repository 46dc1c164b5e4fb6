"""Which layers recompute which families of operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from strategies.errors import ModelError
from strategies.models.selective.region import SelectiveLayer
from strategies.plan import FAMILIES, Family, Recompute


@dataclass(frozen=True, slots=True)
class Selection:
    """Families that are recomputed inside layers, by type name of the layer; none keeps all.

    ``default`` holds for types that ``layers`` does not name. With ``joined`` units that lie side
    by side in one layer (an attention and its MLP) run again as one, from the first one's input.
    """

    default: frozenset[Family] = frozenset({"attention", "norm", "activation"})
    layers: Mapping[str, frozenset[Family]] = field(default_factory=dict)
    joined: bool = False

    @classmethod
    def asked(cls, recompute: Recompute) -> Selection:
        """What a plan asks for."""
        if recompute.policy == "layer":
            return cls(frozenset(FAMILIES), joined=True)
        return cls(layers={name: frozenset(found) for name, found in recompute.layers})

    def of(self, layer: nn.Module) -> frozenset[Family]:
        for name in _type_names(layer):
            if name in self.layers:
                return self.layers[name]
        return self.default

    def layers_of(self, layers: Mapping[int, nn.Module]) -> dict[int, SelectiveLayer]:
        """What runs each of the model's layers, under the layers' numbers.

        Raises:
            ModelError: ``layers`` names a type that the model lacks, or a layer is compiled.
        """
        known: set[str] = set()
        for layer in layers.values():
            known.update(_type_names(layer))
            if any(map(_is_compiled, layer.modules())):
                raise ModelError(
                    "recompute=selective and recompute=layer decide operation by operation, and "
                    "compiled layers hide theirs. Use compile=false, or recompute=full."
                )
        for name in self.layers:
            if name not in known:
                raise ModelError(
                    f"recompute.layers names {name}, but the model's layers are of the types "
                    f"{', '.join(sorted(known))}. Use one of these names."
                )
        return {index: SelectiveLayer(layer, self.of(layer)) for index, layer in layers.items()}


def _type_names(layer: nn.Module) -> list[str]:
    """The types by which a layer can be called: its own, and those of what it merely wraps."""
    names = [type(layer).__name__]
    while len(children := list(layer.children())) == 1:
        layer = children[0]
        names.append(type(layer).__name__)
    return names


def _is_compiled(module: nn.Module) -> bool:
    own = getattr(module, "_compiled_call_impl", None) is not None
    return own or hasattr(module, "_orig_mod")
