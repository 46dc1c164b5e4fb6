"""A replayed module's layers, cut over tensor-parallel ranks: the plan, its trial, its effect."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from strategies.errors import DataError, ModelError
from strategies.models.logs import LogCapture
from strategies.models.nested import cloned, tensors
from strategies.models.replay.gate import as_written, call_step, gated, unchanged
from strategies.models.tensor_parallel.plan_check import (
    StepNumbers,
    compare_steps,
    refuse_differences,
    run_step,
    tried,
)
from strategies.models.tensor_parallel.plan_sharding import PlanSharding, plan_by_hand
from strategies.models.tensor_parallel.tensor_ranks import TensorRanks
from strategies.sharding_plan import FoundPlan

if TYPE_CHECKING:
    from strategies.models.stage_model import Mode, Search


@dataclass(frozen=True, slots=True)
class Example:
    """The microbatch that a module was probed with, and how its step is run with numbers."""

    batch: Any
    mode: Mode
    dataloader_idx: int | None
    around: Callable[[], AbstractContextManager[Any]]


def found_plan(module: LightningModule, example: Example, tp: int, search: Search) -> FoundPlan:
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
    by_hand = plan_by_hand(module, tp)
    if by_hand is not None:
        return by_hand
    logs = LogCapture(lambda value: False)
    gates = gated(module, (), logs.log, logs.log_dict)
    with example.around(), unchanged(module), gates, as_written():
        return search(module, example.batch)


def cut_layers(
    module: LightningModule, example: Example, plan: FoundPlan, ranks: TensorRanks
) -> PlanSharding:
    """Cuts the layers of a whole module, if it computes the same then; collective.

    All ranks begin with the first one's weights.

    Raises:
        ModelError: It computes something else, or cannot run like that; names the layer.
        DataError: Ranks were shown different batches.
    """
    if ranks.sequence:
        raise ModelError(
            f"sequence_parallel=true cuts a residual stream that {type(module).__name__} does not "
            "name: its plan is found. Declare pipeline_units() and a tensor_parallel_plan() with "
            "Stream() and Split(), or use sequence_parallel=false."
        )
    _same_batch(example.batch, ranks)
    for tensor in (*module.parameters(), *module.buffers()):
        ranks.broadcast_(tensor.detach())
    with unchanged(module):
        whole = _numbers(module, example, None)
    sharding = PlanSharding(plan, ranks, module, whole.foreign)
    sharding.apply()
    if not sharding.cut:
        why = [f"{layer}: {reason}" for layer, reason in list(sharding.kept.items())[:3]]
        because = f" ({'; '.join(why)})" if why else ""
        raise ModelError(
            f"tp={ranks.size}: no layer of {type(module).__name__} is worth cutting{because}. "
            "tp=1 is as good: use tp=1."
        )
    cut = tried(
        lambda: _numbers(module, example, sharding), sharding.values, lambda: unchanged(module)
    )
    kind = max((p.dtype for p in module.parameters() if p.is_floating_point()), key=_coarseness)
    with example.around():
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            kind = torch.bfloat16
    names = _first_names(module)
    shards = {name: shard for name, shard in sharding.shards.items() if name in names}
    difference = compare_steps(whole, cut, shards, ranks.rank, kind=kind)
    refuse_differences(ranks, difference)
    return sharding


def _numbers(
    module: LightningModule,
    example: Example,
    sharding: PlanSharding | None,
) -> StepNumbers:
    """One step, forward and backward, of the microbatch that the module was probed with."""
    batch = cloned(example.batch)
    logs = LogCapture(lambda value: False)
    values = None if sharding is None else sharding.values

    def step() -> Any:
        return call_step(module, example.mode, batch, 0, example.dataloader_idx)

    gates = gated(module, (), logs.log, logs.log_dict)
    train = example.mode == "train"
    with example.around(), gates, as_written(), torch.set_grad_enabled(train):
        return run_step(
            module,
            step,
            around=nullcontext() if values is None else values.between_layers(),
            whole=(lambda value: value) if values is None else values.whole_of,
            uses=values is None,
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


def _first_names(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in module.named_parameters())


def _coarseness(kind: torch.dtype) -> float:
    return torch.finfo(kind).eps
