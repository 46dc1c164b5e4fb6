"""``SegmentModel``: a LightningModule with manual optimization, cut into stages.

Its step is no function from a batch to a loss: it runs backwards and optimizer steps in its middle.
So a batch takes several passes, one per segment (``dataflow.py``), with one suspended step per
microbatch and stage (``strand.py``). What is to happen once per batch, optimizer steps above all,
is handed to whoever runs the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.collectives import ShapesFirst, shapes_only
from strategies.models.logs import LogCapture
from strategies.models.manual.divided_step import DividedStep
from strategies.models.manual.flow_layout import FlowLayout
from strategies.models.manual.flow_run import (
    Action,
    FlowRun,
    Reached,
    Report,
    Returned,
    Waits,
)
from strategies.models.manual.row_check import LossScout, compare_losses
from strategies.models.manual.strand import Strand
from strategies.models.nested import cloned, structure
from strategies.models.replay.gate import StageDone, call_step, gated
from strategies.models.replay.hole import Hole
from strategies.models.replay.probing import (
    batch_device,
)
from strategies.models.replay.replay_model import ReplayModel
from strategies.models.replay.rows.batch_rows import Share
from strategies.models.replay.rows.draws import BatchDraws, RunDraws
from strategies.models.replay.rows.row_scout import RowScout
from strategies.models.snapshot import restoring
from strategies.models.stage_model import STEP_NAMES, LogCall, Mode, StageOutput, Step
from strategies.models.state import Generators, kept_generators


@dataclass(frozen=True)
class Ended:
    """What a microbatch's step has left on a stage."""

    stage: int
    microbatch: int
    result: Any
    logs: tuple[LogCall, ...]


class SegmentModel(DividedStep):
    """Runs stages of a step with manual optimization; build it with ``probe``.

    For each batch: ``open``, then ``advance`` until it gives None. It gives an ``Action``, to be
    performed and told by ``performed``, or a segment, for which a pass calls ``forward``, to be
    told by ``passed``. Then ``close``.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._strands: dict[tuple[int, int], Strand] = {}
        self._runs: dict[tuple[int, int], FlowRun] = {}
        self._actions: list[tuple[Hashable, Any]] = []
        self._layout: FlowLayout | None = None
        self._perform: Callable[[Action], Any] = lambda action: action.perform()
        self._seeds: Sequence[int] = ()
        self._replay: ReplayModel | None = None
        self._ordered: dict[Step, bool] = {}
        self._draws: BatchDraws | None = None
        self._run_draws: dict[tuple[int, int], RunDraws] = {}

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
                batch = cloned(batch)
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
        self._run_draws.clear()
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
        recording: Any = None,
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
        draws = self._run_draws.get(place)
        run = self._current = self._runs[place] = self._run(
            "train", layout, place[0], seed, device, pause, draws
        )
        run.begin()
        with run:
            result = call_step(self._module, "train", batch, batch_idx)
        run.ended()
        if draws is not None:
            draws.end()
        return result

    def _run(
        self,
        mode: Mode,
        layout: FlowLayout,
        stage: int,
        seed: int | None,
        device: torch.device,
        pause: Callable[[Report], Any] | None,
        draws: RunDraws | None = None,
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
            draws=draws,
        )

    def _resume(self, place: tuple[int, int], answer: Any) -> None:
        """Lets one step go on, among the attributes of modules as it has left them."""
        strand = self._strands[place]
        assert self._layout is not None
        parameters = any(e.parameters for events in self._layout.flow.path.events for e in events)
        shown = self._table.shown() if parameters else nullcontext()
        self._current = self._runs.get(place)
        with (
            strand.own_attributes(self._watched()),
            self._own_rates(strand),
            strand.own_draws(self._seeds[place[1]]),
            self._seeding(place),
            self._gates(),
            shown,
            kept_generators(),
        ):
            strand.resume(answer)

    def _seeding(self, place: tuple[int, int]) -> AbstractContextManager[None]:
        """Around a part of a step, which may set seeds of what it draws."""
        if self._draws is None:
            return nullcontext()
        if place not in self._run_draws:
            self._run_draws[place] = self._draws.run(place[1])
        return self._run_draws[place].seeding()

    @contextmanager
    def _own_rates(self, strand: Strand) -> Iterator[None]:
        """The same of what a step has set in the optimizers, until all have come to an action."""
        with self._the_doors().kept_rates() as changed:
            self._the_doors().set_rates(strand.rates)
            yield
        strand.rates = changed

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

    def _watched(self) -> list[nn.Module]:
        """Modules whose attributes a step may set: the root, and those that layers have set."""
        assert self._layout is not None
        names = {name for c in self._layout.flow.path.calls for name, _ in c.effects}
        return [self._module, *(self._by_name[name] for name in sorted(names))]

    def _keep_attributes(self, microbatch: int) -> None:
        """After a batch, modules have what the last microbatch's step has assigned."""
        watched = self._watched()
        for (_, number), strand in sorted(self._strands.items()):
            if number == microbatch:
                strand.leave_attributes(watched)
        for name, spec in self._left.items():
            hole = Hole(spec)
            hole.left = name
            self._module.__dict__[name] = hole

    # -- evaluation ------------------------------------------------------------------------

    def refusal(
        self, mode: Mode, batch: Any, batch_idx: int, dataloader_idx: int | None
    ) -> ModelError | None:
        try:
            self._in_order(
                (mode, dataloader_idx or 0, structure(batch)), batch, batch_idx, dataloader_idx
            )
        except ModelError as error:
            return error
        return None

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
                    self._module, self._units, self._table, self._parameters
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
            batch = cloned(batch)
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

    # -- what a step draws, and its losses -----------------------------------------------------

    @property
    def look(self) -> Hashable:
        return "manual"

    def drew(self, step: Step, batch: Any, batch_idx: int) -> tuple[bool, bool]:
        if step[0] == "train":
            assert self._layout is not None
            return self._layout.flow.path.drew
        if not self._in_order(step, batch, batch_idx, step[1] or None):
            return False, False
        assert self._replay is not None
        return self._replay.drew(step, batch, batch_idx)

    def draw_from(self, draws: BatchDraws | None) -> None:
        self._draws = draws
        if self._replay is not None:
            self._replay.draw_from(draws)

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
            step: Which step.
            whole: A batch.
            parts: Its rows, in two batches.
            rows: How many each has.
        """
        path = layout.flow.path
        looks = BatchDraws(self._module, Generators.now(), rows, looks=True)

        def run(batch: Any, share: Share, both: RowScout | None) -> LossScout:
            scout = LossScout(
                self._modules,
                batch_device(batch, self._module),
                self._caches["train"],
                path=path,
                share=share,
                whole=both,
                draws=looks.run(None if both is None else int(share.start > 0)),
            )
            scout.logs = logs = LogCapture(lambda value: not isinstance(value, Hole), self._module)
            with restoring(self._module), torch.no_grad(), self._looked_at(scout):
                scout.step(partial(call_step, self._module, "train", cloned(batch), 0))
            scout.logged = logs.calls()
            return scout

        compare = partial(compare_losses, run, whole, parts, rows, step=STEP_NAMES["train"])
        self.uneven = compare() or self.uneven


def _kind(report: Report) -> Hashable:
    if isinstance(report, Action):
        return report.signature
    if isinstance(report, Returned):
        return "the end of the step"
    return f"the end of segment {report.segment}"
