"""Puts a found plan into effect on a module that does not know of it, in place.

Layers become those of ``share_layers.py``; the module's code stays as it is. What cannot be cut as
the plan has it stays whole, which is always right, and is named with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.replay.hole import WHOLE_SHAPE
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

    def __init__(
        self,
        plan: FoundPlan,
        ranks: TensorRanks,
        module: nn.Module,
        foreign: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Reads the plan.

        Args:
            plan: What is to be cut.
            ranks: Who shares.
            module: Whole; without weights yet, maybe.
            foreign: Parameters that other code than their own layer's uses -> where.
        """
        self.plan = plan
        self.values = ShareValues(ranks)
        self.shards: dict[str, Shard] = {}
        self.kept: dict[str, str] = {}
        self.cut: list[str] = []
        self._module = module
        self._names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self._tied = {name: own for own in self._names.values() for name in own}
        self._turned = self._read(module, foreign)
        # Of parameters that are shares by now: how, and the shape of the whole.
        self._shares: dict[int, tuple[Shard, torch.Size]] = {}
        self._layers: dict[str, tuple[nn.Module, type[nn.Module], dict[str, Shard]]] = {}
        self._before: list[tuple[nn.Module, type[nn.Module], dict[str, Any]]] = []

    def apply(self, within: str = "") -> None:
        """Cuts the layers of a module of this name, which have their weights; "" is for all."""
        entrances: dict[str, Entrance] = {}
        inside = self._module.get_submodule(within) if within else self._module
        for name, layer in inside.named_modules(prefix=within):
            if name in self._turned and name not in self._layers:
                parent = name.rpartition(".")[0]
                if parent not in entrances:
                    entrances[parent] = self.values.entrance()
                self._become(name, layer, *self._turned[name], entrances[parent])
                self.cut.append(name)

    def compute_whole(self, whole: bool) -> None:
        """Lets layers compute as they did before they were cut, or with shares again."""
        for layer, kind, share in reversed(self._before):
            layer.__class__ = kind
            layer.__dict__.update(share)
        self._before.clear()
        if whole:
            kinds = [*self.values.looked_after, *(cut[:2] for cut in self._layers.values())]
            for layer, kind in kinds:
                # Without its share it can be copied.
                own = vars(layer)
                share = {"share": own.pop("share")} if "share" in own else {}
                self._before.append((layer, type(layer), share))
                layer.__class__ = kind

    @contextmanager
    def uncut(self, within: str) -> Iterator[dict[str, nn.Parameter]]:
        """Inside, a module's layers are whole, with the present weights; collective.

        Gives the whole parameters by name.
        """
        ranks, found = self.values.ranks, {}
        back: list[tuple[nn.Module, type[nn.Module], dict[str, nn.Parameter | None]]] = []
        for name, (layer, kind, parts) in self._layers.items():
            if not (name == within or name.startswith(f"{within}.")):
                continue
            back.append((layer, type(layer), dict(layer._parameters)))
            for own, shard in parts.items():
                share = layer._parameters[own]
                assert share is not None
                with self.values.taking_shares():
                    whole = shard.whole(ranks.gather(share.detach()).unbind(0))
                found[f"{name}.{own}"] = nn.Parameter(whole, requires_grad=share.requires_grad)
                layer._parameters[own] = found[f"{name}.{own}"]
            layer.__class__ = kind
        try:
            yield found
        finally:
            for layer, kind, parameters in back:
                layer.__class__ = kind
                layer._parameters.update(parameters)

    def _read(
        self, module: nn.Module, foreign: Mapping[str, str]
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
            hooked = next(
                (n for n, p in layer._parameters.items() if p is not None and p._backward_hooks),
                None,
            )
            if hooked is not None:
                self.kept[name] = f"a hook (register_hook) looks at the gradient of its {hooked}"
                continue
            answer = _turn(layer, row, self.values.ranks.size)
            if isinstance(answer, str):
                self.kept[name] = answer
            else:
                found[name] = (*answer, row)
        for own in self._names.values():
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
        name: str,
        layer: nn.Module,
        kind: type[Any],
        dim: int,
        row: LayerShare,
        entrance: Entrance,
    ) -> None:
        ranks = self.values.ranks
        weight = layer._parameters["weight"]
        assert weight is not None
        # A tied weight may be a share by now.
        sizes = {
            own: self._shares[id(p)][1] if id(p) in self._shares else p.shape
            for own, p in layer._parameters.items()
            if p is not None
        }
        size = sizes["weight"][dim]
        segments = row.segments if row.style == "column" else 1
        cut = Shard(dim, size, ranks.size, segments)
        if id(weight) in self._shares:
            cut = self._shares[id(weight)][0]
        gathers = row.style == "column" and row.whole_output
        share = CutLayer(layer, sizes, self.values, entrance, cut, gathers=gathers)
        parts = {"weight": cut}
        bias = layer._parameters.get("bias")
        if bias is not None and kind in _WITH_BIAS:
            parts["bias"] = Shard(0, size, ranks.size, segments)
        for own, shard in parts.items():
            parameter = layer._parameters[own]
            assert parameter is not None
            if id(parameter) not in self._shares:
                # The same object: its hooks stay, and lists that have it.
                parameter.data = shard.local(parameter.detach(), ranks.rank)
                self._shares[id(parameter)] = shard, sizes[own]
                self.values.weights[id(parameter)] = f"{name}.{own}", parameter, shard
                vars(parameter)[WHOLE_SHAPE] = tuple(sizes[own])
            self.shards |= dict.fromkeys(self._tied[f"{name}.{own}"], shard)
        self._layers[name] = (layer, type(layer), parts)
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
    if (
        row.style == "column"
        and weight.shape[answer[1]] % (row.segments * parts)
        and (row.segments > 1)
    ):
        return f"its {row.segments} parts cannot be cut over {parts} ranks"
    size = weight.shape[answer[1]]
    if size < parts:
        return f"its {size} cannot be cut over {parts} ranks"
    if row.block > 1 and size % (row.block * parts):
        return f"its {size} are no blocks of {row.block} for each of {parts} ranks"
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
    given_plan = plan() if callable(plan) else None
    if given_plan is None:
        return None
    names = [name for name, _ in module.named_modules() if name]
    rows = []
    for pattern, given in given_plan.items():
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
