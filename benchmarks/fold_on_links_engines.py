"""The engines that meet on the links: this runtime, and torch's schedules with DDP."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.emulation import TOKENS, EmulatedModel, Emulation, LayeredStage, loss_of
from benchmarks.engine import Engine
from benchmarks.fold_on_links_scenario import (
    Contender,
    Link,
    Scenario,
    plan_of,
    stages_per_rank,
)
from benchmarks.runtime import Ours
from benchmarks.torch_pipelining import TorchPipeline
from strategies.compiler import compile_plan
from strategies.ir.kinds import MICROBATCH_KINDS, Kind
from strategies.plan import Options
from strategies.runtime.messages.mesh import Coordinates


class LinkEngine(Engine, Protocol):
    """A step ends when this rank's gradients are what they shall be.

    Attributes:
        emulation: Of its stages; knows how long F and B have taken.
        reduces: Whether the next step sums gradients over the replicas.
    """

    emulation: Emulation
    reduces: bool

    def outlasting_s(self) -> tuple[float, float] | None:
        """Clock at the last step's last compute, and at its last reduction's end, of this rank."""
        return None


class Groups:
    """This rank's pipeline and replicas as torch's engines want them; collective."""

    def __init__(self, where: Coordinates) -> None:
        pipelines = [where.pipeline(replica) for replica in range(where.dp)]
        replicas = [where.replicas((rank,)) for rank in range(where.pp)]
        made = {ranks: dist.new_group(list(ranks)) for ranks in (*pipelines, *replicas)}
        self.pipeline = made[where.pipeline(where.dp_rank)]
        self.replicas = made[where.replicas((where.pp_rank,))]


def build(
    contender: Contender, scenario: Scenario, link: Link, where: Coordinates, groups: Groups
) -> LinkEngine:
    if contender.engine == "torch":
        return _Torch(contender, scenario, where, groups)
    return _Ours(contender, scenario, link, where)


def _emulation(scenario: Scenario, virtual: int) -> Emulation:
    share = scenario.forward_s / virtual
    return Emulation(share, share, share, scenario.message_elements)


def _stage(scenario: Scenario, virtual: int, emulation: Emulation) -> LayeredStage:
    return LayeredStage(
        emulation,
        layers=scenario.layers_per_stage(virtual),
        layer_elements=scenario.layer_elements(virtual),
    )


def _batch(scenario: Scenario) -> Tensor:
    return torch.zeros(scenario.num_microbatches, TOKENS)


class _Ours(Ours, LinkEngine):
    """A whole training step but for the optimizer's update."""

    def __init__(
        self, contender: Contender, scenario: Scenario, link: Link, where: Coordinates
    ) -> None:
        virtual = stages_per_rank(scenario, contender)
        plan = plan_of(scenario, contender, link)
        choice = compile_plan(plan).choice
        if choice is not None:
            plan = replace(plan, group=choice.group)
        self.emulation, self.reduces = _emulation(scenario, virtual), True
        model = EmulatedModel(
            scenario.pp * virtual, lambda _: _stage(scenario, virtual, self.emulation)
        )
        options = Options(backend="gloo", on_nan="ignore")
        super().__init__(model, plan, _batch(scenario), options=options, where=where)

    def step(self) -> None:
        self._compute(update=self.reduces)
        if self.reduces:
            self.rank_engine.stepped()

    def outlasting_s(self) -> tuple[float, float]:
        record = self.last_record
        row = record.program.ranks[self.rank_engine.coordinates.pp_rank]
        spans = list(zip(row, record.end, strict=True))
        computed = max(end for item, end in spans if item.kind in MICROBATCH_KINDS)
        reduced = max(end for item, end in spans if item.kind is Kind.REDUCE)
        return computed, reduced


class _Torch(LinkEngine):
    """torch's schedule on the same stages, with and without DDP around them; nothing is scaled."""

    def __init__(
        self, contender: Contender, scenario: Scenario, where: Coordinates, groups: Groups
    ) -> None:
        self._contender, self._scenario, self._groups = contender, scenario, groups
        self._virtual = stages_per_rank(scenario, contender)
        self.emulation, self.reduces = _emulation(scenario, self._virtual), True
        self._modules: dict[int, nn.Module] = {
            where.pp_rank + chunk * where.pp: _stage(scenario, self._virtual, self.emulation)
            for chunk in range(self._virtual)
        }

    def setup(self) -> None:
        wrapped: dict[int, nn.Module] = {
            stage: DistributedDataParallel(
                module,
                process_group=self._groups.replicas,
                bucket_cap_mb=self._scenario.bucket_mb,
                broadcast_buffers=False,
            )
            for stage, module in self._modules.items()
        }
        self._pipelines = {True: self._pipeline(wrapped), False: self._pipeline(self._modules)}

    def _pipeline(self, modules: dict[int, nn.Module]) -> TorchPipeline:
        scenario = self._scenario
        boundary = torch.zeros(1, scenario.message_elements, requires_grad=True)
        pipeline = TorchPipeline(
            self._contender.schedule,
            modules,
            num_stages=scenario.pp * self._virtual,
            num_microbatches=scenario.num_microbatches,
            batch=_batch(scenario),
            target=torch.zeros(scenario.num_microbatches, 1),
            loss=loss_of,
            shapes=(torch.zeros(1, TOKENS), boundary),
            group=self._groups.pipeline,
            set_to_none=False,
            options={"scale_grads": False},
        )
        pipeline.setup()
        return pipeline

    def step(self) -> None:
        self._pipelines[self.reduces].step()
