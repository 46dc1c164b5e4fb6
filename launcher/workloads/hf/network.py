"""All units of a Hugging Face model in one module, as ``transformer.Transformer`` is for ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from launcher.workloads.hf.parts import EmbeddingPart, HeadPart, LayerArguments, LayerPart, Part
from launcher.workloads.hf.skeleton import Skeleton


class HfNetwork(nn.Module):
    """Embedding, layers and head of a skeleton, on the meta device."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__()
        arguments = LayerArguments(skeleton)
        self.embedding = EmbeddingPart(skeleton)
        self.layers = nn.ModuleList(
            LayerPart(skeleton, index, arguments) for index in range(len(skeleton.layers))
        )
        self.head = HeadPart(skeleton)
        self._tied: Mapping[str, str] = dict(skeleton.tied)
        self.tie()
        self.train()  # as any new module; the skeleton's parts are not

    def named_units(self) -> Iterator[tuple[str, nn.Module]]:
        """The units in execution order with their names inside this module."""
        yield "embedding", self.embedding
        for index, layer in enumerate(self.layers):
            yield f"layers.{index}", layer
        yield "head", self.head

    def tie(self) -> None:
        """Makes parameters that the library ties one, where both ends are here and alike.

        A cut puts other modules in the places of units that live elsewhere; and while only one end
        has its weights, they stay two.
        """
        if not self._tied:
            return
        owners: dict[str, nn.Module] = {}
        for unit in (self.embedding, self.head):
            if isinstance(unit, Part):
                for name, _ in unit.named_parameters(remove_duplicate=False):
                    owners[name] = unit
        for target, source in self._tied.items():
            if target in owners and source in owners:
                first = owners[source].get_parameter(source)
                last = owners[target].get_parameter(target)
                if first is not last and first.is_meta == last.is_meta:
                    path, _, leaf = target.rpartition(".")
                    setattr(owners[target].get_submodule(path), leaf, first)

    def forward(self, tokens: Tensor, *mask: Tensor) -> Tensor:
        """Token ids ``[batch, sequence]`` to logits ``[batch, sequence, vocab]``."""
        tensors: tuple[Any, ...] = (tokens, *mask)
        for _, unit in self.named_units():
            result = unit(*tensors)
            tensors = result if isinstance(result, tuple) else (result,)
        logits: Tensor = tensors[0]
        return logits
