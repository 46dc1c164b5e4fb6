"""What is run on the links, and what the simulator says to it; knows no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from strategies.compiler import Programs, compile_plan, resolve_shape, schedule_of
from strategies.costs.analytic import AnalyticCosts
from strategies.costs.hardware import Hardware
from strategies.costs.load import Load
from strategies.plan import Overlap, Plan, num_buckets
from strategies.simulator.engine import simulate

_ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Contender:
    """One line of the table.

    Attributes:
        engine: ``ours`` or ``torch`` (its pipeline schedules, with DistributedDataParallel).
        schedule: Our name of it.
        overlap: When our reductions start; torch has one way.
    """

    engine: Literal["ours", "torch"]
    schedule: str
    overlap: Overlap = "grad_reduce"

    @property
    def name(self) -> str:
        """As the table says it."""
        if self.engine == "torch":
            return f"torch {self.schedule} + DDP"
        return f"{self.schedule}, overlap={self.overlap}"


CONTENDERS = (
    Contender("ours", "1f1b", "none"),
    Contender("ours", "1f1b"),
    Contender("ours", "interleaved_1f1b"),
    Contender("ours", "looped_bfs"),
    Contender("ours", "foldx_fifo"),
    Contender("ours", "foldx_aiao"),
    Contender("ours", "foldx"),
    Contender("torch", "1f1b"),
    Contender("torch", "interleaved_1f1b"),
)
FOLD = ("foldx_fifo", "foldx_aiao", "foldx")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Ranks, what they compute, and what they send.

    Attributes:
        name: As the command line and the table say it.
        title: One line about it.
        pp: Pipeline ranks.
        dp: Replicas.
        interfaces: 1 for messages and reductions on one link, 2 for a link each.
        num_microbatches: M.
        forward_s: F per rank and microbatch; B is twice that.
        message_bytes: What a stage hands on per microbatch.
        gradient_bytes: Per rank, or per stage if ``per_stage``.
        per_stage: Whether a rank with two stages has twice as much to reduce.
        bucket_mb: Upper size of a bucket.
        layers: Layers of a rank, which get their gradients one after the other.
        contenders: Who runs.
    """

    name: str
    title: str
    pp: int
    dp: int
    interfaces: int
    num_microbatches: int = 8
    forward_s: float = 0.04
    message_bytes: int = 2**17
    gradient_bytes: int = 8 * 2**20
    per_stage: bool = False
    bucket_mb: float = 2.0
    layers: int = 16
    contenders: tuple[Contender, ...] = CONTENDERS

    @property
    def message_elements(self) -> int:
        """32-bit numbers in a message."""
        return self.message_bytes // _ELEMENT_BYTES

    def layers_per_stage(self, stages_per_rank: int) -> int:
        """Layers of one stage."""
        return self.layers // stages_per_rank

    def layer_elements(self, stages_per_rank: int) -> int:
        """Parameters of one layer."""
        stages = 1 if self.per_stage else stages_per_rank
        layers = self.layers_per_stage(stages_per_rank)
        return self.gradient_bytes // stages // layers // _ELEMENT_BYTES

    def stage_elements(self, stages_per_rank: int) -> int:
        """Parameters of one stage."""
        return self.layer_elements(stages_per_rank) * self.layers_per_stage(stages_per_rank)


@dataclass(frozen=True, slots=True)
class Link:
    """What one interface was measured to carry, per direction, with nothing else on it.

    Attributes:
        bandwidth: Bytes/s.
        latency_s: Of a small message, one way.
    """

    bandwidth: float
    latency_s: float


def stages_per_rank(scenario: Scenario, contender: Contender) -> int:
    """V of the schedule's default."""
    plan = Plan(contender.schedule, pp=scenario.pp, num_microbatches=scenario.num_microbatches)
    return schedule_of(plan).place(resolve_shape(plan)).num_stages // scenario.pp


def costs_of(scenario: Scenario, virtual: int, link: Link) -> AnalyticCosts:
    """The project's own costs of such stages on such links: nothing in them is fitted.

    Args:
        scenario: What is run.
        virtual: V.
        link: As measured.
    """
    machine = Hardware(
        name="measured links",
        peak_flops=1.0,  # a stage's FLOPs are its seconds
        efficiency=1.0,
        memory_gb=math.inf,
        memory_bandwidth=math.inf,
        intra_bandwidth=link.bandwidth,
        intra_latency_s=link.latency_s,
        inter_bandwidth=link.bandwidth,
        inter_latency_s=link.latency_s,
        gpus_per_node=1,
    )
    stage = Load(
        forward_flops=scenario.forward_s / virtual,
        parameters=scenario.stage_elements(virtual),
        output_elements=scenario.message_elements,
        saved_elements=scenario.message_elements,
    )
    return AnalyticCosts(
        stages=(stage,) * (scenario.pp * virtual),
        hardware=machine,
        dp=scenario.dp,
        one_link=scenario.interfaces == 1,
    )


def plan_of(scenario: Scenario, contender: Contender, link: Link) -> Plan:
    """What is compiled; the group of ``foldx`` is chosen with the same costs."""
    virtual = stages_per_rank(scenario, contender)
    stage_bytes = scenario.stage_elements(virtual) * _ELEMENT_BYTES
    return Plan(
        contender.schedule,
        pp=scenario.pp,
        num_microbatches=scenario.num_microbatches,
        overlap=contender.overlap,
        buckets=num_buckets(stage_bytes, scenario.bucket_mb),
        costs=costs_of(scenario, virtual, link),
    )


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says.

    Attributes:
        step_s: One step, all ranks starting together.
        bare_s: The same without reductions.
        group: The N that ``foldx`` took; None for other schedules.
        buckets: Per stage.
    """

    step_s: float
    bare_s: float
    group: int | None
    buckets: int

    @property
    def exposed_s(self) -> float:
        """What reductions add to the step."""
        return self.step_s - self.bare_s

    @property
    def chosen(self) -> str:
        """The group in the words of a table."""
        return "" if self.group is None else f" (auto: group={self.group})"


def predict(scenario: Scenario, contender: Contender, link: Link) -> Prediction:
    """Simulates what a contender runs; for torch's schedules, ours of that name with overlap."""
    plan = plan_of(scenario, contender, link)
    programs: Programs = compile_plan(plan)
    assert plan.costs is not None
    assert isinstance(plan.buckets, int)
    return Prediction(
        step_s=simulate(programs.train, plan.costs).makespan,
        bare_s=simulate(programs.accumulate, plan.costs).makespan,
        group=None if programs.choice is None else programs.choice.group,
        buckets=plan.buckets,
    )


def scenarios() -> dict[str, Scenario]:
    """By name."""
    link = 25e6  # bytes/s at the default rate of 200 Mbit/s
    known = (
        Scenario(
            "one-link", "pp=2 dp=2, messages and reductions on one interface", 2, 2, interfaces=1
        ),
        Scenario("two-links", "pp=2 dp=2, an interface each", 2, 2, interfaces=2),
        Scenario(
            "pp4",
            "pp=4 dp=2, an interface each, every stage's reduction takes 60 ms",
            4,
            2,
            interfaces=2,
            gradient_bytes=int(0.060 * link) // 1024 * 1024,
            per_stage=True,
            bucket_mb=0.75,
            contenders=tuple(c for c in CONTENDERS if c.schedule != "looped_bfs"),
        ),
    )
    return {scenario.name: scenario for scenario in known}
