"""``ReplayModel``: an ordinary LightningModule, cut into stages without touching its code."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from strategies.errors import PipelineError
from strategies.models.collectives import shapes_only
from strategies.models.logs import LogCapture, apart
from strategies.models.nested import cloned, join_parts, rebuild, structure, tensors
from strategies.models.recording.execution import Execution
from strategies.models.recording.recording import Recording
from strategies.models.recording.step_recorder import RecordedLogs, Recorder
from strategies.models.replay.cut_module import CutModule
from strategies.models.replay.gate import StageDone, as_written, call_step, gated
from strategies.models.replay.hole import Hole
from strategies.models.replay.inference import Outcome
from strategies.models.replay.path import Cut, Path
from strategies.models.replay.probing import Probed, batch_device
from strategies.models.replay.rows.batch_rows import RowRun, Rows, Share, find_rows, join
from strategies.models.replay.rows.draws import BatchDraws, RunDraws
from strategies.models.replay.rows.row_scout import RowScout, mixed_rows
from strategies.models.replay.stage_run import StageRun, dense, final_output
from strategies.models.replay.step_paths import Where
from strategies.models.snapshot import restoring
from strategies.models.stage_model import STEP_NAMES, LogCall, Mode, RowsMixed, StageOutput, Step
from strategies.models.state import Generators, kept_generators


class ReplayModel(CutModule):
    """Runs stages of a LightningModule by its recorded steps; build it with ``probe``.

    The user's step runs once per microbatch, on placeholders, for ``record``; a stage executes its
    entries. Behind the last layer the step runs once more, with that layer's values in it.
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
        last = None
        if leave is None and recording is not None:
            last = self._end_of_layers(which)
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
        ends = [self._layouts[which].cuts[stage][1] for stage in self._owned]
        until = max(end.position for end in ends if end) if all(ends) else None
        run = self._recorder(which, path, batch, self._run_draws(microbatch), until=until)
        self._record(run, which, batch, (batch_idx, dataloader_idx))
        return run.recording()

    def record_freely(
        self,
        which: Step,
        batch: Any,
        where: Where,
        *,
        microbatch: int | None = None,
        copies: bool = False,
    ) -> Recorder:
        path = self._path(which, batch, *where)
        draws = None if microbatch is None else self._run_draws(microbatch)
        # Outcomes of its own: what stages find out in their first forwards is for them to see.
        cache = ChainMap(self._dry_caches.setdefault(which, {}), self._caches[which])
        with (
            torch.inference_mode(False),  # Shapes are followed by versions, which it does not count
            torch.set_grad_enabled(which[0] == "train"),
        ):
            if path.clones_batch or any(tensor.is_inference() for tensor in tensors(batch)):
                batch = cloned(batch)
            run = self._recorder(which, path, batch, draws, free=True, copies=copies, cache=cache)
            with apart(self._module, run.metric):
                try:
                    self._record(run, which, batch, where)
                except PipelineError:
                    raise
                except Exception:
                    run.failed = True
        return run

    def _recorder(
        self, which: Step, path: Path, batch: Any, draws: RunDraws | None, **others: Any
    ) -> Recorder:
        return Recorder(
            self._modules,
            path,
            step=STEP_NAMES[which[0]],
            modules=self._by_name,
            device=batch_device(batch, self._module),
            draws=draws,
            **{"cache": self._caches[which], **others},
        )

    def _record(self, run: Recorder, which: Step, batch: Any, where: Where) -> None:
        logs = RecordedLogs(run, self._module)
        try:
            run.begin()
            gates = gated(self._module, self._modules, logs.log, logs.log_dict)
            shown = self._table.shown() if run.names_parameters else nullcontext()
            written = as_written() if self._compiled else nullcontext()
            with gates, shown, written, self._between_layers(), run.seeding(), run:
                run.on_return(call_step(self._module, which[0], batch, *where))
        except StageDone:
            pass
        finally:
            run.close()

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
        shares = None if self._sharding is None else self._sharding.values
        run = Execution(
            self._paths[which],
            seed,
            STEP_NAMES[which[0]],
            self._selective,
            copies=self._careful.get((which, stage), True),
            whole=_as_it_is if shares is None else shares.whole_of,
        )
        with self._between_layers():
            values = run.between(recording, inputs, begin, end)
        if (which, stage) not in self._careful:
            self._careful[which, stage] = run.changed_its_copies
        return values, tuple(run.logs)

    def _end_of_layers(self, which: Step) -> Cut | None:
        """Where Python runs for real from on; None where all of the last stage has to.

        There what the last layer gives stays cut over ranks, or is not all that Python goes on
        with (an activation checkpoint around the last layer and the loss).
        """
        if isinstance(self._paths[which].cuts[-1], str) or self._sharding is not None:
            return None
        return self._last_cut(which)

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

        narrow = any(parameter.dtype.itemsize < 4 for parameter in self._module.parameters())
        loose = narrow or torch.is_autocast_enabled(batch_device(whole, self._module).type)
        return mixed_rows(run, whole, parts, rows, mode=step[0], stays=path.kept, loose=loose)

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
