"""Puts a found plan into effect on a module that does not know of it, in place.

Layers become those of ``share_layers.py``; the module's code stays as it is. What cannot be cut as
the plan has it stays whole, which is always right, and is named with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.tensor_parallel.regions import Entrance
from strategies.models.tensor_parallel.sharding import (
    Column,
    Replicated,
    Row,
    Vocabulary,
    read_style,
)
from strategies.models.tensor_parallel.share_layers import (
    BY_INPUTS,
    BY_OUTPUTS,
    BagByWidth,
    CutLayer,
    EmbeddingByIds,
    EmbeddingByWidth,
    LinearByInputs,
    LinearByOutputs,
    TransposedLinearByInputs,
    TransposedLinearByOutputs,
)
from strategies.models.tensor_parallel.share_values import ShareValues
from strategies.models.tensor_parallel.tensor_ranks import Shard, TensorRanks
from strategies.sharding_plan import FoundPlan, LayerShare

# A layer's new class and the dimension of its weight that is cut; or why it stays whole.
_Turned = tuple[type[Any], int] | str


class PlanSharding:
    """What of a plan was done.

    Attributes:
        values: Shares between layers.
        shards: Name of a parameter, any of its names -> how it is cut.
        kept: Name of a layer that the plan cuts and that is whole -> why.
        cut: Names of the layers that are cut, in the module's order.
    """

    def __init__(self, plan: FoundPlan, ranks: TensorRanks) -> None:
        self.plan = plan
        self.values = ShareValues(ranks)
        self.shards: dict[str, Shard] = {}
        self.kept: dict[str, str] = {}
        self.cut: list[str] = []

    def apply(self, module: nn.Module, *, foreign: Mapping[str, str]) -> None:
        """Cuts all layers of the plan.

        Args:
            module: Whole, with its weights.
            foreign: Parameters that other code than their own layer's uses -> where.
        """
        names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        turned = self._turned(module, names, foreign)
        entrances: dict[str, Entrance] = {}
        shares: dict[int, tuple[nn.Parameter, nn.Parameter, Shard]] = {}
        for name, layer in module.named_modules():
            if name in turned:
                entrance = entrances.setdefault(name.rpartition(".")[0], self.values.entrance())
                self._become(layer, *turned[name], entrance, shares)
                self.cut.append(name)
        for whole, _, shard in shares.values():
            self.shards |= dict.fromkeys(names[id(whole)], shard)

    def _turned(
        self, module: nn.Module, names: Mapping[int, list[str]], foreign: Mapping[str, str]
    ) -> dict[str, tuple[type[Any], int, LayerShare]]:
        """What layers become, by name; those of tied weights alike, or not at all."""
        found: dict[str, tuple[type[Any], int, LayerShare]] = {}
        for name, layer in module.named_modules():
            row = self.plan.layer(name) if name else None
            if row is None or row.style == "replicated":
                continue
            used = next((n for n in _parameters_of(name, layer) if n in foreign), None)
            if used is not None:
                self.kept[name] = f"{used} is used by {foreign[used]}, not by its own layer alone"
                continue
            answer = _turn(layer, row, self.values.ranks.size)
            if isinstance(answer, str):
                self.kept[name] = answer
            else:
                found[name] = (*answer, row)
        for own in names.values():
            # A tied weight: all of its layers are cut along the same dimension.
            layers = {name.rpartition(".")[0] for name in own}
            dims = {found[layer][1] if layer in found else None for layer in layers}
            if len(layers) > 1 and len(dims) > 1:
                for layer in layers & found.keys():
                    del found[layer]
                    self.kept[layer] = f"its weight is that of {', '.join(layers - {layer})}, too"
        return found

    def _become(
        self,
        layer: nn.Module,
        kind: type[Any],
        dim: int,
        row: LayerShare,
        entrance: Entrance,
        shares: dict[int, tuple[nn.Parameter, nn.Parameter, Shard]],
    ) -> None:
        ranks = self.values.ranks
        weight = layer._parameters["weight"]
        assert weight is not None
        size = weight.shape[dim]
        cut = Shard(dim, size, ranks.size)
        gathers = row.style == "column" and row.whole_output
        share = CutLayer(layer, self.values, entrance, cut, gathers=gathers)
        parts = {"weight": cut}
        bias = layer._parameters.get("bias")
        if bias is not None and kind in _WITH_BIAS:
            parts["bias"] = Shard(0, size, ranks.size)
        for own, shard in parts.items():
            whole = layer._parameters[own]
            assert whole is not None
            if id(whole) not in shares:
                local = shard.local(whole.detach(), ranks.rank)
                share_of = nn.Parameter(local, requires_grad=whole.requires_grad)
                shares[id(whole)] = whole, share_of, shard
            layer._parameters[own] = shares[id(whole)][1]
        layer.__class__ = kind
        layer.__dict__["share"] = share


_WITH_BIAS = frozenset({LinearByOutputs, TransposedLinearByOutputs, *BY_OUTPUTS.values()})


def _parameters_of(name: str, layer: nn.Module) -> list[str]:
    return [f"{name}.{own}" for own in layer._parameters]


def _turn(layer: nn.Module, row: LayerShare, parts: int) -> _Turned:
    """What a layer becomes by a row of the plan."""
    weight = layer._parameters.get("weight")
    if weight is None or type(weight) is not nn.Parameter or weight.is_sparse:
        return f"{type(layer).__name__} has no plain weight"
    answer = next(
        (how(layer, row, parts) for known, how in _HOW if _is_plain(layer, known)), None
    ) or _by_name(layer, row)
    if isinstance(answer, str):
        return answer
    if weight.shape[answer[1]] < parts:
        return f"its {weight.shape[answer[1]]} cannot be cut over {parts} ranks"
    return answer


def _is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    return isinstance(layer, kind) and type(layer).forward is kind.forward


def _linear(layer: nn.Module, row: LayerShare, parts: int) -> _Turned:
    return (LinearByInputs, 1) if row.style == "row" else (LinearByOutputs, 0)


def _embedding(layer: nn.Module, row: LayerShare, parts: int) -> _Turned:
    assert isinstance(layer, nn.Embedding)
    if layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq:
        return "an Embedding with max_norm, scale_grad_by_freq or sparse=True is not cut"
    if row.style == "row":
        return "an Embedding has no inputs to be cut by"
    return (EmbeddingByIds, 0) if row.style == "vocabulary" else (EmbeddingByWidth, 1)


def _bag(layer: nn.Module, row: LayerShare, parts: int) -> _Turned:
    assert isinstance(layer, nn.EmbeddingBag)
    if layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq:
        return "an EmbeddingBag with max_norm, scale_grad_by_freq or sparse=True is not cut"
    return BagByWidth, 1


def _convolution(layer: nn.Module, row: LayerShare, parts: int) -> _Turned:
    assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    kind = next(kind for kind in BY_INPUTS if isinstance(layer, kind))
    if layer.groups > 1:
        if row.style != "column":
            return "a convolution in groups is cut by outputs alone"
        if layer.groups % parts:
            return f"its {layer.groups} groups cannot be cut over {parts} ranks"
        return BY_OUTPUTS[kind], 0
    return (BY_INPUTS[kind], 1) if row.style == "row" else (BY_OUTPUTS[kind], 0)


def _transposed(layer: nn.Module, row: LayerShare, parts: int) -> _Turned:
    assert isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    if layer.groups > 1:
        return "a transposed convolution in groups is not cut"
    kind = next(kind for kind in BY_OUTPUTS if isinstance(layer, kind))
    return (BY_INPUTS[kind], 0) if row.style == "row" else (BY_OUTPUTS[kind], 1)


_HOW: tuple[tuple[type[nn.Module], Callable[[nn.Module, LayerShare, int], _Turned]], ...] = (
    (nn.Linear, _linear),
    (nn.Embedding, _embedding),
    (nn.EmbeddingBag, _bag),
    *((kind, _convolution) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)),
    *((kind, _transposed) for kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)),
)


def _by_name(layer: nn.Module, row: LayerShare) -> _Turned:
    weight = layer._parameters["weight"]
    assert isinstance(weight, Tensor)
    # transformers is not imported for its one class of such a layer.
    if type(layer).__name__ == "Conv1D" and weight.dim() == 2 and hasattr(layer, "nf"):
        by_inputs = row.style == "row"
        return (TransposedLinearByInputs, 0) if by_inputs else (TransposedLinearByOutputs, 1)
    return f"{type(layer).__name__} is computed whole on every rank"


def plan_by_hand(module: nn.Module, tp: int) -> FoundPlan | None:
    """A module's own ``tensor_parallel_plan()`` in the words of a found one.

    Raises:
        ModelError: It names nothing, or something that cannot be.
    """
    plan = getattr(module, "tensor_parallel_plan", None)
    if not callable(plan):
        return None
    names = [name for name, _ in module.named_modules() if name]
    rows = []
    for pattern, given in plan().items():
        style = read_style(pattern, given)
        row = LayerShare(pattern, "replicated")
        if isinstance(style, Column):
            row = LayerShare(pattern, "column", block=style.block, whole_output=style.gather)
        elif isinstance(style, Row):
            row = LayerShare(pattern, "row", block=style.block, whole_input=False)
        elif isinstance(style, Vocabulary):
            row = LayerShare(pattern, "vocabulary", whole_output=False)
        elif isinstance(style, Replicated):
            row = LayerShare(pattern, "replicated", partial=style.partial)
        if not any(row.matches(name) for name in names):
            raise ModelError(
                f"tensor_parallel_plan() names {pattern!r}, and {type(module).__name__} has no "
                "module of that name. Use names as named_modules() gives them; * is one part."
            )
        rows.append(row)
    return FoundPlan(tp, tuple(rows))
