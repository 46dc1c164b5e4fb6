"""A found plan on a module that declares units: cut unit by unit, and compared unit by unit.

Such a module may be on the meta device, and a rank has its own units only. So the comparison with
what is not cut waits for each unit's first microbatch: its weights are put together from all ranks,
the whole unit and the cut one run on the same inputs, and their outputs and gradients are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.nested import rebuild, tensors
from strategies.models.replay.gate import unchanged
from strategies.models.state import kept_generators
from strategies.models.tensor_parallel.plan_check import (
    StepNumbers,
    compare_steps,
    refuse_differences,
    tried,
    watched,
)
from strategies.models.tensor_parallel.plan_sharding import PlanSharding
from strategies.models.tensor_parallel.share_layers import CONVOLUTIONS
from strategies.models.tensor_parallel.tensor_ranks import Shard, TensorRanks
from strategies.sharding_plan import FoundPlan, LayerKind, LayerShare

# --------------------------------------------------------------------------------------------------
# A plan of shardings by names and sizes alone, for modules whose operators nobody can look at.
#
# Of the layers that one module holds, the last one is cut by inputs and those before it by outputs:
# queries, keys and values, then the projection behind them; the wide layers of an MLP, then the
# narrow one. In a sequence they alternate. What is cut in a wrong place costs messages, not
# numbers.


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


# --------------------------------------------------------------------------------------------------
_SEED = 40_961


class UnitSharding:
    """What ``Sharding`` is for a plan by hand.

    Attributes:
        partial: Names of whole parameters whose gradients have to be added up: none, as values
            between layers know what they are.
    """

    def __init__(self, module: nn.Module, ranks: TensorRanks, plan: FoundPlan) -> None:
        """Reads the plan.

        Raises:
            ModelError: It cuts nothing, or the stream is to be cut, too.
        """
        name = type(module).__name__
        if ranks.sequence:
            raise ModelError(
                f"sequence_parallel=true cuts a residual stream, and {name} does not say where it "
                "is. Declare a tensor_parallel_plan() with Stream() and Split(), or use "
                "sequence_parallel=false."
            )
        self.partial: set[str] = set()
        self.ranks = ranks
        self._cut = PlanSharding(plan, ranks, module)
        self._checked: set[str] = set()
        if not plan.worth:
            raise ModelError(
                f"tp={ranks.size}: no layer of {name} can be cut; tp=1 is as good. Use tp=1."
            )

    @staticmethod
    def plan(module: nn.Module, tp: int) -> FoundPlan:
        """By names and sizes: units may have no weights yet, and no batch is at hand."""
        return simple_plan(module, tp)

    @property
    def shards(self) -> Mapping[str, Shard]:
        return self._cut.shards

    def apply(self, module: nn.Module, unit_name: str) -> None:
        self._cut.apply(unit_name)
        self._cut.values.look_after(module.get_submodule(unit_name))

    def finish(self, canonical: Mapping[str, str]) -> None:
        for name, shard in list(self._cut.shards.items()):
            self._cut.shards[canonical.get(name, name)] = shard

    def compute_whole(self, whole: bool) -> None:
        self._cut.compute_whole(whole)

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Units, and what is between and behind them, run inside."""
        with self._cut.values.between_layers():
            yield

    def whole(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(self._cut.values.whole(value) for value in values)

    def whole_of(self, value: Any) -> Any:
        return rebuild(value, self._cut.values.whole_of)

    def check(self, units: Sequence[tuple[str, nn.Module]], given: tuple[Tensor, ...]) -> None:
        """Compares units that follow each other, on their first training microbatch; collective.

        Raises:
            ModelError: One gives something else than whole.
        """
        if all(name in self._checked for name, _ in units):
            return
        with kept_generators():
            for name, unit in units:
                self._checked.add(name)
                self._check(name, unit, given)
                with torch.no_grad(), unchanged(unit):
                    result = unit(*given)
                given = self.whole(result if isinstance(result, tuple) else (result,))

    def _check(self, name: str, unit: nn.Module, given: tuple[Tensor, ...]) -> None:
        with unchanged(unit):
            cut = tried(
                lambda: self._numbers(name, unit, given), self._cut.values, lambda: unchanged(unit)
            )
            with self._cut.uncut(name) as wholes:
                whole = self._numbers(name, unit, given, wholes)
        shards = {n: shard for n, shard in self.shards.items() if n in whole.gradients}
        kinds = [t.dtype for t in whole.outputs.values() if t.is_floating_point()]
        kind = min(kinds, key=lambda kind: -torch.finfo(kind).eps, default=torch.float32)
        difference = compare_steps(whole, cut, shards, self.ranks.rank, kind=kind)
        refuse_differences(self.ranks, difference)

    def _numbers(
        self,
        name: str,
        unit: nn.Module,
        given: tuple[Tensor, ...],
        wholes: Mapping[str, nn.Parameter] | None = None,
    ) -> StepNumbers:
        numbers = StepNumbers()
        torch.manual_seed(_SEED)
        inputs = tuple(
            value.detach().clone().requires_grad_(value.is_floating_point()) for value in given
        )
        with watched(unit, numbers, self._cut.values.whole_of, prefix=name):
            found = unit(*inputs)
        outputs = [self._cut.values.whole(value) for value in tensors(found)]
        drawn = torch.Generator().manual_seed(_SEED)
        total: Any = 0.0
        for value in outputs:
            if value.requires_grad:
                wanted = torch.randn(value.shape, generator=drawn, dtype=torch.float32)
                total = total + (value * wanted.to(value)).sum()
        for place, value in enumerate(outputs):
            numbers.outputs[f"{name} (output {place})"] = value.detach()
        named: dict[str, Tensor] = {
            f"{name}.{own}": p for own, p in unit.named_parameters() if p.requires_grad
        }
        named |= {f"the input {i} of {name}": v for i, v in enumerate(inputs) if v.requires_grad}
        if isinstance(total, Tensor) and named:
            with self._cut.values.taking_shares():
                grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
            pairs = zip(named, grads, strict=True)
            numbers.gradients = {name: g.detach() for name, g in pairs if g is not None}
        return numbers
