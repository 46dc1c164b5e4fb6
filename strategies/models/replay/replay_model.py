"""``ReplayModel``: an ordinary LightningModule, cut into stages without touching its code."""

from __future__ import annotations

import random
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.collectives import shapes_only
from strategies.models.logs import LogCapture
from strategies.models.nested import rebuild, structure, tensors
from strategies.models.replay.batch_rows import Pair, RowRun, Rows, find_rows, join
from strategies.models.replay.gate import (
    StageDone,
    as_written,
    call_step,
    compiled_above,
    gated,
    has_compiled,
    unchanged,
)
from strategies.models.replay.hole import Hole
from strategies.models.replay.inference import Outcome
from strategies.models.replay.layout import (
    Layout,
    first_layout,
    follow_layout,
    group_calls,
    same_layout,
)
from strategies.models.replay.path import Boundary, Cut, ParameterTable, Path
from strategies.models.replay.probing import Probed, batch_device, probe_path, probe_units
from strategies.models.replay.row_scout import RowScout, scout
from strategies.models.replay.stage_run import StageRun
from strategies.models.replay.value_plan import Share, ValuePlan, Values
from strategies.models.replay.value_run import ValueRun
from strategies.models.replay.whole_values import Dealer, Hand, Step, Where
from strategies.models.stage_model import (
    STEP_NAMES,
    LogCall,
    Mode,
    Search,
    StageModel,
    StageOutput,
    Unit,
)
from strategies.models.state import Generators, kept_generators
from strategies.models.step_state import join_parts

if TYPE_CHECKING:
    from strategies.models.selective.policy import Selection
    from strategies.models.selective.region import SelectiveLayer
    from strategies.models.tensor_parallel.plan_sharding import PlanSharding
    from strategies.models.tensor_parallel.tensor_ranks import Shard, TensorRanks
    from strategies.sharding_plan import FoundPlan


@dataclass(frozen=True, slots=True)
class Example:
    """The microbatch that a module was probed with, and how its step is run with numbers."""

    batch: Any
    mode: Mode
    dataloader_idx: int | None
    around: Callable[[], AbstractContextManager[Any]]


class ReplayModel(StageModel):
    """Runs stages of a LightningModule by replaying its own steps; build it with ``probe``.

    Each forward calls the user's step from its beginning. Layers of other stages return holes at
    once; at the stage's first layer the received tensors fill the holes; after its last one an
    exception leaves the step. Holes cost some ten microseconds per operation between layers;
    operations inside the stage's own layers cost nothing extra.

    Notes:
        Log calls are captured by the stage that runs them. Attributes that layers count up per
        call (not tensors that they return) see microbatches in the order of the schedule.
    """

    def __init__(self, module: LightningModule, first: Step, probed: Probed) -> None:
        self._module = module
        self._units = probed.units
        self._modules = list(probed.units.values())
        self._by_name = dict(module.named_modules(remove_duplicate=False))
        self._table = probed.table
        self._first = first
        self._paths: dict[Step, Path] = {self._first: probed.path}
        self._caches: dict[Step, dict[Hashable, Outcome]] = {self._first: probed.cache}
        self._groups = group_calls(probed.path)
        self._layouts: dict[Step, Layout] = {}
        self._owned: frozenset[int] = frozenset()
        self._selective: dict[int, SelectiveLayer] = {}
        self._compiled = has_compiled()
        above = compiled_above(module, self._modules) if self._compiled else []
        if above:
            rank_zero_info(
                f"{', '.join(above)}: compiled as a whole, which a pipeline cuts between layers. "
                "So the layers run uncompiled. Compile them one by one, or use compile=True."
            )
        self._postponed = False
        self._rows: dict[Step, list[Rows | None]] = {}
        self._value_caches: dict[Step, dict[Hashable, Outcome]] = {}
        self._dealer = Dealer(self.values, self._num_calls)
        self._frozen_anew: set[Step] = set()  # whose gradients are no longer those of the probe
        self._example: Example | None = None
        self._sharding: PlanSharding | None = None

    @classmethod
    def probe(
        cls,
        module: LightningModule,
        example_batch: Any,
        *,
        mode: Mode = "train",
        chain: str | None = None,
        dataloader_idx: int | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> ReplayModel:
        """Runs the user's step once on shapes alone and finds where it can be cut.

        Leaves the module as it was: buffers, counters, metrics and random states included. Works
        for modules on the meta device.

        Args:
            module: The module, uncut; attached to its trainer if its step asks for one.
            example_batch: One microbatch, on the device where training will run.
            mode: The step that decides about units and stages.
            chain: Name of the container of layers (``model.pipeline_layers``), for models whose
                layers are not found as wished.
            dataloader_idx: Which of several evaluation loaders the batch is from; None for one.
            around: What a step with numbers runs inside of, before training has begun.

        Raises:
            ModelError: If the step cannot be cut; the message has the user's line and the remedy.
        """
        if not module.automatic_optimization:
            raise ModelError(
                f"{type(module).__name__} has automatic_optimization=False: a step with backwards "
                "of its own is cut between them, by segments. Use PipelineStrategy, which does so."
            )
        probed = probe_units(module, example_batch, mode, chain, dataloader_idx=dataloader_idx)
        model = cls(module, (mode, dataloader_idx or 0, structure(example_batch)), probed)
        model._example = Example(example_batch, mode, dataloader_idx, around)
        return model

    @classmethod
    def divided(
        cls,
        module: LightningModule,
        units: dict[str, nn.Module],
        table: ParameterTable,
        parameters: tuple[tuple[str, ...], ...],
        dealer: Dealer,
    ) -> ReplayModel:
        """For a module that somebody else has cut: only evaluates, where its weights are now.

        ``parameters`` are those of each stage; ``dealer`` is the other's.
        """
        first: Step = ("train", 0, None)
        model = cls(
            module, first, Probed(units, table, Path(tuple(units), (), ((),), (), False), {})
        )
        none = tuple(() for _ in parameters)
        calls = tuple(range(0) for _ in parameters)
        model._layouts = {first: Layout(calls, (), parameters, none, ())}
        model._owned = frozenset(range(len(parameters)))
        model._dealer = dealer
        return model

    def follow(self, which: Step, batch: Any, batch_idx: int, dataloader_idx: int | None) -> None:
        """Finds the path of a step, and what each stage has of it.

        Raises:
            ModelError: It cannot be cut, or its layers do not run in the order of the stages.
        """
        self._path(which, batch, batch_idx, dataloader_idx)

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def units(self) -> tuple[Unit, ...]:
        """Units in execution order.

        A unit is one call of a module, or several calls between which no cut is possible; it has
        the name of its first module, with ``#2`` for the second call of the same module.
        """
        path = self._paths[self._first]
        return tuple(
            Unit(path.name(calls.start), sum(path.calls[call].cost for call in calls))
            for calls in self._groups
        )

    def cut(self, stages: Sequence[range], owned: Sequence[int]) -> None:
        path = self._paths[self._first]
        self._check_ranges(stages)
        layout = first_layout(
            path, self._groups, stages, self._table.names, STEP_NAMES[self._first[0]]
        )
        self._layouts = {self._first: layout}
        self._owned = frozenset(owned)
        kept = {name for stage in owned for name in layout.parameters[stage]}
        self._table.free(name for name in self._table.names if name not in kept)
        self._example = None

    def sharding_plan(self, tp: int, search: Search) -> FoundPlan | None:
        from strategies.models.replay.layer_cut import found_plan

        assert self._example is not None
        return found_plan(self._module, self._example, tp, search)

    def shard(self, ranks: TensorRanks, plan: FoundPlan | None = None) -> None:
        # DTensor takes half a second to import.
        from strategies.models.replay.layer_cut import cut_layers

        assert self._example is not None and plan is not None
        self._sharding = cut_layers(self._module, self._example, plan, ranks)
        for unit in self._modules:
            self._sharding.values.look_after(unit)

    def compile_units(self) -> None:
        if self._sharding is not None:
            raise ModelError(
                f"compile=true with tp={self._sharding.values.ranks.size}: the layers of "
                f"{type(self._module).__name__} are cut as it was found, and torch.compile does "
                "not follow what lies cut between them. Use compile=false, or tp=1."
            )
        super().compile_units()

    @property
    def shards(self) -> Mapping[str, Shard]:
        return {} if self._sharding is None else self._sharding.shards

    def restore(self, values: Mapping[str, Tensor]) -> None:
        self._table.fill(values)

    def release(self) -> None:
        self._table.free(self._table.freed)

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
    ) -> StageOutput:
        assert stage in self._owned, f"stage {stage} is not owned here"
        which: Step = (mode, dataloader_idx or 0, structure(batch))
        path = self._path(which, batch, batch_idx, dataloader_idx)
        layout = self._layouts[which]
        entry, leave = layout.cuts[stage]
        if leave is None and self._postponed:
            leave = self._last_cut(which)
        end = path.cuts[-1] if leave is None else None
        if leave is not None and entry.position == leave.position:
            given = {b.key: tensor for b, tensor in zip(entry.tensors, inputs, strict=True)}
            passed = tuple(given[b.key].view_as(given[b.key]) for b in leave.tensors)
            return StageOutput(passed, groups=layout.groups[stage])
        if path.clones_batch:
            batch = _cloned(batch)
        run = self._new_run(
            which, entry, leave, inputs, seed, batch, self._dealer.hand(microbatch),
            end=end if isinstance(end, Cut) else None, at_end=at_end,
        )  # fmt: skip
        with nullcontext() if seed is None else kept_generators():
            output = self._run(run, layout.groups[stage], mode, batch, batch_idx, dataloader_idx)
        if end is None:
            return output
        return replace(output, ends=end if isinstance(end, str) else run.ends, marks=run.marks)

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
        which: Step = (mode, dataloader_idx or 0, structure(batch))
        path = self._paths[which]
        end = path.cuts[-1]
        assert isinstance(end, Cut)
        if path.clones_batch:
            batch = _cloned(batch)

        ways = self._rows.get(which)

        before, drew = Generators.now(), False

        def joined(place: int, shape: tuple[int, ...]) -> Tensor:
            nonlocal drew
            drew = drew or not before.are_now()
            if short:
                return torch.zeros(shape)  # Nobody looks: the run ends here.
            if ways is not None and len(ends) > 1:
                return join([parts[place] for parts in ends], ways[place])
            return join_parts([parts[place] for parts in ends], shares, shape)

        leave = end if short else None
        hand = self._dealer.hand(None)
        run = self._new_run(which, end, leave, joined, seed, batch, hand)
        groups = self._layouts[which].groups[-1]
        with torch.no_grad(), nullcontext() if seed is None else kept_generators():
            output = self._run(run, groups, mode, batch, batch_idx, dataloader_idx)
        return replace(output, marks=drew)

    def postpone_loss(self) -> None:
        self._postponed = True

    def compare_rows(
        self,
        mode: Mode,
        pair: Any,
        second: Any,
        rows: tuple[int, int],
        dataloader_idx: int | None = None,
    ) -> None:
        which: Step = (mode, dataloader_idx or 0, structure(second))
        path = self._path(which, second, 0, dataloader_idx)
        self._dealer.clear()
        plan = self._dealer.plan(which)
        if plan is not None and not plan.is_empty:
            shares = [Share(rows[0], rows[1], sum(rows)), Share(0, sum(rows), sum(rows))]
            with unchanged(self._module):
                self._dealer.deal(which, pair, shares, where=(0, dataloader_idx))
        both = self._row_run(Pair(sum(rows), rows[0]), None, which, pair, dataloader_idx)
        one = self._row_run(both.pair, both, which, second, dataloader_idx)
        self._rows[which] = find_rows(path, self._last_cut(which), both, one)

    def mixed_rows(
        self, step: Step, whole: Any, parts: Sequence[Any], rows: Sequence[int]
    ) -> str | None:
        where: Where = (0, step[1] or None)
        path = self._path(step, whole, *where)
        if path.clones_batch or len(self._modules) < 2:
            return None
        own = [Share(0, rows[0], sum(rows)), Share(rows[0], rows[1], sum(rows))]
        plan = self._dealer.plan(step)
        self._dealer.clear()
        if plan is not None and not plan.is_empty:
            with unchanged(self._module):
                every = Share(0, sum(rows), sum(rows))
                self._dealer.deal(step, whole, [*own, every], where=where)

        def run(batch: Any, share: Share, both: RowScout | None) -> RowScout:
            found = RowScout(
                self._modules,
                batch_device(batch, self._module),
                ChainMap(self._value_caches.setdefault(step, {}), self._caches[step]),
                path=path,
                share=share,
                whole=both,
                hand=self._dealer.hand(own.index(share) if share in own else None),
            )
            logs = LogCapture(lambda value: False, self._module)
            with (
                unchanged(self._module),
                torch.inference_mode(False),
                torch.no_grad(),
                gated(self._module, self._modules, logs.log, logs.log_dict),
                self._table.shown(),
                shapes_only(),
                as_written() if self._compiled else nullcontext(),
                found,
            ):
                call_step(self._module, step[0], _cloned(batch), *where)
            return found

        try:
            runs = scout(run, whole, parts, rows)
        except ModelError:
            return None
        return next((one.mixed for one in runs[1] if one.mixed), None) if runs else None

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
        which: Step = (mode, dataloader_idx or 0, structure(batch))
        path = self._path(which, batch, batch_idx, dataloader_idx)
        inputs = parts[0]
        if len(parts) > 1:
            columns = zip(zip(*parts, strict=True), self._rows[which], strict=True)
            inputs = tuple(join(pieces, way) for pieces, way in columns)
        if path.clones_batch:
            batch = _cloned(batch)
        hand = self._dealer.hand(None)
        run = self._new_run(which, self._last_cut(which), None, inputs, seed, batch, hand)
        groups = self._layouts[which].groups[-1]
        with nullcontext() if seed is None else kept_generators():
            return self._run(run, groups, mode, batch, batch_idx, dataloader_idx)

    @property
    def dealer(self) -> Dealer:
        return self._dealer

    def _num_calls(self, which: Step, batch: Any, where: Where) -> int:
        return len(self._path(which, batch, *where).calls)

    def values(
        self, which: Step, batch: Any, where: Where, plan: ValuePlan | None, neutral: bool
    ) -> Values:
        """Runs a step without its layers; with a plan, what it changes is the caller's care."""
        path = self._path(which, batch, *where)
        device = batch_device(batch, self._module)
        # Outcomes of its own: what stages find out in their first forwards is for them to see.
        cache = ChainMap(self._value_caches.setdefault(which, {}), self._caches[which])
        run = ValueRun(self._modules, device, cache, plan, neutral=neutral)
        names = any(e.parameters for events in path.events for e in events)
        logs = LogCapture(lambda value: False, self._module)
        with (
            unchanged(self._module) if plan is None else nullcontext(),
            torch.inference_mode(False),  # Shapes are followed by versions, which it does not count
            torch.set_grad_enabled(which[0] == "train"),
            gated(self._module, self._modules, logs.log, logs.log_dict),
            self._table.shown() if names else nullcontext(),
            shapes_only(),
            as_written() if self._compiled else nullcontext(),
        ):
            if path.clones_batch or any(tensor.is_inference() for tensor in tensors(batch)):
                batch = _cloned(batch)
            with suppress(StageDone), run:
                run.begin()
                call_step(self._module, which[0], batch, *where)
            return run.close()

    def last_place(self, mode: Mode) -> tuple[int, int] | None:
        places = [o.cuts[-1][0].position for key, o in self._layouts.items() if key[0] == mode]
        return max(places, default=None)

    def _row_run(
        self,
        pair: Pair,
        before: RowRun | None,
        which: Step,
        batch: Any,
        dataloader_idx: int | None,
    ) -> RowRun:
        run = RowRun(
            self._modules,
            self._paths[which],
            leave=self._last_cut(which),
            pair=pair,
            before=before,
            step=STEP_NAMES[which[0]],
            modules=self._by_name,
            device=batch_device(batch, self._module),
            cache=self._caches[which],
            hand=self._dealer.hand(None if before is None else 0),
        )
        with unchanged(self._module), torch.set_grad_enabled(which[0] == "train"):
            random.seed(1 if before is None else 2)  # For Python's own numbers, the same holds.
            self._dealer.begin()
            output = self._run(run, (), which[0], _cloned(batch), 0, dataloader_idx)
        run.results = output.tensors
        return run

    def _last_cut(self, which: Step) -> Cut:
        """The cut behind the last layer, where nothing is sent: values keep their layout."""
        cut = self._paths[which].cuts[-1]
        if isinstance(cut, str):
            raise ModelError(
                f"loss_over=batch: {STEP_NAMES[which[0]]} cannot be cut behind its last layer: "
                f"{cut}. Use loss_over=microbatch."
            )
        return replace(cut, tensors=tuple(replace(b, order=None) for b in cut.tensors))

    @property
    def draws(self) -> Mapping[Mode, bool]:
        draws: dict[Mode, bool] = {}
        for (mode, *_), path in self._paths.items():
            random = any(event.random for events in path.events for event in events)
            draws[mode] = draws.get(mode, False) or random
        return draws

    def layers(self) -> Iterator[nn.Module]:
        yield from self._modules

    def _new_run(
        self,
        which: Step,
        entry: Cut,
        leave: Cut | None,
        inputs: Sequence[Tensor] | Callable[[int, tuple[int, ...]], Tensor],
        seed: int | None,
        batch: Any,
        hand: Hand | None,
        *,
        end: Cut | None = None,
        at_end: Callable[[], Any] | None = None,
    ) -> StageRun:
        return StageRun(
            self._modules,
            self._paths[which],
            entry=entry,
            leave=leave,
            inputs=inputs,
            seed=seed,
            step=STEP_NAMES[which[0]],
            modules=self._by_name,
            device=batch_device(batch, self._module),
            cache=self._caches[which],
            selective=self._selective,
            compiled=self._compiled,
            end=end,
            at_end=at_end,
            hand=hand,
            **({} if self._sharding is None else {"whole": self._sharding.values.whole}),
        )

    def owned_modules(self) -> Iterator[nn.Module]:
        path, layout = self._paths[self._first], self._layouts[self._first]
        called = {path.calls[call].unit for stage in self._owned for call in layout.calls[stage]}
        yield from (self._modules[index] for index in sorted(called))

    def select(self, selection: Selection) -> None:
        """Recomputes inside the units; what the step does between them is kept."""
        self._selective = selection.layers_of(dict(enumerate(self._modules)))

    def stage_parameters(self, stage: int) -> Iterator[tuple[str, nn.Parameter]]:
        """One that two stages of this rank use is one object: its gradient holds both shares."""
        for name in self._layouts[self._first].parameters[stage]:
            parameter = self._table.find(name)
            assert isinstance(parameter, nn.Parameter), f"{name} is not owned here"
            yield name, parameter

    def shared_parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        users: dict[str, list[int]] = {}
        for stage, names in enumerate(self._layouts[self._first].parameters):
            for name in names:
                users.setdefault(name, []).append(stage)
        return tuple((name, tuple(stages)) for name, stages in users.items() if len(stages) > 1)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return self._table.names

    @property
    def table(self) -> ParameterTable | None:
        """None where ranks hold shares: nobody puts these together for people's hooks."""
        return self._table if self._sharding is None else None

    def first_stages(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for stage, names in enumerate(self._layouts[self._first].parameters):
            for name in names:
                found.setdefault(name, stage)
        return found

    def follow_freezing(self) -> None:
        self._frozen_anew |= {step for step in self._layouts if step[0] == "train"}

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        return self._layouts[self._first].skips

    def boundaries(self, stage: int, mode: Mode = "train") -> tuple[Boundary, ...]:
        """What ``stage`` sends on: shapes, dtypes and requires_grad, as the probe saw them."""
        layout = next(found for key, found in self._layouts.items() if key[0] == mode)
        leave = layout.cuts[stage][1]
        return () if leave is None else leave.tensors

    def _run(
        self,
        run: StageRun,
        groups: tuple[tuple[int, int], ...],
        mode: Mode,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int | None,
    ) -> StageOutput:
        shares = None if self._sharding is None else self._sharding.values
        whole = _as_it_is if shares is None else shares.whole_of
        logs = LogCapture(lambda value: run.on_log(), self._module, whole)
        try:
            run.begin()
            gates = gated(self._module, self._modules, logs.log, logs.log_dict)
            shown = self._table.shown() if run.names_parameters else nullcontext()
            written = as_written() if self._compiled else nullcontext()
            between = nullcontext() if shares is None else shares.between_layers()
            with gates, shown, written, between, run:
                result = call_step(self._module, mode, batch, batch_idx, dataloader_idx)
                result = result if shares is None else rebuild(result, whole)
            run.on_return()
        except StageDone:
            return StageOutput(run.outputs(), logs=logs.calls(), groups=groups)
        finally:
            run.close()
        return _final_output(result, mode, logs.calls(), self._module)

    def _path(self, which: Step, batch: Any, batch_idx: int, dataloader_idx: int | None) -> Path:
        """The path of a step; probed when the step runs for the first time."""
        if which in self._frozen_anew:
            self._probe_again(which, batch, batch_idx, dataloader_idx)
        if which in self._layouts:
            return self._paths[which]
        mode = which[0]
        path, cache = self._paths.get(which), self._caches.get(which, {})
        if path is None:
            path = probe_path(
                self._module,
                self._units,
                self._table,
                mode,
                batch,
                batch_idx,
                cache,
                dataloader_idx=dataloader_idx,
            )
        layout = self._layouts[self._first]
        self._layouts[which] = follow_layout(path, layout, STEP_NAMES[mode])
        self._paths[which], self._caches[which] = path, cache
        return path

    def _probe_again(
        self, which: Step, batch: Any, batch_idx: int, dataloader_idx: int | None
    ) -> None:
        """Finds anew which tensors between the stages, cut as they are, need a gradient."""
        cache: dict[Hashable, Outcome] = {}
        path = probe_path(
            self._module,
            self._units,
            self._table,
            which[0],
            batch,
            batch_idx,
            cache,
            dataloader_idx=dataloader_idx,
        )
        self._layouts[which] = same_layout(path, self._layouts[which], STEP_NAMES[which[0]])
        self._paths[which], self._caches[which] = path, cache
        self._frozen_anew.discard(which)

    def refuse_stages(self, count: int) -> None:
        reasons = sorted({cut for cut in self._paths[self._first].cuts if isinstance(cut, str)})
        if count > len(self._groups) and reasons:
            why = f" Cuts inside units are not possible: {'; '.join(reasons)}."
            raise self._too_few_units(count, why)

    def _too_few_units(self, count: int, why: str) -> ModelError:
        num_units = len(self._groups)
        return ModelError(
            f"{count} stages were asked for, but {STEP_NAMES[self._first[0]]} of "
            f"{type(self._module).__name__} has {num_units} units that can be put on stages of "
            f"their own.{why} Use pp * schedule.stages_per_rank <= {num_units}."
        )

    def _check_ranges(self, stages: Sequence[range]) -> None:
        num_units = len(self._groups)
        self.refuse_stages(len(stages))
        if len(stages) > num_units:
            raise self._too_few_units(len(stages), "")
        position = 0
        for stage in stages:
            assert stage.start == position or not stage, f"stages are not contiguous: {stages}"
            position = max(position, stage.stop)
        assert position == num_units, f"stages cover {position} of {num_units} units"


def _as_it_is(value: Any) -> Any:
    return value


def _cloned(batch: Any) -> Any:
    return rebuild(batch, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)


def _final_output(
    result: Any, mode: Mode, logs: tuple[LogCall, ...], module: LightningModule
) -> StageOutput:
    if mode != "train":
        return StageOutput(result=result, logs=logs)
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, Tensor) or isinstance(loss, Hole):
        got = "None" if loss is None else type(loss).__name__
        raise ModelError(
            f"training_step of {type(module).__name__} returned {got} instead of a loss. A "
            "pipeline cannot skip a batch on one stage: return a loss tensor, or a dict with the "
            "key 'loss'; multiply it by zero to skip."
        )
    if loss.numel() != 1:
        raise ModelError(
            f"training_step of {type(module).__name__} returned a loss of shape "
            f"{list(loss.shape)}; a scalar is needed. Return loss.mean()."
        )
    detached = rebuild(result, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
    return StageOutput(loss=loss, result=detached, logs=logs)
