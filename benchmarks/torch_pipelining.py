"""torch.distributed.pipelining as an engine, with its schedules and with ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _PipelineScheduleRuntime

from benchmarks.emulation import TOKENS, SleepingStage, Task, loss_of
from benchmarks.engine import Engine
from benchmarks.runtime import MakeOptimizer
from strategies.compiler import compile_program
from strategies.ir.program import Program
from strategies.plan import Plan
from strategies.referee import notation
from strategies.schedules import find_schedule

# What both have, by our names.
SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved_zb": pipelining.ScheduleInterleavedZeroBubble,
    "zb_v": pipelining.ScheduleZBVZeroBubble,
}


class TorchPipeline(Engine):
    """No merging of outputs, and static shapes where they are given: all is left out that can be.

    Args:
        schedule: One of ``SCHEDULES``.
        modules: This rank's stages by number.
        num_stages: Of all ranks.
        num_microbatches: M.
        batch: What the first stage takes.
        target: What the last stage's loss takes.
        loss: Of an output and its target.
        optimizer: For a step's update.
        shapes: A microbatch, and what stages hand on, as examples; else the first step finds them.
        group: The ranks of this pipeline.
        set_to_none: Whether gradients go at the beginning of a step, or become 0.
        options: Of the schedule.
    """

    def __init__(
        self,
        schedule: str,
        modules: Mapping[int, nn.Module],
        *,
        num_stages: int,
        num_microbatches: int,
        batch: Tensor,
        target: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: MakeOptimizer | None = None,
        shapes: tuple[Tensor, Tensor] | None = None,
        group: dist.ProcessGroup | None = None,
        set_to_none: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._name, self._modules, self._num_stages = schedule, modules, num_stages
        self._target = target if num_stages - 1 in modules else None
        self._inputs = (batch,) if 0 in modules else ()
        self._options = {"n_microbatches": num_microbatches, "loss_fn": loss, **(options or {})}
        self._make_optimizer, self._shapes, self._group = optimizer, shapes, group
        self._set_to_none = set_to_none

    def setup(self) -> None:
        stages = []
        for number, module in self._modules.items():
            given: dict[str, Any] = {"group": self._group}
            if self._shapes is not None:
                first, boundary = self._shapes
                given |= {"input_args": boundary if number else first, "output_args": boundary}
            device = torch.device("cpu")
            stages.append(
                pipelining.PipelineStage(module, number, self._num_stages, device, **given)
            )
        self._schedule = self._scheduled(stages)
        parameters = [p for module in self._modules.values() for p in module.parameters()]
        make = self._make_optimizer
        self._optimizer = None if make is None else make(parameters)

    def _scheduled(self, stages: list[pipelining.PipelineStage]) -> Any:
        made: Any = SCHEDULES[self._name]
        several = issubclass(made, PipelineScheduleMulti)
        return made(stages if several else stages[0], **self._options)

    def step(self) -> None:
        for module in self._modules.values():
            module.zero_grad(set_to_none=self._set_to_none)
        self._schedule.step(
            *self._inputs,
            target=self._target,
            losses=None if self._target is None else [],
            return_outputs=False,
        )
        if self._optimizer is not None:
            self._optimizer.step()

    @property
    def order(self) -> str | None:
        """The compute order as CSV, where the schedule has one."""
        if not isinstance(self._schedule, PipelineScheduleMulti):
            return None
        rows = self._schedule.pipeline_order
        return "".join(
            ",".join("" if action is None else str(action) for action in rows[rank]) + "\n"
            for rank in sorted(rows)
        )


class SleepingTorch(TorchPipeline):
    """On sleeping stages."""

    def __init__(self, task: Task) -> None:
        found = find_schedule(task.schedule)
        shape = found.resolve(Plan(found.name, task.ranks, task.num_microbatches))
        placement, emulation = found.place(shape), task.emulation
        self._task = task
        super().__init__(
            task.schedule,
            {
                stage: SleepingStage(emulation, first=stage == 0)
                for stage in placement.stages_of(dist.get_rank())
            },
            num_stages=placement.num_stages,
            num_microbatches=task.num_microbatches,
            batch=task.batch,
            target=torch.zeros(task.num_microbatches, 1),
            loss=loss_of,
            shapes=(
                torch.zeros(1, TOKENS),
                torch.zeros(1, emulation.elements, requires_grad=True),
            ),
        )


class TorchOurs(SleepingTorch):
    """torch's pipeline runtime on our lowered program: our order, our places of messages."""

    def _scheduled(self, stages: list[pipelining.PipelineStage]) -> Any:
        made: Any = _PipelineScheduleRuntime
        runtime = made(stages, **self._options)
        with TemporaryDirectory() as folder:
            file = Path(folder) / "order.csv"
            file.write_text(notation(self._program))
            runtime._load_csv(str(file), format="compute_comms")
        return runtime

    @property
    def _program(self) -> Program:
        task = self._task
        return compile_program(
            schedule=task.schedule, pp=task.ranks, num_microbatches=task.num_microbatches, buckets=0
        )

    @property
    def order(self) -> str:
        return notation(self._program.with_ranks(self._program.compute_rows()))


def runs_ours(schedule: str, *, pp: int, num_microbatches: int) -> bool:
    """Whether torch's runtime takes our order: every stage on one rank, a flush at the end."""
    found = find_schedule(schedule)
    shape = found.resolve(Plan(found.name, pp, num_microbatches))
    return found.place(shape).weight_copies == 1 and found.synchronous
