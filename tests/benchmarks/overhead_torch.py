"""torch.distributed.pipelining on the same sleeping stages."""

from __future__ import annotations

import torch
import torch.distributed.pipelining as pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from strategies.schedules import find_schedule
from tests.benchmarks.overhead_emulation import TOKENS, SleepingStage, loss_of
from tests.benchmarks.overhead_engine import Engine, Task

# What both have, by our names.
SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved_zb": pipelining.ScheduleInterleavedZeroBubble,
    "zb_v": pipelining.ScheduleZBVZeroBubble,
}


class Torch(Engine):
    """Static shapes, no merging of outputs: nothing that could be left out."""

    def __init__(self, task: Task) -> None:
        resolved = find_schedule(task.schedule).resolve(
            pp=task.ranks,
            num_microbatches=task.num_microbatches,
            stages_per_rank=None,
            group=None,
        )
        placement = find_schedule(task.schedule).place(resolved)
        owned = placement.stages_of(task.rank)
        self._last = placement.num_stages - 1
        self._has_first, self._has_last = 0 in owned, self._last in owned
        self._stages = []
        boundary = torch.zeros(1, task.emulation.elements, requires_grad=True)
        for stage in owned:
            data = torch.zeros(1, TOKENS) if stage == 0 else boundary
            self._stages.append(
                pipelining.PipelineStage(
                    SleepingStage(task.emulation, first=stage == 0),
                    stage,
                    placement.num_stages,
                    torch.device("cpu"),
                    input_args=data,
                    output_args=boundary,
                )
            )
        made = SCHEDULES[task.schedule]
        several = issubclass(made, PipelineScheduleMulti)
        self._schedule = made(
            self._stages if several else self._stages[0],
            n_microbatches=task.num_microbatches,
            loss_fn=loss_of,
        )
        self._batch = torch.zeros(task.num_microbatches, TOKENS)
        self._target = torch.zeros(task.num_microbatches, 1)

    def step(self) -> None:
        for stage in self._stages:
            stage.submod.zero_grad()
        self._schedule.step(
            *((self._batch,) if self._has_first else ()),
            target=self._target if self._has_last else None,
            losses=[] if self._has_last else None,
            return_outputs=False,
        )

    def order(self) -> str | None:
        if not isinstance(self._schedule, PipelineScheduleMulti):
            return None
        rows = self._schedule.pipeline_order
        return "".join(
            ",".join("" if action is None else str(action) for action in rows[rank]) + "\n"
            for rank in sorted(rows)
        )
