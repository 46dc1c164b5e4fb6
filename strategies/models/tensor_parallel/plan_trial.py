"""A plan's trial before training: the module whole and cut, on the same microbatch, must agree.

A replayed module is there as a whole, so all of it runs twice, as it was probed. One that declares
units may be on the meta device, and a rank has its own units only: there the comparison waits for
each unit's first microbatch, for which its weights are put together from all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from strategies.errors import DataError, ModelError
from strategies.models.logs import LogCapture
from strategies.models.nested import cloned, tensors
from strategies.models.replay.gate import as_written, call_step, gated
from strategies.models.snapshot import restoring
from strategies.models.state import kept_generators
from strategies.models.tensor_parallel.layer_plan import declared_plan
from strategies.models.tensor_parallel.plan_check import (
    StepNumbers,
    compare_steps,
    refuse_if_different,
    run_step,
    run_with_fallbacks,
    watched,
)
from strategies.models.tensor_parallel.sharded_layers import LocalValues
from strategies.models.tensor_parallel.sharding import Sharding
from strategies.models.tensor_parallel.share_values import WholeShapeValues
from strategies.models.tensor_parallel.tensor_ranks import TensorRanks
from strategies.sharding_plan import ShardingPlan

if TYPE_CHECKING:
    from strategies.models.stage_model import Mode, Search


@dataclass(frozen=True, slots=True)
class Example:
    """The microbatch that a module was probed with, and how its step is run with numbers."""

    batch: Any
    mode: Mode
    dataloader_idx: int | None
    around: Callable[[], AbstractContextManager[Any]]


def found_plan(module: LightningModule, example: Example, tp: int, search: Search) -> ShardingPlan:
    """The module's own plan, or the one that ``search`` finds for it.

    Raises:
        ModelError: It has no weights yet, or its own plan names nothing.
    """
    meta = next((name for name, p in module.named_parameters() if p.is_meta), None)
    if meta is not None:
        raise ModelError(
            f"tp={tp}: {meta} has no values (it is on the meta device), so the cut module cannot "
            "be compared with the whole one. Build the module on a real device, or use tp=1."
        )
    declared = declared_plan(module, tp)
    if declared is not None:
        return replace(declared, written_for_shares=False)
    logs = LogCapture(lambda value: False)
    gates = gated(module, (), logs.log, logs.log_dict)
    with example.around(), restoring(module), gates, as_written():
        return search(module, example.batch)


def cut_layers(
    module: LightningModule, example: Example, plan: ShardingPlan, ranks: TensorRanks
) -> Sharding:
    """Cuts the layers of a whole module, if it computes the same then; collective.

    All ranks begin with the first one's weights.

    Raises:
        ModelError: It computes something else, or cannot run like that; names the layer.
        DataError: Ranks were shown different batches.
    """
    _same_batch(example.batch, ranks)
    for tensor in (*module.parameters(), *module.buffers()):
        ranks.broadcast_(tensor.detach())
    with restoring(module):
        whole = _numbers(module, example, LocalValues())
    sharding = Sharding(module, plan, ranks, whole.foreign)
    values = sharding.values
    assert isinstance(values, WholeShapeValues)
    sharding.apply()
    cut = run_with_fallbacks(
        lambda: _numbers(module, example, values), values, lambda: restoring(module)
    )
    kind = max((p.dtype for p in module.parameters() if p.is_floating_point()), key=_coarseness)
    with example.around():
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            kind = torch.bfloat16
    names = frozenset(name for name, _ in module.named_parameters())
    shards = {name: shard for name, shard in sharding.shards.items() if name in names}
    difference = compare_steps(whole, cut, shards, ranks.rank, kind=kind)
    refuse_if_different(ranks, difference)
    return sharding


def _numbers(
    module: LightningModule, example: Example, values: LocalValues | WholeShapeValues
) -> StepNumbers:
    """One step, forward and backward, of the microbatch that the module was probed with."""
    batch = cloned(example.batch)
    logs = LogCapture(lambda value: False)

    def step() -> Any:
        return call_step(module, example.mode, batch, 0, example.dataloader_idx)

    gates = gated(module, (), logs.log, logs.log_dict)
    train = example.mode == "train"
    with example.around(), gates, as_written(), torch.set_grad_enabled(train):
        return run_step(
            module,
            step,
            around=values.between_layers(),
            whole=values.whole,
            uses=isinstance(values, LocalValues),
        )


def _same_batch(batch: Any, ranks: TensorRanks) -> None:
    total = sum(float(t.double().nan_to_num().sum()) for t in tensors(batch) if not t.is_complex())
    device = next((t.device for t in tensors(batch)), torch.device("cpu"))
    mark = torch.tensor([total, float(sum(t.numel() for t in tensors(batch)))], dtype=torch.float64)
    marks = ranks.gather(mark.to(device))
    if not bool((marks == marks[0]).all()):
        raise DataError(
            "the ranks that share matrices see different first batches. The data order must not "
            "depend on the global random state: give the loader a seeded generator or sampler."
        )


def _coarseness(kind: torch.dtype) -> float:
    return torch.finfo(kind).eps


# -- unit by unit ----------------------------------------------------------------------------------

_SEED = 40_961


class UnitTrial:
    """Compares units, each once."""

    def __init__(self, sharding: Sharding, values: WholeShapeValues) -> None:
        self._sharding = sharding
        self._values = values
        self._checked: set[str] = set()

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
                with torch.no_grad(), restoring(unit):
                    result = unit(*given)
                made = result if isinstance(result, tuple) else (result,)
                given = tuple(self._values.whole(value) for value in made)

    def _check(self, name: str, unit: nn.Module, given: tuple[Tensor, ...]) -> None:
        ranks = self._sharding.ranks
        with restoring(unit):
            cut = run_with_fallbacks(
                lambda: self._numbers(name, unit, given), self._values, lambda: restoring(unit)
            )
            with self._sharding.uncut(name):
                whole = self._numbers(name, unit, given)
        shards = {n: shard for n, shard in self._sharding.shards.items() if n in whole.gradients}
        kinds = [t.dtype for t in whole.outputs.values() if t.is_floating_point()]
        kind = min(kinds, key=lambda kind: -_coarseness(kind), default=torch.float32)
        difference = compare_steps(whole, cut, shards, ranks.rank, kind=kind)
        refuse_if_different(ranks, difference)

    def _numbers(self, name: str, unit: nn.Module, given: tuple[Tensor, ...]) -> StepNumbers:
        numbers = StepNumbers()
        torch.manual_seed(_SEED)
        inputs = tuple(
            value.detach().clone().requires_grad_(value.is_floating_point()) for value in given
        )
        with watched(unit, numbers, self._values.whole, prefix=name):
            found = unit(*inputs)
        outputs = [self._values.whole(value) for value in tensors(found)]
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
            with self._values.taking_shares():
                grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
            pairs = zip(named, grads, strict=True)
            numbers.gradients = {name: g.detach() for name, g in pairs if g is not None}
        return numbers
