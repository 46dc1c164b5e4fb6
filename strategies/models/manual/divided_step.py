"""``DividedStep``: which ways a step with manual optimization takes, and what each stage has of it.

Which way is looked at on shapes alone, for each batch that may take another one (``dataflow.py``);
units go to stages in an order in which nothing flows back, whatever that of the step's lines.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.logs import LogCapture
from strategies.models.manual.dataflow import Flow, FlowProbe
from strategies.models.manual.doors import Doors, Flags, Probing, Stale, StateCheck
from strategies.models.manual.flow_layout import Cells, FlowLayout, homes_of_parameters, lay_out
from strategies.models.manual.flow_run import (
    Scout,
)
from strategies.models.nested import cloned, replaced, structure
from strategies.models.replay.gate import call_step, gated
from strategies.models.replay.hole import Spec
from strategies.models.replay.inference import Outcome
from strategies.models.replay.path import ParameterTable
from strategies.models.replay.probing import (
    batch_device,
    run_probe,
)
from strategies.models.replay.unit_search import select_units, units_to_open
from strategies.models.snapshot import restoring
from strategies.models.stage_model import STEP_NAMES, Mode, StageModel, Unit

if TYPE_CHECKING:
    from strategies.models.selective.policy import Selection
    from strategies.models.selective.region import SelectiveLayer

# Batches whose way through the step is looked at before training: a generator may be trained in
# every fifth one only.
_AHEAD = 12
# So many kinds of batches are told apart by what is done besides layers.
_MOST_KINDS = 32


class DividedStep(StageModel):
    """A module with manual optimization, cut by the ways through its step; ``probe`` builds it."""

    def __init__(
        self,
        module: LightningModule,
        mode: Mode,
        units: dict[str, nn.Module],
        table: ParameterTable,
        optimized: Sequence[Sequence[str]] | None,
    ) -> None:
        self._module = module
        self._mode: Mode = mode
        self._units = units
        self._modules = list(units.values())
        self._by_name = dict(module.named_modules(remove_duplicate=False))
        self._table = table
        self._optimized = optimized
        self._cells = Cells(homes_of_parameters(units, table.by_identity()))
        self._caches: dict[Mode, dict[Hashable, Outcome]] = {}
        self._flows: dict[tuple[Mode, Hashable], Flow] = {}
        self._layouts: dict[tuple[Mode, Hashable], FlowLayout] = {}
        self._groups: list[tuple[tuple[str, ...], float]] = []
        self._stages: dict[str, int] = {}
        self._parameters: tuple[tuple[str, ...], ...] = ()
        self._owned: frozenset[int] = frozenset()
        self._selective: dict[int, SelectiveLayer] = {}
        self._doors: Doors | None = None
        self._others: frozenset[str] = frozenset()  # what the last batch's step did besides layers
        # What a training step has left on the module of values of layers, by attribute.
        self._left: dict[str, Spec] = {}
        self.uneven: tuple[str, ...] = ()  # names of what training logs and is no mean over rows
        self._kinds: list[tuple[int, frozenset[str]]] = []
        self._current: Any = None  # the run, scout or probe to which the module's doors lead

    @classmethod
    def probe(
        cls,
        module: LightningModule,
        example_batch: Any,
        *,
        mode: Mode = "train",
        chain: str | None = None,
        optimized: Sequence[Sequence[str]] | None = None,
        dataloader_idx: int | None = None,
    ) -> Self:
        """Runs the user's step on shapes alone, for several batches, and finds its segments.

        Args:
            module: The module, uncut and attached to its trainer, which has its optimizers.
            example_batch: One microbatch, on the device where training will run.
            mode: The step that decides about units and stages.
            chain: As for ``ReplayModel.probe``.
            optimized: Names of the parameters of each optimizer; None outside of training.
            dataloader_idx: As for ``ReplayModel.probe``.

        Raises:
            ModelError: If the step cannot be cut; the message has the user's line and the remedy.
        """
        table = ParameterTable(module, batch_device(example_batch, module))
        opened: frozenset[str] = frozenset()
        while True:
            units = select_units(module, chain, opened)
            model = cls(module, mode, units, table, optimized)
            for batch_idx in range(_AHEAD if mode == "train" else 1):
                model._flow(mode, example_batch, batch_idx, dataloader_idx)
            model._doors = None
            flows = list(model._flows.values())
            more = frozenset().union(*(units_to_open(units, f.path, table) for f in flows)) - opened
            if not more:
                break
            opened |= more
        model._groups = model._cells.groups(flows)
        if not model._groups:
            raise ModelError(
                f"{STEP_NAMES[mode]} of {type(module).__name__} calls no layer that owns "
                "parameters, so there is nothing to cut. Use Trainer(strategy='auto')."
            )
        return model

    @property
    def trains(self) -> bool:
        """Whether it knows the optimizers, or was cut for evaluation alone."""
        return self._optimized is not None

    # -- a model that is cut ---------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def units(self) -> tuple[Unit, ...]:
        """Units in an order in which nothing flows back, whatever that of the step's lines."""
        return tuple(Unit(cells[0], cost) for cells, cost in self._groups)

    def cut(self, stages: Sequence[range], owned: Sequence[int]) -> None:
        num_units = len(self._groups)
        if len(stages) > num_units:
            joined = [cells for cells, _ in self._groups if len(cells) > 1]
            why = (
                f" {', '.join(joined[0][:4])} feed each other, so they share a stage."
                if joined
                else ""
            )
            raise ModelError(
                f"{len(stages)} stages were asked for, but {STEP_NAMES[self._mode]} of "
                f"{type(self._module).__name__} has {num_units} units that can be put on stages of "
                f"their own.{why} Use pp * schedule.stages_per_rank <= {num_units}."
            )
        for number, stage in enumerate(stages):
            for group in stage:
                self._stages.update(dict.fromkeys(self._groups[group][0], number))
        for key, flow in self._flows.items():
            step = STEP_NAMES[key[0]]
            self._layouts[key] = lay_out(flow, self._cells, self._stages, len(stages), step)
        self._parameters = self._shares(len(stages))
        self._place_the_rest()
        self._owned = frozenset(owned)
        kept = {name for stage in owned for name in self._parameters[stage]}
        self._table.free(name for name in self._table.names if name not in kept)

    def _shares(self, num_stages: int) -> tuple[tuple[str, ...], ...]:
        """The parameters of each stage; what no step uses stays with its neighbours."""
        shares: list[dict[str, None]] = [{} for _ in range(num_stages)]
        for layout in self._layouts.values():
            for share, used in zip(shares, layout.parameters, strict=True):
                share.update(dict.fromkeys(used))
        owner = 0
        for name in self._table.names:
            users = [stage for stage, share in enumerate(shares) if name in share]
            if users:
                owner = users[0]
            else:
                shares[owner][name] = None
        return tuple(tuple(share) for share in shares)

    def _place_the_rest(self) -> None:
        """Gives units and parameters that no flow has seen the stage where their weights are."""
        names = self._table.by_identity()
        for unit, module in self._units.items():
            own = {names[id(parameter)] for parameter in module.parameters()}
            holders = [s for s, share in enumerate(self._parameters) if own <= set(share)]
            if holders:
                self._stages.setdefault(unit, holders[0])
        for stage, share in enumerate(self._parameters):
            for name in share:
                self._stages.setdefault(name, stage)

    def owned_modules(self) -> Iterator[nn.Module]:
        for name, module in self._units.items():
            if self._stages.get(name) in self._owned:
                yield module

    def select(self, selection: Selection) -> None:
        self._selective = selection.layers_of(dict(enumerate(self._modules)))

    def stage_parameters(self, stage: int) -> Iterator[tuple[str, nn.Parameter]]:
        for name in self._parameters[stage]:
            parameter = self._table.find(name)
            assert isinstance(parameter, nn.Parameter), f"{name} is not owned here"
            yield name, parameter

    def shared_parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        users: dict[str, list[int]] = {}
        for stage, names in enumerate(self._parameters):
            for name in names:
                users.setdefault(name, []).append(stage)
        return tuple((name, tuple(stages)) for name, stages in users.items() if len(stages) > 1)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return self._table.names

    @property
    def table(self) -> ParameterTable:
        return self._table

    def first_stages(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for stage, names in enumerate(self._parameters):
            for name in names:
                found.setdefault(name, stage)
        return found

    def restore(self, values: Mapping[str, Tensor]) -> None:
        self._table.fill(values)

    def release(self) -> None:
        self._table.free(self._table.freed)

    def follow_freezing(self) -> None:
        raise ModelError(
            "parameters were frozen or unfrozen during training, which manual optimization in a "
            "pipeline does not follow. Freeze them before fit(), or leave them out of the step by "
            "torch.no_grad()."
        )

    # -- flows -----------------------------------------------------------------------------

    def _layout_of(
        self, mode: Mode, batch: Any, batch_idx: int, dataloader_idx: int | None = None
    ) -> FlowLayout:
        """The way that a step takes for a batch, and its stages; probed where it is new."""
        key = self._flow(mode, batch, batch_idx, dataloader_idx)
        if key not in self._layouts:
            step = STEP_NAMES[mode]
            count = len(self._parameters)
            layout = lay_out(self._flows[key], self._cells, self._stages, count, step)
            for stage, names in enumerate(layout.parameters):
                missing = [name for name in names if name not in self._parameters[stage]]
                if missing:
                    raise ModelError(
                        f"{step} uses {missing[0]} on stage {stage}, which does not have it: its "
                        "layers are on other stages only. Use it between the same layers in every "
                        "step."
                    )
            self._layouts[key] = layout
        return self._layouts[key]

    def number_of(self, layout: FlowLayout) -> int:
        """Which of the ways through the step a layout is of; the same on all ranks."""
        ways = [known for (mode, _), known in self._layouts.items() if mode == "train"]
        return next(number for number, known in enumerate(ways) if known is layout)

    def kind_of(self, layout: FlowLayout) -> int:
        """Which kind the last batch is of: by its way, and what else is done in the step."""
        kind = self.number_of(layout), self._others
        if kind not in self._kinds:
            if len(self._kinds) >= _MOST_KINDS:  # They differ from batch to batch.
                return next((n for n, (way, _) in enumerate(self._kinds) if way == kind[0]), 0)
            self._kinds.append(kind)
        return self._kinds.index(kind)

    def _flow(
        self, mode: Mode, batch: Any, batch_idx: int, dataloader_idx: int | None
    ) -> tuple[Mode, Hashable]:
        if mode != "train":
            which = (dataloader_idx or 0, structure(batch))
            if (mode, which) not in self._flows:
                self._flows[mode, which] = self._probe(mode, batch, batch_idx, dataloader_idx)[0]
            return mode, which
        if any(known == "train" for known, _ in self._flows):
            with suppress(RuntimeError):  # The probe says what it is.
                trace = self._scout(batch, batch_idx)
                if (mode, trace) in self._flows:
                    return mode, trace
        flow, trace = self._probe(mode, batch, batch_idx)
        self._flows[mode, trace] = flow
        return mode, trace

    def _scout(self, batch: Any, batch_idx: int) -> Hashable:
        """The way that a step takes; notes what else it does."""
        scout = Scout(self._modules, batch_device(batch, self._module), self._caches["train"])
        self._current = scout
        shown = self._table.shown()
        rates = self._the_doors().kept_rates()
        with restoring(self._module, self._modules), rates, self._gates(), shown, scout:
            call_step(self._module, "train", cloned(batch), batch_idx)
        self._others = frozenset(scout.others)
        return tuple(scout.trace)

    def _probe(
        self, mode: Mode, batch: Any, batch_idx: int, dataloader_idx: int | None = None
    ) -> tuple[Flow, Hashable]:
        stale = Stale(self._module)
        if mode == "train":
            self._probe_once(mode, batch, batch_idx, dataloader_idx, stale)
        # Once more, as the batch after it finds the module.
        found = self._probe_once(mode, batch, batch_idx, dataloader_idx, stale)
        self._left |= stale.specs
        return found

    def _probe_once(
        self, mode: Mode, batch: Any, batch_idx: int, dataloader_idx: int | None, stale: Stale
    ) -> tuple[Flow, Hashable]:
        @contextmanager
        def around(probe: FlowProbe) -> Iterator[None]:
            if mode != "train":
                yield
                return
            if self._optimized is None:
                raise ModelError(
                    f"{type(self._module).__name__} with manual optimization was validated or "
                    "tested before fit() and is cut for that. Call fit() first, or use another "
                    "strategy object for each."
                )
            state = StateCheck(self._module, self._modules)
            with Flags(self._table, self._optimized) as flags:
                self._current = Probing(probe, flags)
                with self._gates():
                    probe.stale = stale.leave()
                    yield
            stale.note(state.changes())

        probe, result, written = run_probe(
            self._module,
            self._units,
            self._table,
            mode,
            batch,
            batch_idx,
            self._caches.setdefault(mode, {}),
            partial(FlowProbe, lenient=mode != "train"),
            around,
            dataloader_idx,
        )
        flow = probe.flow(tuple(self._units), result, clones_batch=written)
        return flow, tuple(probe.trace)

    # -- doors -----------------------------------------------------------------------------

    @contextmanager
    def _gates(self) -> Iterator[None]:
        """The user's units, logs and optimizers lead to whatever is ``_current``."""
        doors = self._the_doors()
        if isinstance(self._current, Probing):
            with doors.kept_rates(), replaced(doors.changes()):
                yield
            return
        logs = LogCapture(lambda _: False)

        def log(name: str, *args: Any, **kwargs: Any) -> None:
            getattr(getattr(self._current, "logs", logs), name)(*args, **kwargs)

        gates = gated(self._module, self._modules, partial(log, "log"), partial(log, "log_dict"))
        with gates, replaced(doors.changes()):
            yield

    def _the_doors(self) -> Doors:
        if self._doors is None:
            self._doors = Doors(self._module, lambda: self._current)
        return self._doors

    def forget_optimizers(self) -> None:
        """The trainer has other optimizers from now on."""
        self._doors = None
