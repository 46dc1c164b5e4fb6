"""A plan of shardings by names and sizes alone, for modules whose operators nobody can look at.

Of the layers that one module holds, the last one is cut by inputs and those before it by outputs:
queries, keys and values, then the projection behind them; the wide layers of an MLP, then the
narrow one. In a sequence they alternate. What is cut in a wrong place costs messages, not numbers.
"""

from __future__ import annotations

from torch import nn

from strategies.models.tensor_parallel.share_layers import CONVOLUTIONS
from strategies.sharding_plan import FoundPlan, LayerKind, LayerShare


def simple_plan(module: nn.Module, tp: int) -> FoundPlan:
    """A row for each layer that is cut."""
    rows: list[LayerShare] = []
    seen: set[int] = set()
    shared = _shared(module)
    for path, parent in module.named_modules():
        layers = []
        for own, layer in parent.named_children():
            name = f"{path}.{own}" if path else own
            if id(layer) in seen or not isinstance(layer._parameters.get("weight"), nn.Parameter):
                continue
            seen.add(id(layer))
            if isinstance(layer, nn.Embedding):
                if layer.num_embeddings >= 4 * tp:
                    rows.append(LayerShare(name, "vocabulary", "embedding", 0))
            elif (sizes := _sizes(layer)) is not None:
                if id(layer.weight) in shared:
                    rows.append(LayerShare(name, "vocabulary", "linear", 0, whole_output=False))
                else:
                    layers.append((name, layer, sizes))
        rows += _in_pairs(layers, tp, alternate=isinstance(parent, nn.Sequential | nn.ModuleList))
    return FoundPlan(tp, tuple(rows))


def _in_pairs(
    layers: list[tuple[str, nn.Module, tuple[int, int]]], tp: int, *, alternate: bool
) -> list[LayerShare]:
    rows = []
    for place, (name, layer, (inputs, outputs)) in enumerate(layers):
        kind: LayerKind = "conv" if isinstance(layer, CONVOLUTIONS) else "linear"
        by_inputs = place % 2 == 1 if alternate else place == len(layers) - 1 > 0
        if by_inputs and inputs % tp == 0:
            rows.append(LayerShare(name, "row", kind, 1, whole_input=False))
        elif not by_inputs and outputs % tp == 0 and outputs >= 2 * tp:
            rows.append(LayerShare(name, "column", kind, 0, whole_output=len(layers) == 1))
    return rows


def _sizes(layer: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a layer that can be cut by both."""
    weight = layer._parameters["weight"]
    assert weight is not None
    if type(layer).__name__ == "Conv1D" and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]
    if isinstance(layer, nn.Linear) or (isinstance(layer, CONVOLUTIONS) and layer.groups == 1):
        return weight.shape[1], weight.shape[0]
    return None


def _shared(module: nn.Module) -> set[int]:
    """Weights of embeddings, which a head may have, too."""
    tables = (layer for layer in module.modules() if isinstance(layer, nn.Embedding))
    return {id(table.weight) for table in tables}
