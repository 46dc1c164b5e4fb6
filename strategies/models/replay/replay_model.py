"""``ReplayModel``: an ordinary LightningModule, cut into stages without touching its code."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from strategies.errors import ModelError, PipelineError
from strategies.models.collectives import shapes_only
from strategies.models.logs import LogCapture, apart, no_means
from strategies.models.nested import cloned, join_parts, rebuild, structure, tensors
from strategies.models.replay.cut_module import CutModule
from strategies.models.replay.execute import Execution
from strategies.models.replay.gate import (
    StageDone,
    as_written,
    call_step,
    gated,
)
from strategies.models.replay.hole import Hole
from strategies.models.replay.inference import Outcome
from strategies.models.replay.path import Cut
from strategies.models.replay.probing import Probed, batch_device
from strategies.models.replay.recorder import RecordedLogs, Recorder
from strategies.models.replay.recording import Recording
from strategies.models.replay.rows.batch_rows import RowRun, Rows, Share, find_rows, join
from strategies.models.replay.rows.draws import BatchDraws, RunDraws
from strategies.models.replay.rows.dry_run import DryRun, DryTrace
from strategies.models.replay.rows.row_scout import (
    FewRowsError,
    RowScout,
    kept_number,
    number_of_rows,
    scout,
)
from strategies.models.replay.stage_run import StageRun, dense, like_sent
from strategies.models.replay.step_paths import Where
from strategies.models.snapshot import restoring
from strategies.models.stage_model import (
    STEP_NAMES,
    LogCall,
    Mode,
    RowsMixed,
    StageOutput,
    Step,
)
from strategies.models.state import Generators, kept_generators


class ReplayModel(CutModule):
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
        super().__init__(module, first, probed)
        self._postponed = False
        self._rows: dict[Step, list[Rows | None]] = {}
        self._dry_caches: dict[Step, dict[Hashable, Outcome]] = {}
        # Whether layers of a stage write into what they are given that the batch alone decides.
        self._careful: dict[tuple[Step, int], bool] = {}

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
        recording: Recording | None = None,
    ) -> StageOutput:
        assert stage in self._owned, f"stage {stage} is not owned here"
        which: Step = (mode, dataloader_idx or 0, structure(batch))
        path = self._path(which, batch, batch_idx, dataloader_idx)
        layout = self._layouts[which]
        entry, leave = layout.cuts[stage]
        if leave is None and self._postponed:
            leave = self._last_cut(which)
        end = path.cuts[-1]
        if leave is not None and entry.position == leave.position:
            given = {b.key: tensor for b, tensor in zip(entry.tensors, inputs, strict=True)}
            passed = tuple(given[b.key].view_as(given[b.key]) for b in leave.tensors)
            return StageOutput(passed, groups=layout.groups[stage])
        last = self._end_of_layers(which) if leave is None else None
        logs: tuple[LogCall, ...] = ()
        until = leave or last
        with nullcontext() if seed is None else kept_generators():
            if until is not None:
                if recording is None:
                    with restoring(self._module, self._modules):
                        recording = self.record(
                            batch=batch, batch_idx=batch_idx, microbatch=microbatch, mode=mode,
                            dataloader_idx=dataloader_idx,
                        )  # fmt: skip
                values, logs = self._execute(which, stage, recording, inputs, entry, until, seed)
                if leave is not None:
                    sent = tuple(map(dense, values, leave.tensors))
                    return StageOutput(sent, logs=logs, groups=layout.groups[stage])
                entry, inputs = until, values
            if path.clones_batch:
                batch = cloned(batch)
            run = self._new_run(
                which, entry, None, inputs, seed, batch, self._run_draws(microbatch),
                end=end if isinstance(end, Cut) else None, at_end=at_end,
            )  # fmt: skip
            output = self._run(run, layout.groups[stage], mode, batch, batch_idx, dataloader_idx)
        ends = end if isinstance(end, str) else run.ends
        return replace(output, ends=ends, marks=run.marks, logs=(*logs, *output.logs))

    def record(
        self,
        *,
        batch: Any,
        batch_idx: int,
        microbatch: int,
        mode: Mode,
        dataloader_idx: int | None = None,
    ) -> Recording:
        which: Step = (mode, dataloader_idx or 0, structure(batch))
        path = self._path(which, batch, batch_idx, dataloader_idx)
        if path.clones_batch:
            batch = cloned(batch)
        run = Recorder(
            self._modules,
            path,
            step=STEP_NAMES[mode],
            modules=self._by_name,
            device=batch_device(batch, self._module),
            cache=self._caches[which],
            draws=self._run_draws(microbatch),
        )
        logs = RecordedLogs(run, self._module)
        try:
            run.begin()
            gates = gated(self._module, self._modules, logs.log, logs.log_dict)
            shown = self._table.shown() if run.names_parameters else nullcontext()
            written = as_written() if self._compiled else nullcontext()
            with gates, shown, written, self._between_layers(), run.seeding(), run:
                result = call_step(self._module, mode, batch, batch_idx, dataloader_idx)
            run.on_return(result)
        except StageDone:
            pass
        finally:
            recording = run.recording()
            run.close()
        return recording

    def _execute(
        self,
        which: Step,
        stage: int,
        recording: Recording,
        inputs: Sequence[Tensor],
        begin: Cut,
        end: Cut,
        seed: int | None,
    ) -> tuple[tuple[Tensor, ...], tuple[LogCall, ...]]:
        """Runs a stage's part of a recording; gives the values that cross its end, and logs."""
        numbers = recording.numbers
        if len(inputs) != len(begin.tensors):
            raise ModelError(
                f"a stage of {STEP_NAMES[which[0]]} got {len(inputs)} tensors, its cut has "
                f"{len(begin.tensors)}."
            )
        env = {
            numbers[boundary.key]: like_sent(tensor, boundary)
            for tensor, boundary in zip(inputs, begin.tensors, strict=True)
        }
        wanted = [numbers[boundary.key] for boundary in end.tensors]
        shares = None if self._sharding is None else self._sharding.values
        careful = self._careful.get((which, stage), True)
        run = Execution(
            self._paths[which],
            seed,
            STEP_NAMES[which[0]],
            batch_device(inputs or (), self._module).type,
            self._selective,
            copies=careful,
            whole=_as_it_is if shares is None else shares.whole_of,
        )
        with self._between_layers():
            run.run(recording, env, begin.position, end.position, set(wanted))
            values = tuple(run.whole(env[number]) for number in wanted)
        if (which, stage) not in self._careful:
            self._careful[which, stage] = run.changed_its_copies
        return values, tuple(run.logs)

    def _end_of_layers(self, which: Step) -> Cut | None:
        """Where Python runs for real from on; None where all of the last stage has to.

        There what the last layer gives stays cut over ranks, or is not all that Python goes on
        with (an activation checkpoint around the last layer and the loss).
        """
        end = self._paths[which].cuts[-1]
        if isinstance(end, str) or self._sharding is not None:
            return None
        return replace(end, tensors=tuple(replace(b, order=None) for b in end.tensors))

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
            batch = cloned(batch)

        ways = self._rows.get(which)

        before, drew, all_draws = Generators.now(), False, self._draws

        def joined(place: int, shape: tuple[int, ...]) -> Tensor:
            nonlocal drew
            drew = drew or not before.are_now() or (all_draws is not None and all_draws.own_drawn)
            if short:
                return torch.zeros(shape)  # Nobody looks: the run ends here.
            if ways is not None and len(ends) > 1:
                return join([parts[place] for parts in ends], ways[place])
            return join_parts([parts[place] for parts in ends], shares, shape)

        leave = end if short else None
        run = self._new_run(which, end, leave, joined, seed, batch, self._run_draws(None))
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
        batch_idx: int = 0,
    ) -> None:
        which: Step = (mode, dataloader_idx or 0, structure(second))
        where: Where = (batch_idx, dataloader_idx)
        share = Share(*rows, sum(rows))
        draws = self._draws_of(which, second, where, rows)
        both = self._row_run(share, None, which, pair, where, draws)
        one = self._row_run(share, both, which, second, where, draws)
        path = self._paths[which]
        self._rows[which] = find_rows(path, self._last_cut(which), both, one)

    def _draws_of(
        self, which: Step, batch: Any, where: Where, rows: Sequence[int]
    ) -> BatchDraws | None:
        """For runs that are compared, of a batch and of parts of it with so many rows."""
        drew, _ = self._path(which, batch, *where).drew
        return BatchDraws(self._module, Generators.now(), rows, looks=True) if drew else None

    def mixed_rows(
        self, step: Step, whole: Any, parts: Sequence[Any], rows: Sequence[int], batch_idx: int = 0
    ) -> RowsMixed:
        where: Where = (batch_idx, step[1] or None)
        path = self._path(step, whole, *where)
        if path.clones_batch or len(self._modules) < 2:
            return RowsMixed()
        draws = self._draws_of(step, whole, where, rows)

        def run(batch: Any, share: Share, both: RowScout | None) -> RowScout:
            number = None if both is None else int(share.start > 0)
            found = RowScout(
                self._modules,
                batch_device(batch, self._module),
                ChainMap(self._dry_caches.setdefault(step, {}), self._caches[step]),
                path=path,
                share=share,
                whole=both,
                draws=None if draws is None else draws.run(number),
            )
            logs = LogCapture(found.logs_early, self._module)
            with (
                restoring(self._module),
                torch.inference_mode(False),
                torch.no_grad(),
                gated(self._module, self._modules, logs.log, logs.log_dict),
                self._table.shown(),
                shapes_only(),
                as_written() if self._compiled else nullcontext(),
            ):
                step_of = partial(call_step, self._module, step[0], cloned(batch), *where)
                result = found.step(step_of)
            found.logged = logs.calls()
            loss = result.get("loss") if isinstance(result, dict) else result
            if isinstance(loss, Tensor) and not isinstance(loss, Hole) and loss.numel() == 1:
                found.loss = float(loss)
            return found

        try:
            runs = scout(run, whole, parts, rows, step=STEP_NAMES[step[0]])
        except FewRowsError:
            raise
        except ModelError:
            return RowsMixed()
        if runs is None:
            return RowsMixed()
        both, some = runs
        shares = [(one.logged, float(number)) for one, number in zip(some, rows, strict=True)]
        narrow = any(parameter.dtype.itemsize < 4 for parameter in self._module.parameters())
        loose = narrow or torch.is_autocast_enabled(batch_device(whole, self._module).type)
        mixed = next((one.mixed for one in some if one.mixed), None)
        parts_of = [float(number) for number in rows]
        number = number_of_rows(both, some, parts_of, loose=loose) if step[0] == "train" else None
        kept = kept_number(both, some, parts_of, path.kept, loose=loose)
        return RowsMixed(mixed, no_means(both.logged, shares, loose=loose), number, kept)

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
            batch = cloned(batch)
        draws = self._run_draws(None)
        run = self._new_run(which, self._last_cut(which), None, inputs, seed, batch, draws)
        groups = self._layouts[which].groups[-1]
        with nullcontext() if seed is None else kept_generators():
            return self._run(run, groups, mode, batch, batch_idx, dataloader_idx)

    def dry_run(self, which: Step, batch: Any, where: Where, *, notes: bool = False) -> DryTrace:
        path = self._path(which, batch, *where)
        device = batch_device(batch, self._module)
        # Outcomes of its own: what stages find out in their first forwards is for them to see.
        cache = ChainMap(self._dry_caches.setdefault(which, {}), self._caches[which])
        run = DryRun(self._modules, device, cache, notes=notes)
        names = any(e.parameters for events in path.events for e in events)
        logs = LogCapture(lambda value: False, self._module)
        with (
            restoring(self._module) if notes else nullcontext(),
            torch.inference_mode(False),  # Shapes are followed by versions, which it does not count
            torch.set_grad_enabled(which[0] == "train"),
            gated(self._module, self._modules, logs.log, logs.log_dict),
            self._table.shown() if names else nullcontext(),
            shapes_only(),
            as_written() if self._compiled else nullcontext(),
        ):
            if path.clones_batch or any(tensor.is_inference() for tensor in tensors(batch)):
                batch = cloned(batch)
            with (
                suppress(StageDone),
                apart(self._module, run.metric),
                self._between_layers(),
                run,
            ):
                try:
                    run.on_return(call_step(self._module, which[0], batch, *where))
                except PipelineError:
                    raise
                except Exception as error:
                    run.trace.failed = error
        return run.trace

    def _row_run(
        self,
        share: Share,
        before: RowRun | None,
        which: Step,
        batch: Any,
        where: Where,
        draws: BatchDraws | None,
    ) -> RowRun:
        run = RowRun(
            self._modules,
            self._paths[which],
            leave=self._last_cut(which),
            share=share,
            before=before,
            step=STEP_NAMES[which[0]],
            modules=self._by_name,
            device=batch_device(batch, self._module),
            cache=self._caches[which],
            draws=None if draws is None else draws.run(None if before is None else 1),
        )
        with restoring(self._module), torch.set_grad_enabled(which[0] == "train"):
            output = self._run(run, (), which[0], cloned(batch), *where)
        run.results = output.tensors
        return run

    def _run_draws(self, microbatch: int | None) -> RunDraws | None:
        return None if self._draws is None else self._draws.run(microbatch)

    def _new_run(
        self,
        which: Step,
        entry: Cut,
        leave: Cut | None,
        inputs: Sequence[Tensor] | Callable[[int, tuple[int, ...]], Tensor],
        seed: int | None,
        batch: Any,
        draws: RunDraws | None,
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
            draws=draws,
            **({} if self._sharding is None else {"whole": self._sharding.values.whole}),
        )

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
        logs = LogCapture(run.on_log, self._module, whole)
        try:
            run.begin()
            gates = gated(self._module, self._modules, logs.log, logs.log_dict)
            shown = self._table.shown() if run.names_parameters else nullcontext()
            written = as_written() if self._compiled else nullcontext()
            with gates, shown, written, self._between_layers(), run.seeding(), run:
                result = call_step(self._module, mode, batch, batch_idx, dataloader_idx)
                result = result if shares is None else rebuild(result, whole)
            run.on_return(result)
        except StageDone:
            return StageOutput(run.outputs(), logs=logs.calls(), groups=groups)
        finally:
            run.close()
        return final_output(result, mode, logs.calls(), self._module)


def _as_it_is(value: Any) -> Any:
    return value


def final_output(
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
            "key 'loss', and multiply it by zero to skip. A loss that is not finite is skipped by "
            "trainer.on_nan=skip."
        )
    if loss.numel() != 1:
        raise ModelError(
            f"training_step of {type(module).__name__} returned a loss of shape "
            f"{list(loss.shape)}; a scalar is needed. Return loss.mean()."
        )
    detached = rebuild(result, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
    return StageOutput(loss=loss, result=detached, logs=logs)
