"""``SegmentModel``: a LightningModule with manual optimization, cut into stages.

Its step is no function from a batch to a loss: it runs backwards and optimizer steps in its middle.
So a batch takes several passes, one per segment (``dataflow.py``), with one suspended step per
microbatch and stage (``strand.py``). What is to happen once per batch, optimizer steps above all,
is handed to whoever runs the passes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.collectives import ShapesFirst, shapes_only
from strategies.models.logs import LogCapture
from strategies.models.manual.dataflow import Flow, FlowProbe
from strategies.models.manual.doors import Doors, Flags, Probing, Stale, StateCheck
from strategies.models.manual.flow_layout import Cells, FlowLayout, homes_of_parameters, lay_out
from strategies.models.manual.row_check import LossScout, compare_losses
from strategies.models.manual.strand import (
    Action,
    FlowRun,
    Reached,
    Report,
    Returned,
    Scout,
    Strand,
    ValueScout,
    Waits,
)
from strategies.models.nested import leaves, rebuild, replaced, structure
from strategies.models.replay.gate import StageDone, call_step, gated, unchanged
from strategies.models.replay.hole import Hole
from strategies.models.replay.inference import Outcome
from strategies.models.replay.path import ParameterTable
from strategies.models.replay.probing import (
    batch_device,
    run_probe,
    select_units,
    units_to_open,
)
from strategies.models.replay.replay_model import ReplayModel
from strategies.models.replay.row_scout import RowScout
from strategies.models.replay.shape_mode import MODULE_TABLES
from strategies.models.replay.value_plan import Share, ValuePlan, Values
from strategies.models.replay.whole_values import Dealer, Hand, Step, Where
from strategies.models.stage_model import STEP_NAMES, LogCall, Mode, StageModel, StageOutput, Unit
from strategies.models.state import kept_generators

if TYPE_CHECKING:
    from strategies.models.selective.policy import Selection
    from strategies.models.selective.region import SelectiveLayer

# Batches whose way through the step is looked at before training: a generator may be trained in
# every fifth one only.
_AHEAD = 12


@dataclass(frozen=True)
class Ended:
    """What a microbatch's step has left on a stage."""

    stage: int
    microbatch: int
    result: Any
    logs: tuple[LogCall, ...]


class SegmentModel(StageModel):
    """Runs stages of a step with manual optimization; build it with ``probe``.

    For each batch: ``open``, then ``advance`` until it gives None. It gives an ``Action``, to be
    performed and told by ``performed``, or a segment, for which a pass calls ``forward``, to be
    told by ``passed``. Then ``close``.
    """

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
        self._strands: dict[tuple[int, int], Strand] = {}
        self._runs: dict[tuple[int, int], FlowRun] = {}
        self._actions: list[tuple[Hashable, Any]] = []
        self._layout: FlowLayout | None = None
        self._perform: Callable[[Action], Any] = lambda action: action.perform()
        self._seeds: Sequence[int] = ()
        self._replay: ReplayModel | None = None
        self._ordered: dict[Step, bool] = {}
        self._dealer = Dealer(self._values, lambda step, batch, where: 0)
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
    ) -> SegmentModel:
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
                "parameters, so there is nothing to cut. Use pp=1."
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

    # -- a batch in training ---------------------------------------------------------------

    def open(
        self,
        microbatches: Sequence[Any],
        places: Sequence[tuple[int, int]],
        *,
        batch_idx: int,
        seeds: Sequence[int],
        perform: Callable[[Action], Any],
    ) -> FlowLayout:
        """Begins the steps of a batch.

        Args:
            microbatches: Their data.
            places: Stages and microbatches that run on this rank.
            batch_idx: As Lightning counts.
            seeds: Per microbatch.
            perform: Does an action that comes up inside of a pass.
        """
        self._perform = perform
        self._seeds = seeds
        self._actions.clear()
        layout = self._layout = self._layout_of("train", microbatches[0], batch_idx)
        for place in places:
            batch = microbatches[place[1]]
            if layout.flow.path.clones_batch:
                batch = _clone(batch)
            device = batch_device(batch, self._module)
            self._strands[place] = Strand(
                partial(self._live, place, layout, batch, batch_idx, seeds[place[1]], device),
                device,
            )
        return layout

    def advance(self) -> Action | int | None:
        """Lets all steps go on until they want the same, which it gives.

        An action, the number of a segment that needs a pass, or None at the end.
        """
        while True:
            reports = []
            for place, strand in self._strands.items():
                if strand.handled and not isinstance(strand.report, Returned):
                    self._resume(place, self._answer_of(strand))
                assert strand.report is not None
                reports.append(strand.report)
            first = reports[0]
            kinds = {_kind(report) for report in reports}
            if len(kinds) > 1:
                raise ModelError(
                    "training_step does not do the same for every microbatch: one came to "
                    f"{', another to '.join(sorted(map(str, kinds)))}. What happens once per batch "
                    "(optimizer steps, toggles, schedules) may depend on batch_idx, not on data."
                )
            self._settle_rates()
            if isinstance(first, Action):
                return first
            if isinstance(first, Waits | Reached):
                return first.segment
            return None

    def performed(self, action: Action, result: Any) -> None:
        """Tells all steps what an action has given."""
        self._actions.append((action.signature, result))
        for strand in self._strands.values():
            strand.num_actions += 1
            strand.handled = True

    def passed(self) -> None:
        """Tells all steps that the pass of their segment is over, backwards included."""
        for strand in self._strands.values():
            strand.handled = True

    def close(self) -> list[Ended]:
        """Ends the steps of a batch, wherever they are; gives what they have left."""
        ended = []
        for place, strand in self._strands.items():
            run = self._runs.get(place)
            if isinstance(strand.report, Returned) and run is not None:
                ended.append(Ended(*place, strand.report.result, run.take_logs()))
            else:
                with self._gates():
                    self._current = run
                    strand.stop()
            if run is not None:
                run.close()
        if self._strands:
            self._keep_attributes(max(place[1] for place in self._strands))
        self._strands.clear()
        self._runs.clear()
        self._current = None
        return ended

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
        if mode != "train":
            which = (mode, dataloader_idx or 0, structure(batch))
            if self._in_order(which, batch, batch_idx, dataloader_idx):
                assert self._replay is not None
                return self._replay.forward(
                    stage,
                    inputs,
                    batch=batch,
                    batch_idx=batch_idx,
                    microbatch=microbatch,
                    mode=mode,
                    seed=seed,
                    dataloader_idx=dataloader_idx,
                    at_end=at_end,
                )
            return self._evaluate(stage, inputs, batch, batch_idx, mode, seed, dataloader_idx)
        assert self._layout is not None
        place = (stage, microbatch)
        run, strand, layout = self._runs[place], self._strands[place], self._layout
        own = run.feed(inputs)
        if isinstance(strand.report, Waits):
            self._resume(place, None)
            while isinstance(strand.report, Action):
                self._resume(place, self._act_within_pass(strand, strand.report))
        loss = None
        if stage == len(self._parameters) - 1 and layout.flow.ends_with_backward(run.segment):
            loss = run.loss
            assert isinstance(loss, Tensor) and not isinstance(loss, Hole)
        return StageOutput(run.outputs(), loss=loss, logs=run.take_logs(), leaves=own)

    def _act_within_pass(self, strand: Strand, action: Action) -> Any:
        """The first step that comes to an action performs it, for all."""
        if strand.num_actions == len(self._actions):
            self._actions.append((action.signature, self._perform(action)))
        strand.num_actions += 1
        known, result = self._actions[strand.num_actions - 1]
        if known != action.signature:
            raise ModelError(
                "training_step does not do the same for every microbatch: one came to "
                f"{known}, another to {action.signature}. What happens once per batch (optimizer "
                "steps, toggles, schedules) may depend on batch_idx, not on data."
            )
        return result

    def _answer_of(self, strand: Strand) -> Any:
        return self._actions[strand.num_actions - 1][1] if strand.num_actions else None

    def _live(
        self,
        place: tuple[int, int],
        layout: FlowLayout,
        batch: Any,
        batch_idx: int,
        seed: int,
        device: torch.device,
        pause: Callable[[Report], Any],
    ) -> Any:
        """The body of a strand: the user's step, from its beginning to its end."""
        run = self._current = self._runs[place] = self._run(
            "train", layout, place[0], seed, device, pause, self._dealer.hand(place[1])
        )
        run.begin()
        with run:
            result = call_step(self._module, "train", batch, batch_idx)
        run.ended()
        return result

    def _run(
        self,
        mode: Mode,
        layout: FlowLayout,
        stage: int,
        seed: int | None,
        device: torch.device,
        pause: Callable[[Report], Any] | None,
        hand: Hand | None = None,
    ) -> FlowRun:
        return FlowRun(
            self._modules,
            layout,
            stage,
            seed=seed,
            step=STEP_NAMES[mode],
            module=self._module,
            modules=self._by_name,
            device=device,
            cache=self._caches.setdefault(mode, {}),
            selective=self._selective,
            pause=pause,
            hand=hand,
        )

    def _resume(self, place: tuple[int, int], answer: Any) -> None:
        """Lets one step go on, among the attributes of modules as it has left them."""
        strand = self._strands[place]
        assert self._layout is not None
        parameters = any(e.parameters for events in self._layout.flow.path.events for e in events)
        shown = self._table.shown() if parameters else nullcontext()
        self._current = self._runs.get(place)
        with (
            self._own_attributes(strand),
            self._own_rates(strand),
            self._own_draws(strand, self._seeds[place[1]]),
            self._gates(),
            shown,
            kept_generators(),
        ):
            strand.resume(answer)

    @contextmanager
    def _own_rates(self, strand: Strand) -> Iterator[None]:
        """The same of what a step has set in the optimizers, until all have come to an action."""
        with self._the_doors().kept_rates() as changed:
            self._the_doors().set_rates(strand.rates)
            yield
        strand.rates = changed

    @contextmanager
    def _own_draws(self, strand: Strand, seed: int) -> Iterator[None]:
        """The same of what is drawn with Python and numpy: alike on all stages of a microbatch."""
        numpy: Any = sys.modules.get("numpy")
        before = random.getstate(), None if numpy is None else numpy.random.get_state()
        if strand.draws is None:
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed(seed % 2**32)
        else:
            _set_draws(strand.draws)
        try:
            yield
        finally:
            strand.draws = random.getstate(), None if numpy is None else numpy.random.get_state()
            _set_draws(before)

    def _settle_rates(self) -> None:
        """All steps stand at the same place: what each of them has set is set once."""
        strands = list(self._strands.values())
        if any(strand.rates for strand in strands):
            first = strands[0].rates
            if any(strand.rates != first for strand in strands):
                raise ModelError(
                    "training_step sets other learning rates for one microbatch than for another. "
                    "They may depend on batch_idx and on counters, not on data."
                )
            self._the_doors().set_rates(first)
            for strand in strands:
                strand.rates = {}

    @contextmanager
    def _own_attributes(self, strand: Strand) -> Iterator[None]:
        """Each step sees what it has assigned itself: ``self.fake = self(z)``, ``self.n += 1``."""
        watched = self._watched()
        before = [dict(vars(module)) for module in watched]
        for (number, name), value in strand.attributes.items():
            watched[number].__dict__[name] = value
        started = [dict(vars(module)) for module in watched]
        try:
            yield
        finally:
            for number, module in enumerate(watched):
                own = module.__dict__
                for name, value in list(own.items()):
                    if name in MODULE_TABLES:
                        continue
                    if started[number].get(name, _ABSENT) is not value:
                        strand.attributes[number, name] = value
                own.clear()
                own.update(before[number])

    def _watched(self) -> list[nn.Module]:
        """Modules whose attributes a step may set: the root, and those that layers have set."""
        assert self._layout is not None
        names = {name for c in self._layout.flow.path.calls for name, _ in c.effects}
        return [self._module, *(self._by_name[name] for name in sorted(names))]

    def _keep_attributes(self, microbatch: int) -> None:
        """After a batch, modules have what the last microbatch's step has assigned."""
        watched = self._watched()
        for (_, number), strand in sorted(self._strands.items()):
            if number != microbatch:
                continue
            for (index, name), value in strand.attributes.items():
                hole = any(isinstance(leaf, Hole) for leaf in leaves(value))
                if not hole or name not in watched[index].__dict__:
                    watched[index].__dict__[name] = value

    def forget_optimizers(self) -> None:
        """The trainer has other optimizers from now on."""
        self._doors = None

    # -- evaluation ------------------------------------------------------------------------

    def _in_order(
        self, which: Step, batch: Any, batch_idx: int, dataloader_idx: int | None
    ) -> bool:
        """Whether a step of evaluation runs the layers in the order of the stages.

        Then it is cut as any module's is, and what it does behind its last layer happens once for
        the batch.
        """
        if which not in self._ordered:
            if self._replay is None:
                self._replay = ReplayModel.divided(
                    self._module, self._units, self._table, self._parameters, self._dealer
                )
            try:
                self._replay.follow(which, batch, batch_idx, dataloader_idx)
                self._ordered[which] = True
            except ModelError as error:
                try:
                    self._layout_of(which[0], batch, batch_idx, dataloader_idx)
                except ModelError:
                    raise error from None
                self._ordered[which] = False
        return self._ordered[which]

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
        assert self._replay is not None
        return self._replay.whole(
            ends,
            shares,
            batch=batch,
            batch_idx=batch_idx,
            mode=mode,
            seed=seed,
            dataloader_idx=dataloader_idx,
            short=short,
        )

    @property
    def draws(self) -> Mapping[Mode, bool]:
        return {} if self._replay is None else self._replay.draws

    def layers(self) -> Iterator[nn.Module]:
        yield from self._modules

    def _evaluate(
        self,
        stage: int,
        inputs: tuple[Tensor, ...],
        batch: Any,
        batch_idx: int,
        mode: Mode,
        seed: int | None,
        dataloader_idx: int | None,
    ) -> StageOutput:
        layout = self._layout_of(mode, batch, batch_idx, dataloader_idx)
        if layout.flow.path.clones_batch:
            batch = _clone(batch)
        run = self._run(mode, layout, stage, seed, batch_device(batch, self._module), None)
        run.feed(inputs)
        result = None
        processes = ShapesFirst()
        processes.begin()
        if stage == len(self._parameters) - 1:
            processes.open()
        shown = self._table.shown() if run.names_parameters else nullcontext()
        try:
            gates = gated(self._module, self._modules, run.logs.log, run.logs.log_dict)
            with gates, shown, run:
                run.begin()
                result = call_step(self._module, mode, batch, batch_idx, dataloader_idx)
            if stage != len(self._parameters) - 1:
                raise ModelError(
                    f"{STEP_NAMES[mode]} caught the exception by which a pipeline stage leaves "
                    "it, or ended earlier than in the probe. Replace `except:` around the network "
                    "by `except Exception:`."
                )
            return StageOutput(result=result, logs=run.take_logs())
        except StageDone:
            return StageOutput(run.outputs(), logs=run.take_logs())
        finally:
            processes.end()
            run.close()

    # -- what is made for all rows of a batch --------------------------------------------------

    @property
    def dealer(self) -> Dealer:
        return self._dealer

    def _values(
        self, which: Step, batch: Any, where: Where, plan: ValuePlan | None, neutral: bool
    ) -> Values:
        """Runs a step without its layers; with a plan, what it changes is the caller's care."""
        if which[0] != "train":
            if not self._in_order((which[0], which[1], structure(batch)), batch, *where):
                return Values()
            assert self._replay is not None
            return self._replay.values(which, batch, where, plan, neutral)
        device = batch_device(batch, self._module)
        run = ValueScout(self._modules, device, self._caches["train"], plan, neutral=neutral)
        with unchanged(self._module) if plan is None else nullcontext(), self._looked_at(run):
            with suppress(StageDone), run:
                run.begin()
                call_step(self._module, "train", _clone(batch), where[0])
            return run.close()

    @contextmanager
    def _looked_at(self, run: Any) -> Iterator[None]:
        """Around a step that trains nothing."""
        self._current = run
        rates = self._the_doors().kept_rates()
        with rates, self._gates(), self._table.shown(), shapes_only():
            yield

    def compare_losses(
        self, layout: FlowLayout, step: Step, whole: Any, parts: Sequence[Any], rows: Sequence[int]
    ) -> None:
        """Refuses losses of a way through the step that are not means over rows.

        Args:
            layout: The way.
            step: What ``dealer`` knows it by.
            whole: A batch.
            parts: Its rows, in two batches.
            rows: How many each has.
        """
        plan = self._dealer.plan(step)
        shares = [Share(0, rows[0], sum(rows)), Share(rows[0], rows[1], sum(rows))]
        self._dealer.clear()
        if plan is not None and not plan.is_empty:
            with unchanged(self._module):
                everything = Share(0, sum(rows), sum(rows))
                self._dealer.deal(step, whole, [*shares, everything], where=(0, None))

        def run(batch: Any, share: Share, both: RowScout | None) -> LossScout:
            number = shares.index(share) if share in shares else None
            device = batch_device(batch, self._module)
            scout = LossScout(
                self._modules,
                device,
                self._caches["train"],
                path=layout.flow.path,
                share=share,
                whole=both,
                hand=self._dealer.hand(number),
            )
            with unchanged(self._module), torch.no_grad(), self._looked_at(scout), scout:
                call_step(self._module, "train", _clone(batch), 0)
            return scout

        compare_losses(run, whole, parts, rows, step=STEP_NAMES["train"])

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
                        "step, or pp=1."
                    )
            self._layouts[key] = layout
        return self._layouts[key]

    def number_of(self, layout: FlowLayout) -> int:
        """Which of the ways through the step a layout is of; the same on all ranks."""
        ways = [known for (mode, _), known in self._layouts.items() if mode == "train"]
        return next(number for number, known in enumerate(ways) if known is layout)

    def _flow(
        self, mode: Mode, batch: Any, batch_idx: int, dataloader_idx: int | None
    ) -> tuple[Mode, Hashable]:
        if mode != "train":
            which = (dataloader_idx or 0, structure(batch))
            if (mode, which) not in self._flows:
                self._flows[mode, which] = self._probe(mode, batch, batch_idx, dataloader_idx)[0]
            return mode, which
        if any(known == "train" for known, _ in self._flows):
            trace = self._scout(batch, batch_idx)
            if (mode, trace) in self._flows:
                return mode, trace
        flow, trace = self._probe(mode, batch, batch_idx)
        self._flows[mode, trace] = flow
        return mode, trace

    def _scout(self, batch: Any, batch_idx: int) -> Hashable:
        scout = Scout(self._modules, batch_device(batch, self._module), self._caches["train"])
        self._current = scout
        shown = self._table.shown()
        rates = self._the_doors().kept_rates()
        with unchanged(self._module), rates, self._gates(), shown, scout:
            call_step(self._module, "train", _clone(batch), batch_idx)
        return tuple(scout.trace)

    def _probe(
        self, mode: Mode, batch: Any, batch_idx: int, dataloader_idx: int | None = None
    ) -> tuple[Flow, Hashable]:
        stale = Stale(self._module)
        if mode == "train":
            self._probe_once(mode, batch, batch_idx, dataloader_idx, stale)
        # Once more, as the batch after it finds the module.
        return self._probe_once(mode, batch, batch_idx, dataloader_idx, stale)

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


_ABSENT = object()


def _clone(batch: Any) -> Any:
    return rebuild(batch, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)


def _set_draws(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])


def _kind(report: Report) -> Hashable:
    if isinstance(report, Action):
        return report.signature
    if isinstance(report, Returned):
        return "the end of the step"
    return f"the end of segment {report.segment}"
