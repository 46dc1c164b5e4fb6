"""This project's runtime as an engine: executor, messages and recorder, without Lightning."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.emulation import Task, sleeping_model
from benchmarks.engine import Engine
from strategies.models.stage_model import StageModel
from strategies.plan import Options, Plan
from strategies.runtime.engine.rank_engine import Engine as RankEngine
from strategies.runtime.engine.rank_setup import resolve_placement
from strategies.runtime.messages.mesh import Coordinates
from strategies.runtime.step.recorder import StepRecord
from strategies.schedules import find_schedule

OPTIONS = Options(backend="shared", on_nan="ignore")
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Ours(Engine):
    """A whole training step; its update only where an optimizer is made.

    Attributes:
        rank_engine: Once it is set up.
    """

    def __init__(
        self,
        model: StageModel,
        plan: Plan,
        batch: Any,
        *,
        options: Options = OPTIONS,
        where: Coordinates | None = None,
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        self._model, self._plan, self._batch, self._options = model, plan, batch, options
        self._where = where or Coordinates(plan.pp, 1, dist.get_rank() if plan.pp > 1 else 0, 0)
        self._make_optimizer = optimizer
        self._steps = 0

    def setup(self) -> None:
        self.rank_engine = RankEngine(
            model=self._model,
            plan=self._plan,
            options=self._options,
            coordinates=self._where,
            device=torch.device("cpu"),
        )
        self.rank_engine.build_gradients()
        make = self._make_optimizer
        self.optimizer = None if make is None else make(self.rank_engine.updated_parameters())

    def step(self) -> None:
        self._compute(update=True)
        if self.optimizer is not None:
            self.optimizer.step()
        self.rank_engine.stepped()

    def _compute(self, *, update: bool) -> None:
        """Everything up to the gradients, which are reduced only before an update."""
        engine = self.rank_engine
        engine.train_pass(self._batch, batch_idx=0, step=self._steps, accumulation=1, update=update)
        self._steps += 1
        if update:
            engine.restore_gradients()
            engine.flush()

    def close(self) -> None:
        self.rank_engine.close()

    @property
    def last_record(self) -> StepRecord:
        """Stamps of the step that has ended."""
        return self.rank_engine.recorder.kept[-1]

    def busy_s(self, steps: int) -> float:
        """Compute of this rank in a step; the median of the last ones."""
        recorder = self.rank_engine.recorder
        return statistics.median(recorder.spans(r).busy for r in list(recorder.kept)[-steps:])


class SleepingOurs(Ours):
    """On sleeping stages, without an optimizer's update.

    Args:
        task: What it runs.
        watch_nan: Look for NaN before each update.
        clip: By norm: ranks agree on it at the update (``waits``) or, without a flush, before it
            (``early``); or the update does not wait for it (``late``).
    """

    def __init__(
        self,
        task: Task,
        *,
        watch_nan: bool = False,
        clip: Literal["", "waits", "early", "late"] = "",
    ) -> None:
        copies = find_schedule(task.schedule).weight_copies
        plan = Plan(
            task.schedule,
            pp=task.ranks,
            num_microbatches=task.num_microbatches,
            # Nothing to reduce at dp=1, unless a stage has weights on two ranks.
            buckets=1 if copies > 1 else 0,
        )
        super().__init__(
            sleeping_model(resolve_placement(plan).num_stages, task.emulation),
            plan,
            task.batch,
            options=Options(backend="shared", on_nan="stop" if watch_nan else "ignore"),
        )
        self._watches, self._clip = watch_nan, clip

    def setup(self) -> None:
        super().setup()
        if self._clip == "early":
            self.rank_engine.ask_early(1.0)
        # What a late verdict may undo; emulated gradients are tiny, so nothing strikes.
        self._late = torch.optim.SGD(self.rank_engine.updated_parameters(), lr=1e-3)

    def step(self) -> None:
        engine = self.rank_engine
        if engine.stream is not None:
            # A batch enters, without a flush; the update that is due has its gradients then.
            engine.stream_pass(self._batch, batch_idx=0, step=self._steps, wait=False)
            self._steps += 1
            self._update()
            return
        self._compute(update=True)
        if self._clip == "late":
            assert engine.may_go_on
            engine.go_on(self._late, limit=1e9, step=self._steps - 1)
        elif self._clip:
            engine.clip_by_norm(1.0)
        elif self._watches:
            assert not engine.leaves_out()
        engine.stepped()

    def _update(self) -> None:
        engine = self.rank_engine
        engine.restore_gradients()
        engine.flush()
        if self._clip:
            engine.clip_by_norm(1.0)
        engine.make_room()
        engine.stepped()

    def norm_waits_s(self) -> Sequence[float]:
        """Seconds in the norm's all-reduce, per step with clipping."""
        return tuple(self.rank_engine.norm_waits_s)

    def close(self) -> None:
        engine = self.rank_engine
        if engine.stream is not None:
            for program in engine.stream.drains():
                engine.run_drain(program)
                self._update()
            engine.hear()
        engine.complete()
        super().close()
