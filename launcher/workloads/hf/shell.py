"""A model's own forward, with stand-ins for whatever lives on other stages."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from launcher.workloads.hf.standins import LayerStandIn, WeightStandIn


class Shell:
    """Runs ``model`` (a ``PreTrainedModel``) without its layers.

    Args:
        model: On the meta device; it is copied.
        layers: The layers that were taken out of it.
        path: Where they were.
        live: Modules around the layers that a unit owns; they are shared, not copied.
        returns_tuple: Whether a layer's output is a tuple.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[nn.Module],
        path: str,
        live: Mapping[str, nn.Module],
        *,
        returns_tuple: bool,
    ) -> None:
        copied = copy.deepcopy(model)
        self.width = int(model.get_input_embeddings().weight.shape[-1])
        self.sides = sides(copied, path)
        for name, module in self.sides.items():
            if name in live:
                self.sides[name] = live[name]
            elif any(True for _ in module.parameters()):
                self.sides[name] = WeightStandIn(self.width)
            else:
                fill_constants(copied, module)
            put(copied, name, self.sides[name])
        self.layers = tuple(LayerStandIn(layer, returns_tuple=returns_tuple) for layer in layers)
        put(copied, path, nn.ModuleList(self.layers))
        steps = path.split(".")
        self._around = [copied.get_submodule(".".join(steps[:end])) for end in range(len(steps))]
        self._model = copied
        self._live = live

    def run(self, inputs: Mapping[str, Tensor | None], *, training: bool = False) -> Any:
        """The forward's output; afterwards each layer's ``call`` is known.

        Args:
            inputs: As the model takes them, ``input_ids`` or ``inputs_embeds`` first.
            training: Whether dropout outside of modules of its own acts.
        """
        for module in self._around:
            module.training = training
        first = next(value for value in inputs.values() if value is not None)
        device = first.device
        for name, module in self.sides.items():
            if isinstance(module, WeightStandIn):
                module.dtype = first.dtype if first.is_floating_point() else torch.float32
            elif name not in self._live:
                for part in module.modules():
                    for key, buffer in part._buffers.items():
                        if buffer is not None and buffer.device != device:
                            part._buffers[key] = buffer.to(device)
        return self._model(**inputs, use_cache=False)

    def forget(self) -> None:
        """Lets go of the tensors of the last run."""
        for layer in self.layers:
            layer.call = layer.answer = None


def sides(model: nn.Module, path: str) -> dict[str, nn.Module]:
    """All modules around the list of layers at ``path``, each as large as possible, by name."""
    found: dict[str, nn.Module] = {}
    node, prefix = model, ""
    for step in path.split("."):
        for name, child in node.named_children():
            if name != step:
                found[prefix + name] = child
        node, prefix = node.get_submodule(step), f"{prefix}{step}."
    return found


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces the module called ``name``."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def fill_constants(model: Any, module: nn.Module) -> None:
    """Computes buffers (rotary frequencies) that building on the meta device has left empty."""
    for part in module.modules():
        empty = {k: b for k, b in part._buffers.items() if b is not None and b.is_meta}
        if not empty:
            continue
        for name, buffer in empty.items():
            kind = torch.float32 if buffer.is_floating_point() else buffer.dtype
            part._buffers[name] = torch.empty_like(buffer, dtype=kind, device="cpu")
        with torch.no_grad():
            # The library's own contract: this is how it restores them after from_pretrained().
            model._init_weights(part)
        for name, buffer in empty.items():
            filled = part._buffers[name]
            assert filled is not None
            part._buffers[name] = filled.to(buffer.dtype)
