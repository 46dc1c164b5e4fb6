"""The engines that meet on the links: this runtime, and torch's schedules with DDP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _PipelineSchedule
from torch.nn.parallel import DistributedDataParallel

from benchmarks.emulation import TOKENS, loss_of
from benchmarks.fold_on_links_scenario import (
    Contender,
    Link,
    Scenario,
    plan_of,
    stages_per_rank,
)
from benchmarks.fold_on_links_stage import Emulation, LayeredModel, LayeredStage
from strategies.compiler import compile_plan
from strategies.ir.kinds import MICROBATCH_KINDS, Kind
from strategies.plan import Options
from strategies.runtime.engine.rank_engine import Engine as Runtime
from strategies.runtime.messages.mesh import Coordinates

_TORCH = {
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
}


class Engine(ABC):
    """One contender on one rank.

    Attributes:
        emulation: Of its stages; knows how long F and B have taken.
    """

    emulation: Emulation

    @abstractmethod
    def step(self, *, reduce: bool) -> None:
        """Runs one step; returns when this rank's gradients are what they shall be.

        Args:
            reduce: Whether they are summed over the replicas.
        """

    def outlasting_s(self) -> tuple[float, float] | None:
        """Clock at the last step's last compute, and at its last reduction's end, of this rank."""
        return None

    def close(self) -> None:
        """Ends everything in flight."""
        return None


def build(
    contender: Contender, scenario: Scenario, link: Link, where: Coordinates, groups: Groups
) -> Engine:
    """Makes a contender; collective."""
    if contender.engine == "torch":
        return _Torch(contender, scenario, where, groups)
    return _Ours(contender, scenario, link, where)


class Groups:
    """This rank's pipeline and replicas as torch's engines want them; collective."""

    def __init__(self, where: Coordinates) -> None:
        pipelines = [where.pipeline(replica) for replica in range(where.dp)]
        replicas = [where.replicas((rank,)) for rank in range(where.pp)]
        made = {ranks: dist.new_group(list(ranks)) for ranks in (*pipelines, *replicas)}
        self.pipeline = made[where.pipeline(where.dp_rank)]
        self.replicas = made[where.replicas((where.pp_rank,))]


def _emulation(scenario: Scenario, virtual: int) -> Emulation:
    share = scenario.forward_s / virtual
    return Emulation(share, 2 * share, scenario.message_elements)


class _Ours(Engine):
    """A whole training step but for the optimizer's update."""

    def __init__(
        self, contender: Contender, scenario: Scenario, link: Link, where: Coordinates
    ) -> None:
        virtual = stages_per_rank(scenario, contender)
        plan = plan_of(scenario, contender, link)
        choice = compile_plan(plan).choice
        if choice is not None:
            plan = replace(plan, group=choice.group)
        self.emulation = _emulation(scenario, virtual)
        self._runtime = Runtime(
            model=LayeredModel(
                scenario.pp * virtual,
                self.emulation,
                layers=scenario.layers_per_stage(virtual),
                layer_elements=scenario.layer_elements(virtual),
            ),
            plan=plan,
            options=Options(backend="gloo", on_nan="ignore"),
            coordinates=where,
            device=torch.device("cpu"),
        )
        self._runtime.build_gradients()
        self._batch = torch.zeros(scenario.num_microbatches, TOKENS)
        self._steps = 0

    def step(self, *, reduce: bool) -> None:
        runtime = self._runtime
        runtime.train_pass(
            self._batch, batch_idx=0, step=self._steps, accumulation=1, update=reduce
        )
        if reduce:
            runtime.restore_gradients()
            runtime.flush()
            runtime.stepped()
        self._steps += 1

    def outlasting_s(self) -> tuple[float, float]:
        record = self._runtime.recorder.kept[-1]
        row = record.program.ranks[self._runtime.coordinates.pp_rank]
        spans = list(zip(row, record.end, strict=True))
        computed = max(end for item, end in spans if item.kind in MICROBATCH_KINDS)
        reduced = max(end for item, end in spans if item.kind is Kind.REDUCE)
        return computed, reduced

    def close(self) -> None:
        self._runtime.close()


class _Torch(Engine):
    """Static shapes, no merging of outputs, no scaling: nothing that could be left out."""

    def __init__(
        self, contender: Contender, scenario: Scenario, where: Coordinates, groups: Groups
    ) -> None:
        virtual = stages_per_rank(scenario, contender)
        self._count = scenario.pp * virtual
        owned = [where.pp_rank + chunk * where.pp for chunk in range(virtual)]
        self._has_first, self._has_last = 0 in owned, self._count - 1 in owned
        self.emulation = _emulation(scenario, virtual)
        self._modules = {
            stage: LayeredStage(
                self.emulation,
                layers=scenario.layers_per_stage(virtual),
                layer_elements=scenario.layer_elements(virtual),
            )
            for stage in owned
        }
        wrapped: dict[int, nn.Module] = {
            stage: DistributedDataParallel(
                module,
                process_group=groups.replicas,
                bucket_cap_mb=scenario.bucket_mb,
                broadcast_buffers=False,
            )
            for stage, module in self._modules.items()
        }
        bare: dict[int, nn.Module] = {**self._modules}
        self._schedules = {
            reduce: self._schedule(contender, scenario, groups, modules)
            for reduce, modules in ((True, wrapped), (False, bare))
        }
        self._batch = torch.zeros(scenario.num_microbatches, TOKENS)
        self._target = torch.zeros(scenario.num_microbatches, 1)

    def _schedule(
        self,
        contender: Contender,
        scenario: Scenario,
        groups: Groups,
        modules: dict[int, nn.Module],
    ) -> _PipelineSchedule:
        boundary = torch.zeros(1, scenario.message_elements, requires_grad=True)
        stages = [
            pipelining.PipelineStage(
                module,
                stage,
                self._count,
                torch.device("cpu"),
                input_args=torch.zeros(1, TOKENS) if stage == 0 else boundary,
                output_args=boundary,
                group=groups.pipeline,
            )
            for stage, module in modules.items()
        ]
        made = _TORCH[contender.schedule]
        several = issubclass(made, PipelineScheduleMulti)
        schedule: _PipelineSchedule = made(
            stages if several else stages[0],
            n_microbatches=scenario.num_microbatches,
            loss_fn=loss_of,
            scale_grads=False,
        )
        return schedule

    def step(self, *, reduce: bool) -> None:
        for module in self._modules.values():
            module.zero_grad(set_to_none=False)
        self._schedules[reduce].step(
            *((self._batch,) if self._has_first else ()),
            target=self._target if self._has_last else None,
            losses=[] if self._has_last else None,
            return_outputs=False,
        )
