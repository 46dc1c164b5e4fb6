"""A plan of shardings by names and sizes alone: a layer that widens, then one that narrows."""

from __future__ import annotations

from torch import nn

from strategies.models.tensor_parallel.share_layers import CONVOLUTIONS
from strategies.sharding_plan import FoundPlan, LayerKind, LayerShare


def simple_plan(module: nn.Module, tp: int) -> FoundPlan:
    """Layers in pairs, in the order of registration: by outputs, then by inputs."""
    rows: list[LayerShare] = []
    open_width = 0  # outputs of column layers that nobody has taken yet
    seen: set[int] = set()
    for name, layer in module.named_modules():
        weight = layer._parameters.get("weight")
        if not name or weight is None or id(layer) in seen:
            continue
        seen.add(id(layer))
        if isinstance(layer, nn.Embedding):
            if layer.num_embeddings >= 4 * tp:
                rows.append(LayerShare(name, "vocabulary", "embedding", 0))
            continue
        linear = isinstance(layer, nn.Linear) or (
            type(layer).__name__ == "Conv1D" and weight.dim() == 2
        )
        if not linear and not (isinstance(layer, CONVOLUTIONS) and layer.groups == 1):
            continue
        inputs, outputs = weight.shape[1], weight.shape[0]
        if type(layer).__name__ == "Conv1D":
            inputs, outputs = outputs, inputs
        kind: LayerKind = "linear" if linear else "conv"
        if open_width == inputs and inputs % tp == 0:
            rows.append(LayerShare(name, "row", kind, 1, whole_input=False))
            open_width = 0
        elif outputs % tp == 0 and outputs > 1:
            rows.append(LayerShare(name, "column", kind, 0, whole_output=False))
            open_width = outputs
    return FoundPlan(tp, tuple(rows))
