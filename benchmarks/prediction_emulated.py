"""The emulated part of ``prediction``: sleeping stages in this project's runtime, 4 ranks.

A sleep ends late, and autograd takes its time beside it. So a stage's instructions are measured
first, as ``mode=profile`` measures layers: by themselves, without messages, on all ranks at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from benchmarks.emulation import TOKENS, Emulation, sleeping_model
from benchmarks.engine import in_turns, ready
from benchmarks.ranks import busy_link, rank_pool
from benchmarks.runtime import Ours
from strategies.compiler import compile_plan
from strategies.costs.profile_file import Link
from strategies.costs.table import CostTable
from strategies.costs.uniform import UniformCosts
from strategies.ir.kinds import Kind
from strategies.ir.program import Program
from strategies.plan import Options, Plan, Recompute
from strategies.simulator.engine import simulate

FORWARD_S = 16e-3  # of one sequence on one rank; B is twice as long
ELEMENTS = 2**18
_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class EmulatedCosts:
    """What sleeping stages take, and a link, both as they were measured.

    Attributes:
        stage_s: The seconds of one stage, by kind of instruction; STEP is what a rank's pass
            takes beside its instructions.
        link: Between any two ranks.
    """

    stage_s: tuple[tuple[Kind, float], ...]
    link: Link

    def table(self, program: Program) -> CostTable:
        count = len(program.boundaries)
        stages = program.placement.num_stages
        seconds = dict(self.stage_s)
        return replace(
            UniformCosts().table(program),
            forward=(seconds[Kind.F],) * stages,
            backward=(seconds[Kind.B],) * stages,
            backward_input=(seconds[Kind.I],) * stages,
            backward_weight=(seconds[Kind.W],) * stages,
            recompute=(seconds[Kind.R],) * stages,
            step=tuple(
                seconds[Kind.STEP]
                / max(len(program.placement.stages_of(owner)) for owner in owners)
                for owners in map(program.placement.owners, range(stages))
            ),
            time_unit="s",
            latency=(self.link.latency_s,) * count,
            occupancy=(ELEMENTS * 4 / self.link.bandwidth,) * count,
        )


def cases(*, quick: bool) -> Iterator[tuple[str, str, int, int]]:
    """(schedule, recompute, microbatches, microbatch size)."""
    unsplit = ("gpipe", "1f1b", "interleaved_1f1b", "foldx_fifo")
    if quick:
        yield from (("1f1b", "none", 4, 1), ("1f1b", "full", 4, 1), ("zb_v", "none", 4, 1))
        return
    for count, size in ((8, 1), (12, 1), (8, 2)):
        for schedule in unsplit:
            for recompute in ("none", "full", "mario"):
                yield schedule, recompute, count, size
        for schedule in ("eager_1f1b", "zb_h1", "zb_v", "chimera"):
            yield schedule, "none", count, size


def measure(
    *, steps: int, quick: bool, num_ranks: int
) -> Iterator[tuple[str, float, float, float, float]]:
    """(name, predicted, measured step time, predicted, measured compute) of all cases."""
    with rank_pool(num_ranks) as ranks:
        link = ranks.run(busy_link)[0]
        known: dict[float, dict[Kind, float]] = {}
        for schedule, recompute, count, size in cases(quick=quick):
            each = FORWARD_S * size / stages_per_microbatch(schedule, num_ranks)
            emulation = Emulation(each, each, each, ELEMENTS)
            if each not in known:
                found = ranks.run(stage_durations, emulation=emulation, steps=steps)
                known[each] = {kind: statistics.median(f[kind] for f in found) for kind in found[0]}
            costs = EmulatedCosts(tuple(known[each].items()), link)
            plan = Plan(
                schedule,
                pp=num_ranks,
                num_microbatches=count,
                buckets=0,
                costs=costs,
                recompute=Recompute(recompute),  # type: ignore[arg-type]
            )
            program = compile_plan(plan).train
            if program.placement.weight_copies > 1:
                plan = replace(plan, buckets=1)
                program = compile_plan(plan).train
            found = ranks.run(run_steps, plan=plan, emulation=emulation, steps=steps)
            spans = [
                max(end for _, end in step) - min(begin for begin, _ in step)
                for step in zip(*(steps for steps, _ in found), strict=True)
            ]
            timeline = simulate(program, costs)
            yield (
                f"{schedule}, {recompute}, {count} x {size}",
                timeline.makespan,
                statistics.median(spans),
                sum(map(timeline.busy, range(num_ranks))),
                sum(busy for _, busy in found),
            )


def stages_per_microbatch(schedule: str, num_ranks: int) -> float:
    """How many stages of one rank a microbatch crosses."""
    return compile_plan(
        Plan(schedule, pp=num_ranks, num_microbatches=2 * num_ranks)
    ).train.placement.stages_per_microbatch


def stage_durations(*, emulation: Emulation, steps: int) -> dict[Kind, float]:
    """Seconds of each kind of instruction of the middle one of three stages, all on this rank."""
    durations: dict[Kind, list[float]] = {}
    for split, recompute in ((False, "full"), (True, "none")):
        plan = Plan(
            "interleaved_1f1b",
            pp=1,
            num_microbatches=2,
            stages_per_rank=3,
            buckets=0,
            split_backward=split,
            recompute=Recompute(recompute),  # type: ignore[arg-type]
        )
        ours = _ours(plan, emulation)
        ours.setup()
        for step in range(_WARM_UPS + steps):
            begun = time.perf_counter()
            ours.step()
            took = time.perf_counter() - begun
            if step >= _WARM_UPS:
                durations.setdefault(Kind.STEP, []).append(took - ours.busy_s(1))
        recorder = ours.rank_engine.recorder
        for record in list(recorder.kept)[_WARM_UPS:]:
            start, end = recorder.seconds(record)
            for item, begun, ended in zip(record.program.ranks[0], start, end, strict=True):
                # A checkpointed forward keeps no graph; F is that of the split plan.
                if item.stage == 1 and not (item.kind is Kind.F and not split):
                    durations.setdefault(item.kind, []).append(ended - begun)
        ours.close()
    return {kind: statistics.median(taken) for kind, taken in durations.items()}


def run_steps(
    *, plan: Plan, emulation: Emulation, steps: int
) -> tuple[list[tuple[float, float]], float]:
    """(begin and end of each step on this rank, its compute); all ranks begin together."""
    ours = _ours(plan, emulation)

    def once(_: str) -> tuple[float, float]:
        dist.barrier()
        begun = time.perf_counter()
        ours.step()
        return begun, time.perf_counter()

    with ready(ours):
        spans = in_turns({"": ours}, once, warmups=_WARM_UPS, repetitions=steps)[""]
        busy = ours.busy_s(steps)
    return spans, busy


def _ours(plan: Plan, emulation: Emulation) -> Ours:
    stages = compile_plan(plan).train.placement.num_stages
    return Ours(
        sleeping_model(stages, emulation),
        plan,
        torch.zeros(plan.num_microbatches, TOKENS),
        options=Options(backend="shared", check_batches=False, on_nan="ignore"),
    )
