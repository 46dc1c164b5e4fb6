"""``CutModule``: an ordinary LightningModule, divided into stages by the paths of its steps.

Each stage has the parameters that its part of any path uses; which paths there are, and what layers
each calls, is for ``step_paths``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.nested import structure
from strategies.models.replay.gate import (
    compiled_above,
    has_compiled,
)
from strategies.models.replay.layout import (
    Layout,
    first_layout,
    group_calls,
)
from strategies.models.replay.path import Boundary, Call, Cut, ParameterTable, Path
from strategies.models.replay.probing import Probed, batch_device, probe_units
from strategies.models.replay.step_paths import FollowedSteps, refuse_left
from strategies.models.replay.unit_search import select_units
from strategies.models.stage_model import (
    STEP_NAMES,
    Mode,
    Search,
    Step,
    Unit,
)
from strategies.models.tensor_parallel.plan_trial import Example, cut_layers, found_plan

if TYPE_CHECKING:
    from strategies.models.selective.policy import Selection
    from strategies.models.selective.region import SelectiveLayer
    from strategies.models.tensor_parallel.sharding import Sharding
    from strategies.models.tensor_parallel.tensor_ranks import Shard, TensorRanks
    from strategies.sharding_plan import ShardingPlan


class CutModule(FollowedSteps):
    """A LightningModule cut by the paths of its steps; ``probe`` builds it."""

    def __init__(self, module: LightningModule, first: Step, probed: Probed) -> None:
        super().__init__(module, first, probed)
        self._modules = list(probed.units.values())
        self._by_name = dict(module.named_modules(remove_duplicate=False))
        self._groups = group_calls(probed.path)
        self._selective: dict[int, SelectiveLayer] = {}
        self._compiled = has_compiled()
        above = compiled_above(module, self._modules) if self._compiled else []
        if above:
            rank_zero_info(
                f"{', '.join(above)}: compiled as a whole, which a pipeline cuts between layers. "
                "So the layers run uncompiled. Compile them one by one, or use compile=True."
            )
        self._trains = True
        self._example: Example | None = None
        self._sharding: Sharding | None = None

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
    ) -> Self:
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
    def by_order(cls, module: LightningModule, batch: Any, *, chain: str | None = None) -> Self:
        """For evaluation by a step that cannot be cut: layers lie on stages as they are registered.

        So each rank has its part of the weights, and brings it to the steps that run as a whole.
        """
        units = select_units(module, chain, frozenset())
        table = ParameterTable(module, batch_device(batch, module))
        names = table.by_identity()
        calls = []
        for index, unit in enumerate(units.values()):
            used = tuple(dict.fromkeys(names[id(parameter)] for parameter in unit.parameters()))
            cost = float(sum(parameter.numel() for parameter in unit.parameters()))
            calls.append(Call(index, "", cost, (), (), used))
        cuts = tuple(Cut((index, 0), (), index) for index in range(len(calls) + 1))
        path = Path(tuple(units), tuple(calls), ((),) * len(cuts), cuts, False)
        model = cls(module, ("train", 0, None), Probed(units, table, path, {}))
        model._trains = False
        return model

    @classmethod
    def divided(
        cls,
        module: LightningModule,
        units: dict[str, nn.Module],
        table: ParameterTable,
        parameters: tuple[tuple[str, ...], ...],
    ) -> Self:
        """For a module that somebody else has cut: only evaluates, where its weights are now.

        ``parameters`` are those of each stage.
        """
        first: Step = ("train", 0, None)
        model = cls(
            module, first, Probed(units, table, Path(tuple(units), (), ((),), (), False), {})
        )
        none = tuple(() for _ in parameters)
        calls = tuple(range(0) for _ in parameters)
        model._layouts = {first: Layout(calls, (), parameters, none, ())}
        model._owned = frozenset(range(len(parameters)))
        return model

    @property
    def trains(self) -> bool:
        return self._trains

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
        if len(owned) < len(stages):
            self.refuse_left()
        self._layouts = {self._first: layout}
        self._owned = frozenset(owned)
        kept = {name for stage in owned for name in layout.parameters[stage]}
        self._table.free(name for name in self._table.names if name not in kept)
        self._example = None

    def refuse_left(self) -> None:
        """Refuses attributes that later steps, or hooks, may read, and microbatches have parts of.

        Raises:
            ModelError: The step leaves one with a value from before its last layer.
        """
        refuse_left(self._paths[self._first], STEP_NAMES[self._first[0]])

    def show(self, microbatch: Any) -> None:
        """Gives the microbatch that shardings are found for and tried on."""
        assert self._example is not None
        self._example = replace(self._example, batch=microbatch)

    def sharding_plan(self, tp: int, search: Search) -> ShardingPlan | None:
        assert self._example is not None
        return found_plan(self._module, self._example, tp, search)

    def shard(self, ranks: TensorRanks, plan: ShardingPlan | None = None) -> None:
        assert self._example is not None and plan is not None
        self._sharding = cut_layers(self._module, self._example, plan, ranks)
        for unit in self._modules:
            self._sharding.values.look_after(unit)

    def compile_units(self) -> None:
        if self._sharding is not None:
            raise ModelError(
                f"compile=true with tp={self._sharding.ranks.size}: the layers of "
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
            own = self._draws is not None and self._draws.own_drawn
            draws[mode] = draws.get(mode, False) or random or own
        return draws

    def layers(self) -> Iterator[nn.Module]:
        yield from self._modules

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
    def table(self) -> ParameterTable:
        return self._table

    def _between_layers(self) -> AbstractContextManager[None]:
        return nullcontext() if self._sharding is None else self._sharding.values.between_layers()

    def compute_whole(self, whole: bool) -> None:
        if self._sharding is not None:
            self._sharding.compute_whole(whole)

    def first_stages(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for stage, names in enumerate(self._layouts[self._first].parameters):
            for name in names:
                found.setdefault(name, stage)
        return found

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        return self._layouts[self._first].skips

    def boundaries(self, stage: int, mode: Mode = "train") -> tuple[Boundary, ...]:
        """What ``stage`` sends on: shapes, dtypes and requires_grad, as the probe saw them."""
        layout = next(found for key, found in self._layouts.items() if key[0] == mode)
        leave = layout.cuts[stage][1]
        return () if leave is None else leave.tensors

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
