"""Puts a plan into effect on a module, in place: whole layers become layers with shares.

Where the plan is for code that was written for shares, what cannot be cut as it says is refused.
Elsewhere such a layer stays whole, which is always right, and is named with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from strategies.errors import ModelError
from strategies.models.nested import tensors
from strategies.models.replay.hole import operation_name, user_line
from strategies.models.tensor_parallel.regions import Entrance
from strategies.models.tensor_parallel.sharded_layers import (
    CONV1D,
    KINDS,
    LocalValues,
    SequenceDropout,
    ShardedLayer,
    SplitOutput,
)
from strategies.models.tensor_parallel.share_values import WholeShapeValues
from strategies.models.tensor_parallel.tensor_ranks import Shard, TensorRanks
from strategies.models.tensor_parallel.vocabulary import VocabularyShare
from strategies.sharding_plan import CUT, LayerSharding, ShardingPlan


@dataclass(frozen=True, slots=True)
class _Turned:
    """A layer that has become another one in its place, with the hooks and the mode that it has.

    Whoever refers to the layer (a list, a second name, a forward that closes over it) finds the
    other one. The two differ in their class and in these attributes.
    """

    layer: nn.Module
    before: type[nn.Module]
    kind: type[nn.Module]
    attributes: dict[str, Any]
    parts: dict[str, Shard]  # by the parameter's name in the layer

    def turn(self, *, back: bool) -> None:
        """Into the other layer, or into the one that it was."""
        own = vars(self.layer)
        for key, value in self.attributes.items():
            # What it had before is kept where the other's is in its place.
            held = own.pop(key, _NOTHING)
            self.attributes[key] = held
            if value is not _NOTHING:
                own[key] = value
        self.layer.__class__ = self.before if back else self.kind


_NOTHING = object()


class Sharding:
    """A plan and what has been done of it.

    Attributes:
        ranks: Who shares.
        values: What lies between layers.
        shards: Name of a parameter, any of its names -> how it is cut; others are whole.
        partial: Names of whole parameters whose gradients have to be added up over the ranks.
        kept: Name of a layer that the plan cuts and that is whole -> why.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: ShardingPlan,
        ranks: TensorRanks,
        foreign: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Reads the plan.

        Args:
            module: Whole; without weights yet, maybe.
            plan: What is to be cut.
            ranks: Who shares.
            foreign: Parameters that other code than their own layer's uses -> where.

        Raises:
            ModelError: A layer cannot be cut as code for shares has it; or nothing can be.
        """
        self.ranks = ranks
        self.shards: dict[str, Shard] = {}
        self.partial: set[str] = set()
        self.kept: dict[str, str] = {}
        self._module = module
        self._plan = plan
        names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self._tied = {name: own for own in names.values() for name in own}
        if not plan.written_for_shares and ranks.sequence:
            raise ModelError(
                f"sequence_parallel=true cuts a residual stream, and {type(module).__name__} does "
                "not say where it is. Declare pipeline_units() and a tensor_parallel_plan() with "
                "Stream() and Split(), or use sequence_parallel=false."
            )
        self._rows: dict[str, LayerSharding] = {}
        self._found = self._read(foreign)
        if not plan.written_for_shares and not self._found:
            why = [f"{layer}: {reason}" for layer, reason in list(self.kept.items())[:3]]
            because = f" ({'; '.join(why)})" if why else ""
            raise ModelError(
                f"tp={ranks.size}: no layer of {type(module).__name__} is worth cutting{because}. "
                "tp=1 is as good: use tp=1."
            )
        self.values = LocalValues() if plan.written_for_shares else WholeShapeValues(ranks)
        # Of parameters that are shares by now: how, and the shape of the whole.
        self._shares: dict[int, tuple[nn.Parameter, Shard, torch.Size]] = {}
        self._turned: dict[str, _Turned] = {}
        self._splits: list[SplitOutput] = []
        self._whole = False

    def apply(self, within: str = "") -> None:
        """Cuts the layers of a module of this name, which have their weights; "" is for all."""
        inside = self._module.get_submodule(within) if within else self._module
        entrances: dict[str, Entrance] = {}
        for name, layer in inside.named_modules(prefix=within):
            if name in self._turned or name not in self._rows:
                continue
            row = self._rows[name]
            if name in self._found:
                # In code for shares, layers of one unit may read the same tensor.
                local = isinstance(self.values, LocalValues)
                reader = within if local else name.rpartition(".")[0]
                if reader not in entrances:
                    entrances[reader] = self._entrance(inside)
                self._cut(name, layer, self._found[name], row, entrances[reader])
            elif self._plan.written_for_shares:
                self._on_the_stream(name, layer, row)

    def finish(self, canonical: Mapping[str, str]) -> None:
        """Notes all names of tied weights: ``canonical`` gives the first of any name."""
        for name, shard in list(self.shards.items()):
            self.shards[canonical.get(name, name)] = shard
        self.partial = {canonical[name] for name in self.partial}

    def compute_whole(self, whole: bool) -> None:
        """Lets layers compute as they did before they were cut, or with shares again."""
        if whole == self._whole:
            return
        self._whole = whole
        for layer, before, _ in self.values.looked_after if whole else ():
            layer.__class__ = before
        for turned in self._turned.values():
            turned.turn(back=whole)
        for layer, _, after in () if whole else self.values.looked_after:
            layer.__class__ = after
        for split in self._splits:
            split.whole = whole

    @contextmanager
    def uncut(self, within: str) -> Iterator[None]:
        """Inside, a module's layers are whole, with the present weights; collective."""
        assert isinstance(self.values, WholeShapeValues)
        back = []
        for name, turned in self._turned.items():
            if name != within and not name.startswith(f"{within}."):
                continue
            layer = turned.layer
            back.append((turned, type(layer), dict(layer._parameters)))
            for own, shard in turned.parts.items():
                share = layer._parameters[own]
                assert share is not None
                with self.values.taking_shares():
                    whole = shard.whole(self.ranks.gather(share.detach()).unbind(0))
                layer._parameters[own] = nn.Parameter(whole, requires_grad=share.requires_grad)
            turned.turn(back=True)
        try:
            yield
        finally:
            for turned, kind, parameters in back:
                turned.turn(back=False)
                turned.layer.__class__ = kind
                turned.layer._parameters.update(parameters)

    def _read(self, foreign: Mapping[str, str]) -> dict[str, type[Any]]:
        """What layers become, by name; those of tied weights alike, or not at all."""
        found: dict[str, type[Any]] = {}
        users: dict[int, list[str]] = {}  # of a parameter, each layer once
        for name, layer in self._module.named_modules():
            for parameter in layer._parameters.values():
                users.setdefault(id(parameter), []).append(name)
            row = self._plan.layer(name) if name else None
            if row is None:
                continue
            self._rows[name] = row
            if row.style not in CUT:
                continue
            even = self._plan.written_for_shares
            why = self._watched(name, layer, foreign)
            kind = why or _kind(layer, row, self.ranks.size, even=even)
            if isinstance(kind, str):
                self._keep(name, layer, kind)
            else:
                found[name] = kind
        users.pop(id(None), None)
        for layers in users.values():
            # A tied weight: all of its layers are cut along the same dimension.
            dims = {found[name].dim if name in found else None for name in layers}
            for name in [name for name in layers if name in found] if len(dims) > 1 else ():
                others = ", ".join(other for other in layers if other != name)
                layer = self._module.get_submodule(name)
                self._keep(name, layer, f"its weight is that of {others}, too")
                del found[name]
        return found

    def _watched(self, name: str, layer: nn.Module, foreign: Mapping[str, str]) -> str | None:
        """Who else than the layer looks at its weights, where that would see shares."""
        if self._plan.written_for_shares:
            return None
        for own, parameter in layer._parameters.items():
            if f"{name}.{own}" in foreign:
                where = foreign[f"{name}.{own}"]
                return f"{name}.{own} is used by {where}, not by its own layer alone"
            if parameter is not None and parameter._backward_hooks:
                return f"a hook (register_hook) looks at the gradient of its {own}"
        return None

    def _keep(self, name: str, layer: nn.Module, why: str) -> None:
        self.kept[name] = why
        if self._plan.written_for_shares:
            tp, row = self.ranks.size, self._rows[name]
            kinds = ((n, _kind(layer, row, n, even=True)) for n in range(tp, 0, -1))
            fit = next((n for n, kind in kinds if not isinstance(kind, str)), tp)
            raise ModelError(
                f"tp={tp}: tensor_parallel_plan() has {row.style.capitalize()}() for {name}, but "
                f"{why}.",
                fix=f"Try tp={fit}." if fit < tp else "Leave it out of the plan, or use tp=1.",
            )

    def _entrance(self, unit: nn.Module) -> Entrance:
        if isinstance(self.values, WholeShapeValues):
            return self.values.entrance()
        entrance = Entrance(self.ranks)
        entrance.forget_after(unit)
        return entrance

    def _cut(
        self,
        name: str,
        layer: nn.Module,
        kind: type[Any],
        row: LayerSharding,
        entrance: Entrance,
    ) -> None:
        ranks, values = self.ranks, self.values
        present = {own: p for own, p in layer._parameters.items() if p is not None}
        # A tied weight may be a share by now.
        known = {own: self._shares[id(p)] for own, p in present.items() if id(p) in self._shares}
        sizes = {own: known[own][2] if own in known else p.shape for own, p in present.items()}
        size = sizes["weight"][kind.dim]
        segments = row.segments if row.style == "column" else 1
        cut = Shard(kind.dim, size, ranks.size, segments)
        if "weight" in known:
            cut = known["weight"][1]
        gathers = row.style == "column" and row.whole_output
        share = ShardedLayer(layer, sizes, values, entrance, cut, ranks, gathers=gathers)
        parts = {"weight": cut}
        if "bias" in present and kind.cuts_bias:
            parts["bias"] = Shard(0, size, ranks.size, segments)
        for own, shard in parts.items():
            parameter = present[own]
            if own not in known:
                # The same object: its hooks stay, and lists that have it.
                parameter.data = shard.local(parameter.detach(), ranks.rank)
                self._shares[id(parameter)] = parameter, shard, sizes[own]
                if isinstance(values, WholeShapeValues):
                    values.hold(parameter, f"{name}.{own}", shard, sizes[own])
            self.shards |= dict.fromkeys(self._tied[f"{name}.{own}"], shard)
        attributes: dict[str, Any] = {"share": share}
        if isinstance(values, LocalValues) and isinstance(layer, nn.Linear):
            attributes |= zip(("out_features", "in_features"), layer.weight.shape, strict=True)
            if row.style == "vocabulary":
                attributes["vocabulary"] = VocabularyShare(cut, ranks)
            if row.style == "row" and ranks.sequence and "bias" in present:
                self.partial.add(f"{name}.bias")
        self._turn(name, layer, kind, attributes, parts)

    def _turn(
        self,
        name: str,
        layer: nn.Module,
        kind: type[nn.Module],
        attributes: dict[str, Any],
        parts: dict[str, Shard],
    ) -> None:
        self._turned[name] = _Turned(layer, type(layer), kind, attributes, parts)
        self._turned[name].turn(back=False)

    def _on_the_stream(self, name: str, layer: nn.Module, row: LayerSharding) -> None:
        if row.partial or (row.style == "stream" and self.ranks.sequence):
            self.partial |= {f"{name}.{own}" for own, _ in layer.named_parameters()}
        if row.style == "split" and self.ranks.sequence:
            self._splits.append(SplitOutput(self.ranks))
            layer.register_forward_hook(self._splits[-1])
        if row.style == "stream" and self.ranks.sequence and _is_plain(layer, nn.Dropout):
            self._turn(name, layer, SequenceDropout, {"ranks": self.ranks}, {})


def _kind(layer: nn.Module, row: LayerSharding, parts: int, *, even: bool) -> type[Any] | str:
    """What a layer becomes by a row of a plan; or why it cannot.

    Args:
        layer: Whole.
        row: With a style that cuts it.
        parts: Ranks that share.
        even: Whether all shares of inputs and outputs must be of one size.
    """
    name = type(layer).__name__
    weight = layer._parameters.get("weight")
    if type(weight) is not nn.Parameter or weight.is_sparse:
        return f"{name} has no plain weight"
    kinds = next((kinds for known, kinds in KINDS.items() if _is_plain(layer, known)), {})
    if name == "Conv1D" and weight.dim() == 2 and hasattr(layer, "nf"):
        kinds = CONV1D
    if not kinds:
        return f"{name} is computed whole on every rank"
    kind = kinds.get(row.style, None if row.style == "row" else kinds["column"])
    if kind is None:
        return f"{name} has no inputs to be cut by"
    table: Any = layer
    if issubclass(kind, nn.Embedding | nn.EmbeddingBag) and (
        table.max_norm is not None or table.sparse or table.scale_grad_by_freq
    ):
        return f"{name} with max_norm, scale_grad_by_freq or sparse=True is not cut"
    groups = getattr(layer, "groups", 1)
    if groups > 1 and (kind.dim == 1 or getattr(layer, "transposed", False)):
        return f"{name} in groups is cut by outputs alone, and not where it is transposed"
    if groups % parts and groups > 1:
        return f"its {groups} groups cannot be cut over {parts} ranks"
    size = weight.shape[kind.dim]
    together = row.block * (row.segments if row.style == "column" else 1)
    if size < parts:
        return f"its {size} cannot be cut over {parts} ranks"
    if size % (together * parts) and (together > 1 or (even and row.style != "vocabulary")):
        blocks = f" in blocks of {together}" if together > 1 else ""
        return f"its {size} do not come out even over {parts} ranks{blocks}"
    return kind


def _is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a layer computes what torch's does, under whatever name."""
    return isinstance(layer, kind) and type(layer).forward is kind.forward


class ShareReads(TorchFunctionMode):
    """Refuses operations on shares, in code that is written for whole weights."""

    def __init__(self, shares: Mapping[int, tuple[str, str]]) -> None:
        """``shares``: by identity of a parameter its name, and the degree that cuts it."""
        super().__init__()
        self._shares = shares

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tensors((args, kwargs)):
            if id(leaf) in self._shares and operation_name(func) not in (
                "requires_grad",
                "is_leaf",
            ):
                name, degree = self._shares[id(leaf)]
                raise ModelError(
                    f"{user_line()}: {operation_name(func)} takes {name} outside of its unit, and "
                    f"this rank has a share of it. Take it in the forward of its unit, or in a "
                    f"hook (on_train_batch_end), which has all of it, or use {degree}=1."
                )
        return func(*args, **kwargs)
