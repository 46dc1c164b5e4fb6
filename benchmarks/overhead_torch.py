"""torch.distributed.pipelining on the same sleeping stages, with its schedules and with ours."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed.pipelining as pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _PipelineScheduleRuntime

from benchmarks.overhead_emulation import TOKENS, SleepingStage, loss_of
from benchmarks.overhead_engine import Engine, Task
from strategies.compiler import compile_program
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
        self._schedule = self._made(task)
        self._batch = torch.zeros(task.num_microbatches, TOKENS)
        self._target = torch.zeros(task.num_microbatches, 1)

    def _made(self, task: Task) -> Any:
        made = SCHEDULES[task.schedule]
        several = issubclass(made, PipelineScheduleMulti)
        return made(
            self._stages if several else self._stages[0],
            n_microbatches=task.num_microbatches,
            loss_fn=loss_of,
        )

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


class TorchOurs(Torch):
    """torch's pipeline runtime on our lowered program: our order, our places of messages."""

    def _made(self, task: Task) -> Any:
        program = compile_program(
            schedule=task.schedule, pp=task.ranks, num_microbatches=task.num_microbatches, buckets=0
        )
        bare = program.with_ranks(program.compute_rows())
        self._order = notation(bare)
        made: Any = _PipelineScheduleRuntime
        runtime = made(self._stages, n_microbatches=task.num_microbatches, loss_fn=loss_of)
        with TemporaryDirectory() as folder:
            file = Path(folder) / "order.csv"
            file.write_text(notation(program))
            runtime._load_csv(str(file), format="compute_comms")
        return runtime

    def order(self) -> str:
        return self._order


def runs_ours(schedule: str, *, pp: int, num_microbatches: int) -> bool:
    """Whether torch's runtime takes our order: every stage on one rank, a flush at the end."""
    found = find_schedule(schedule)
    shape = found.resolve(
        pp=pp, num_microbatches=num_microbatches, stages_per_rank=None, group=None
    )
    return found.place(shape).weight_copies == 1 and found.synchronous
