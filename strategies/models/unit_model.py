"""Stages of a module that declares its units: no probe, no holes, half-block cuts by construction.

A LightningModule takes part by three methods, which its own ``training_step`` should use too:

    def pipeline_units(self) -> list[tuple[str, nn.Module]]      # global names, execution order
    def pipeline_inputs(self, batch) -> tuple[Tensor, ...]       # inputs of the first unit
    def pipeline_result(self, tensors, batch, batch_idx, mode)   # loss, or prediction

and, where units differ in cost, ``unit_costs() -> list[float]``. With tp > 1 one more says how
layers are cut over ranks:

    def tensor_parallel_plan(self) -> dict[str, Style]           # module names, * for any one part

Styles are those of ``strategies.models.tensor_parallel``, the words that transformers uses in its
plans (``"colwise"``, ``"rowwise"``), or torch's ``ColwiseParallel()`` and ``RowwiseParallel()``. A
layer without an entry is whole on every rank and computes the same there. With ep > 1 layers say
which of their parameters are experts (``strategies.models.expert_parallel.HasExperts``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.expert_parallel import ExpertRanks, ExpertShares
from strategies.models.expert_parallel.expert_shares import named_expert_layers
from strategies.models.held_units import HeldUnits
from strategies.models.logs import captured_logs
from strategies.models.nested import join_parts, rebuild
from strategies.models.selective.policy import Selection
from strategies.models.selective.region import SelectiveLayer
from strategies.models.stage_model import Mode, Search, StageModel, StageOutput, Unit
from strategies.models.state import reseed
from strategies.models.tensor_parallel.layer_plan import declared_plan, plan_by_sizes
from strategies.models.tensor_parallel.plan_trial import UnitTrial
from strategies.models.tensor_parallel.sharded_layers import LocalValues
from strategies.models.tensor_parallel.sharding import Sharding, ShareReads
from strategies.models.tensor_parallel.share_values import WholeShapeValues
from strategies.models.tensor_parallel.tensor_ranks import Grid, Shard, TensorRanks, is_cut
from strategies.plan import FAMILIES
from strategies.sharding_plan import ShardingPlan

_NAMED = 3  # units, in a message


@runtime_checkable
class HasUnits(Protocol):
    """The explicit protocol; see the module docstring."""

    def pipeline_units(self) -> list[tuple[str, nn.Module]]:
        """Units in execution order, with their names inside the module."""

    def pipeline_inputs(self, batch: Any) -> tuple[Tensor, ...]:
        """Inputs of the first unit."""

    def pipeline_result(
        self, tensors: tuple[Tensor, ...], batch: Any, batch_idx: int, mode: Mode
    ) -> Any:
        """The step's loss, or its prediction, from the last unit's outputs."""


class UnitModel(StageModel):
    """Runs ranges of the declared units; nothing is freed before ``cut``."""

    def __init__(self, module: nn.Module) -> None:
        assert isinstance(module, HasUnits)
        self._module = module
        self._declared: HasUnits = module  # To ask whether it is one takes 50 microseconds.
        self._held = HeldUnits(module, module.pipeline_units())
        self._units, self._runs = self._held.units, self._held.here
        self._stages: tuple[range, ...] = (range(len(self._units)),)
        self._sharding: Sharding | None = None
        self._values: LocalValues | WholeShapeValues = LocalValues()
        self._trial: UnitTrial | None = None  # of a plan that the module's code does not know of
        self._example: Any = None
        self._expert_shares: ExpertShares | None = None
        self._mixtures: tuple[int, ...] = ()  # of each unit, where ranks share them
        self._unseen: set[int] = set()  # units with such layers that have not run yet
        self._shares: dict[int, tuple[str, str]] = {}  # of parameters that are shares: name, degree
        self._postponed = False
        self._selective: dict[int, SelectiveLayer] = {}
        self._joined = False
        self._layers: dict[int, tuple[tuple[range, SelectiveLayer], ...]] = {}  # by stage

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def units(self) -> tuple[Unit, ...]:
        return self._units

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return self._held.parameter_names

    def on_listing(self, listed: Callable[[str], None]) -> None:
        """``listed`` is called when parameters are listed that are not here, with what is."""
        here = [self._units[index].name for index in self._runs]
        more = ", ..." if len(here) > _NAMED else ""
        what = f"{len(here)} of {len(self._units)} units ({', '.join(here[:_NAMED])}{more})"
        self._held.listed = lambda: listed(what)

    def cut(self, stages: Sequence[range], owned: Sequence[int]) -> None:
        self._stages = tuple(stages)
        for index in self._held.keep({index for stage in owned for index in stages[stage]}):
            self._selective.pop(index, None)
        self.release()
        # One unit after the other: only one is whole at a time.
        for index, unit in self._runs.items():
            name = self._units[index].name
            self._draw(name, unit)
            if self._sharding is not None:
                self._sharding.apply(name)
                if isinstance(self._values, WholeShapeValues):
                    self._values.look_after(unit)
            if self._expert_shares is not None:
                self._expert_shares.apply(self._module, name)
        if self._sharding is not None:
            self._sharding.finish(self._held.canonical)
        self._note_shares()

    def restore(self, values: Mapping[str, Tensor]) -> None:
        owned = (units for units in self._stages if units and units[0] in self._runs)
        self._held.restore(values, dict(p for units in owned for p in self._held.parameters(units)))

    def release(self) -> None:
        self._held.release()

    def select(self, selection: Selection) -> None:
        self._selective = selection.layers_of(self._runs)
        self._joined = selection.joined

    def show(self, microbatch: Any) -> None:
        """Gives a microbatch, by whose shapes shardings are found; without, sizes decide."""
        self._example = microbatch

    def sharding_plan(self, tp: int, search: Search) -> ShardingPlan | None:
        example, self._example = self._example, None
        declared = declared_plan(self._module, tp)
        if declared is not None:
            return declared
        # Without an example: units may have no weights yet, and no batch is at hand.
        return plan_by_sizes(self._module, tp) if example is None else search(self._module, example)

    def shard(self, ranks: TensorRanks, plan: ShardingPlan | None = None) -> None:
        assert plan is not None
        self._sharding = Sharding(self._module, plan, ranks)
        self._values = self._sharding.values
        if isinstance(self._values, WholeShapeValues):
            self._trial = UnitTrial(self._sharding, self._values)

    @property
    def shards(self) -> Mapping[str, Shard]:
        """By every name that a parameter has."""
        return {} if self._sharding is None else self._sharding.shards

    def spread(self, ranks: ExpertRanks) -> None:
        declare: Any = getattr(self._module, "declare_experts", None)
        if declare is not None and ranks.size > 1:
            declare()
        self._expert_shares = ExpertShares(self._module, ranks)
        units = [self._module.get_submodule(unit.name) for unit in self._units]
        mixtures = tuple(len(named_expert_layers(unit)) for unit in units)
        self._unseen = {index for index, count in enumerate(mixtures) if count}
        if ranks.size > 1:
            self._mixtures = mixtures

    @property
    def experts(self) -> Mapping[str, Shard | Grid]:
        return {} if self._expert_shares is None else self._expert_shares.shards

    @property
    def exchanges(self) -> tuple[int, ...]:
        mixtures = self._mixtures
        return tuple(sum(mixtures[i] for i in stage) for stage in self._stages) if mixtures else ()

    @property
    def partial_parameters(self) -> Collection[str]:
        """Norms under sequence parallelism, and what the plan says."""
        return () if self._sharding is None else self._sharding.partial

    def _note_shares(self) -> None:
        # Whole-shape values give the whole of a weight to whoever reads it.
        cut = {n: "tp" for n in self.shards} if isinstance(self._values, LocalValues) else {}
        cut |= {
            n: "tp" if isinstance(s, Grid) else "ep" for n, s in self.experts.items() if is_cut(s)
        }
        owned = (
            p
            for units in self._stages
            if units and units[0] in self._runs
            for p in self._held.parameters(units)
        )
        self._shares = {id(p): (name, cut[name]) for name, p in owned if name in cut}

    def _outside_units(self) -> AbstractContextManager[Any]:
        """Around a module's code outside of its units, which takes weights for whole ones."""
        return ShareReads(self._shares) if self._shares else nullcontext()

    def compute_whole(self, whole: bool) -> None:
        for shares in (self._sharding, self._expert_shares):
            if shares is not None:
                shares.compute_whole(whole)

    def _draw(self, name: str, unit: nn.Module) -> None:
        """Gives a unit its weights, if the module was built on the meta device."""
        if any(parameter.is_meta for parameter in unit.parameters()):
            initialise: Any = getattr(self._module, "initialise_unit", None)
            if initialise is None:
                raise ModelError(
                    f"unit {name} has no weights (it is on the meta device), and the module "
                    "has no initialise_unit(name) to make them. Build it on a real device."
                )
            initialise(name)

    def forward(
        self,
        stage: int,
        inputs: tuple[Tensor, ...],
        *,
        batch: Any,
        batch_idx: int,
        microbatch: int,
        mode: Mode,
        seed: int | None,
        dataloader_idx: int | None = None,
        at_end: Callable[[], Any] | None = None,
        recording: Any = None,
    ) -> StageOutput:
        with self._values.between_layers():
            return self._forward(stage, inputs, batch, batch_idx, mode, seed, at_end)

    def _forward(
        self,
        stage: int,
        inputs: tuple[Tensor, ...],
        batch: Any,
        batch_idx: int,
        mode: Mode,
        seed: int | None,
        at_end: Callable[[], Any] | None,
    ) -> StageOutput:
        tensors = inputs
        if stage == 0:
            with self._outside_units():
                tensors = self._declared.pipeline_inputs(batch)
        if self._trial is not None and torch.is_grad_enabled():
            named = [(self._units[index].name, self._runs[index]) for index in self._stages[stage]]
            self._trial.check(named, tensors)
        if self._joined:
            for units, joined in self._layers_of(stage):
                tensors = joined.run(partial(self._run, units, seed), tensors, {})
        else:
            tensors = self._run(self._stages[stage], seed, *tensors)
        whole = tuple(self._values.whole(tensor) for tensor in tensors)
        if stage + 1 < len(self._stages) or self._postponed:
            return StageOutput(whole)
        ends = tuple(tensor.detach() for tensor in whole)
        marks = None if at_end is None else at_end()
        return self._result(tensors, batch, batch_idx, mode, ends=ends, marks=marks)

    def _run(self, units: range, seed: int | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        for index in units:
            if seed is not None:
                reseed(seed, index)
            layer = None if self._joined else self._selective.get(index)
            unit: Callable[..., Any] = self._runs[index]
            if index in self._unseen:
                unit = partial(self._run_first, index)
            result = unit(*tensors) if layer is None else layer.run(unit, tensors, {})
            tensors = result if isinstance(result, tuple) else (result,)
        return tensors

    def _run_first(self, index: int, *tensors: Tensor) -> Any:
        """A unit whose experts ranks share, for the first time.

        Raises:
            ModelError: None of its layers has asked those ranks.
        """
        assert self._expert_shares is not None
        ranks = self._expert_shares.ranks
        before = ranks.num_calls
        result = self._runs[index](*tensors)
        if index in self._unseen and ranks.num_calls == before:
            name = self._units[index].name
            layers = named_expert_layers(self._runs[index], name)
            raise ModelError(
                f"the experts of {', '.join(layer for layer, _ in layers)} are shared by several "
                f"ranks, and the forward of {name} has computed without them. Call "
                "exchange.around(compute, rows, counts) in place of compute(rows, counts) where "
                "`exchange` is not None."
            )
        self._unseen.discard(index)
        return result

    def _layers_of(self, stage: int) -> tuple[tuple[range, SelectiveLayer], ...]:
        """Units of a stage that run again together."""
        if stage not in self._layers:
            every = frozenset(FAMILIES)
            found = []
            for _, group in groupby(self._stages[stage], lambda i: _layer_of(self._units[i].name)):
                units = list(group)
                held = nn.ModuleList([self._runs[index] for index in units])
                found.append((range(units[0], units[-1] + 1), SelectiveLayer(held, every)))
            self._layers[stage] = tuple(found)
        return self._layers[stage]

    def whole(
        self,
        ends: Sequence[tuple[Tensor, ...]],
        shares: Sequence[float],
        *,
        batch: Any,
        batch_idx: int,
        mode: Mode,
        seed: int | None,
        dataloader_idx: int | None = None,
        short: bool = False,
    ) -> StageOutput:
        """A result is made from the last unit's outputs alone; its rows are dimension 0."""
        with torch.no_grad():
            if short:
                self._module.pipeline_inputs(batch)
                return StageOutput()
            joined = tuple(
                join_parts(list(parts), shares, (sum(len(p) for p in parts), *parts[0].shape[1:]))
                if parts[0].dim()
                else join_parts(list(parts), shares, ())
                for parts in zip(*ends, strict=True)
            )
            return self._result(joined, batch, batch_idx, mode)

    def postpone_loss(self) -> None:
        self._postponed = True

    def loss(
        self,
        parts: Sequence[tuple[Tensor, ...]],
        shares: Sequence[float],
        *,
        batch: Any,
        batch_idx: int,
        mode: Mode,
        seed: int | None,
        dataloader_idx: int | None = None,
    ) -> StageOutput:
        joined = []
        for pieces in zip(*parts, strict=True):
            lengths = [piece.shape[0] if piece.dim() else 0 for piece in pieces]
            total = sum(lengths)
            if any(abs(n - share * total) > 1e-6 for n, share in zip(lengths, shares, strict=True)):
                raise ModelError(
                    f"loss_over=batch: pipeline_result() takes tensors of {lengths} rows for "
                    "microbatches of other shares of the batch. Let the last unit return tensors "
                    "with the batch's rows first, or use loss_over=microbatch."
                )
            joined.append(torch.cat(pieces))
        return self._result(tuple(joined), batch, batch_idx, mode)

    def layers(self) -> Iterator[nn.Module]:
        for unit in self._units:
            yield self._module.get_submodule(unit.name)

    def _result(
        self,
        tensors: tuple[Tensor, ...],
        batch: Any,
        batch_idx: int,
        mode: Mode,
        *,
        ends: tuple[Tensor, ...] | str = "",
        marks: Any = None,
    ) -> StageOutput:
        with captured_logs(self._module) as logs, self._outside_units():
            result = self._declared.pipeline_result(tensors, batch, batch_idx, mode)
        if isinstance(self._values, WholeShapeValues):
            result = rebuild(result, self._values.whole_of)
        loss = result if mode == "train" else None
        if loss is not None and not (isinstance(loss, Tensor) and loss.numel() == 1):
            raise ModelError(
                "pipeline_result() gave no scalar when mode is 'train'. Return the loss there, a "
                "tensor of one element."
            )
        calls = logs.calls()
        return StageOutput(loss=loss, result=result, logs=calls, ends=ends, marks=marks)

    def compile_units(self) -> None:
        if isinstance(self._values, WholeShapeValues):
            raise ModelError(
                f"compile=true with tp={self._values.ranks.size}: {type(self._module).__name__} "
                "has no tensor_parallel_plan(), and torch.compile does not follow what lies cut "
                "between layers. Use compile=false, or tp=1."
            )
        super().compile_units()

    def owned_modules(self) -> Iterator[nn.Module]:
        yield from self._runs.values()

    def stage_parameters(self, stage: int) -> Iterator[tuple[str, nn.Parameter]]:
        return self._held.parameters(self._stages[stage])

    def shared_parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return self._held.shared(self._stages)


def _layer_of(name: str) -> str:
    """The layer that a unit is of: its parent where that is one of a list, else itself.

    >>> _layer_of("net.layers.3.attention"), _layer_of("net.layers.3"), _layer_of("net.head")
    ('net.layers.3', 'net.layers.3', 'net.head')
    """
    parent = name.rpartition(".")[0]
    return parent if parent.rpartition(".")[2].isdigit() else name
