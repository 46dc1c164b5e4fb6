"""This project's runtime on sleeping stages: engine, executor, mailbox, recorder; no Lightning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.overhead_emulation import TOKENS, Emulation, SleepingStage, loss_of
from benchmarks.overhead_engine import Engine, Task
from strategies.models.stage_model import Mode, StageModel, StageOutput, Unit
from strategies.plan import Options, Plan
from strategies.runtime.engine.rank_engine import Engine as Runtime
from strategies.runtime.engine.rank_setup import resolve_placement
from strategies.runtime.messages.mesh import Coordinates
from strategies.runtime.step.recorder import StepRecord
from strategies.schedules import find_schedule


class SleepingModel(StageModel):
    """One unit per stage."""

    def __init__(self, num_stages: int, emulation: Emulation) -> None:
        self._units = tuple(Unit(f"stages.{stage}", 1.0) for stage in range(num_stages))
        self._emulation = emulation
        self._stages: dict[int, SleepingStage] = {}

    @property
    def module(self) -> nn.Module:
        return nn.ModuleList(self._stages.values())

    @property
    def units(self) -> tuple[Unit, ...]:
        return self._units

    def cut(self, stages: Sequence[range], owned: Sequence[int]) -> None:
        self._stages = {stage: SleepingStage(self._emulation, first=stage == 0) for stage in owned}

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
        at_end: Any = None,
    ) -> StageOutput:
        output = self._stages[stage](*(inputs or (batch,)))
        if stage == len(self._units) - 1:
            return StageOutput(loss=loss_of(output))
        return StageOutput((output,))

    def stage_parameters(self, stage: int) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._stages[stage].named_parameters():
            yield f"stages.{stage}.{name}", parameter

    def shared_parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return ()

    @property
    def parameter_names(self) -> tuple[str, ...]:
        weights = tuple(f"{unit.name}.weight" for unit in self._units)
        return ("stages.0.anchor", *weights)


class Ours(Engine):
    """A whole training step but for the optimizer's update."""

    def __init__(self, task: Task, *, watch_nan: bool = False, clip: str = "") -> None:
        """``clip`` by norm, without a flush: ``waits`` at the update, or asks ``early``."""
        copies = find_schedule(task.schedule).weight_copies
        plan = Plan(
            task.schedule,
            pp=task.ranks,
            num_microbatches=task.num_microbatches,
            # Nothing to reduce at dp=1, unless a stage has weights on two ranks.
            buckets=1 if copies > 1 else 0,
        )
        self._runtime = Runtime(
            model=SleepingModel(resolve_placement(plan).num_stages, task.emulation),
            plan=plan,
            options=Options(backend="shared", on_nan="stop" if watch_nan else "ignore"),
            coordinates=Coordinates(task.ranks, 1, task.rank, 0),
            device=torch.device("cpu"),
        )
        self._runtime.build_gradients()
        self._clips = bool(clip)
        if clip == "early":
            self._runtime.ask_early(1.0)
        self._batch = torch.zeros(task.num_microbatches, TOKENS)
        self._steps = 0
        self._watches = watch_nan
        # What a late verdict may undo; emulated gradients are tiny, so nothing strikes.
        self._optimizer = torch.optim.SGD(self._runtime.updated_parameters(), lr=1e-3)

    def step(self, *, clip: bool = False, late: bool = False) -> None:
        """``late``: the update does not wait for clipping's norm."""
        runtime = self._runtime
        if runtime.stream is not None:
            self._call()
            return
        runtime.train_pass(self._batch, batch_idx=0, step=self._steps, accumulation=1, update=True)
        runtime.restore_gradients()
        runtime.flush()
        if clip and late:
            assert runtime.may_go_on
            runtime.go_on(self._optimizer, limit=1e9, step=self._steps)
        elif clip:
            runtime.clip_by_norm(1.0)
        elif self._watches:
            assert not runtime.leaves_out()
        runtime.stepped()
        self._steps += 1

    def _call(self) -> None:
        """A batch enters, without a flush; the update that is due has its gradients then."""
        runtime = self._runtime
        runtime.stream_pass(self._batch, batch_idx=0, step=self._steps, wait=False)
        self._steps += 1
        runtime.restore_gradients()
        runtime.flush()
        if self._clips:
            runtime.clip_by_norm(1.0)
        runtime.make_room()
        runtime.stepped()

    def last_record(self) -> StepRecord:
        """Stamps of the step that has ended."""
        return self._runtime.recorder.kept[-1]

    def norm_waits(self) -> Sequence[float]:
        """Seconds in the norm's all-reduce, per step with clipping."""
        return tuple(self._runtime.norm_waits_s)

    def close(self) -> None:
        stream = self._runtime.stream
        for program in () if stream is None else stream.drains():
            self._runtime.run_drain(program)
            self._runtime.restore_gradients()
            self._runtime.flush()
            if self._clips:
                self._runtime.clip_by_norm(1.0)
            self._runtime.make_room()
            self._runtime.stepped()
        if stream is not None:
            self._runtime.hear()
        self._runtime.complete()
        self._runtime.close()
