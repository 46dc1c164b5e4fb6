"""What a flush without a barrier is worth: the steady step beside the makespan of one step.

    python -m benchmarks.flush_period [--ranks 4] [--microbatches 8] [--steps 8] [--rounds 3]
        [--realtime] [--guard]

Emulated compute as in ``pipeline_overhead`` (F, I and W of 10 ms per rank and microbatch, 1 MB
activations, 4 gloo ranks). Steps follow each other with nothing between them; makespan: first start
to last end of a step over all ranks, from the recorder; period: steady time from step to step.
With clipping, the norm's all-reduce is the one synchronisation; shown is the wait of the rank that
waits longest. With post-validation (``late``) ranks go on and the norm follows them. ``--guard``
shows what looking for NaN costs instead, alone and with clipping. The settings take turns within a
round; shown are medians over rounds, and the medians of ratios within a round, because a machine
that others use is not equally fast in all of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.emulation import Emulation, Task
from benchmarks.engine import ready, steady
from benchmarks.ranks import rank_pool
from benchmarks.runtime import SleepingOurs
from strategies.compiler import compile_program
from strategies.costs.uniform import UniformCosts
from strategies.simulator.engine import simulate

SCHEDULES = ("1f1b", "zb_h1", "zb_h2", "zb_v", "dualpipe_v")
# The first is the one that the others are compared with.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "free": {},
    "clipping": {"clip": "waits"},
    "late": {"clip": "late"},
}
GUARD: Mapping[str, Mapping[str, Any]] = {
    "free": {},
    "guarded": {"watch_nan": True},
    "clipping": {"clip": "waits"},
    "both": {"watch_nan": True, "clip": "waits"},
}
_WARMUPS = 2


@dataclass(frozen=True, slots=True)
class Steps:
    """Steady steps on one rank.

    Attributes:
        begun: Clock at the first instruction of each step.
        finished: Clock when each step had ended on this rank.
        norm_wait_s: Median wait in the norm's all-reduce; 0 without clipping.
    """

    begun: list[float]
    finished: list[float]
    norm_wait_s: float


def run_steps(*, task: Task, steps: int, setting: Mapping[str, Any]) -> Steps:
    """On a rank, without a barrier between steps."""
    ours, begun = SleepingOurs(task, **setting), []
    with ready(ours):
        finished = steady(
            ours,
            warmups=_WARMUPS,
            steps=steps,
            after=lambda _: begun.append(ours.last_record.begun),
        )
        waits = ours.norm_waits_s()
    return Steps(begun[_WARMUPS:], finished[1:], statistics.median(waits) if waits else 0.0)


@dataclass(frozen=True, slots=True)
class Found:
    """Milliseconds: a step by itself, from step to step, and the longest wait for the norm."""

    makespan: float
    period: float
    wait: float


def bring_together(ranks: list[Steps]) -> Found:
    steps = range(len(ranks[0].begun))
    spans = [max(r.finished[s] for r in ranks) - min(r.begun[s] for r in ranks) for s in steps]
    ends = [rank.finished[-1] - rank.finished[0] for rank in ranks]
    return Found(
        1e3 * statistics.median(spans),
        1e3 * statistics.median(ends) / (len(steps) - 1),
        1e3 * max(rank.norm_wait_s for rank in ranks),
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, metavar="NAME")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forward-ms", type=float, default=10.0)
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument("--guard", action="store_true", help="what looking for NaN costs")
    given = parser.parse_args()
    settings = GUARD if given.guard else SETTINGS
    costs = UniformCosts(given.forward_ms, 2 * given.forward_ms)
    write = sys.stdout.write
    write("schedule    simulated: makespan period | measured: makespan period | ")
    _, *others = settings
    write(
        " | ".join(f"{name}: period, over free, wait for the norm" for name in others) + " (ms)\n"
    )
    with rank_pool(given.ranks, realtime=given.realtime) as ranks:
        for schedule in given.schedules:
            program = compile_program(
                schedule=schedule, pp=given.ranks, num_microbatches=given.microbatches, buckets=0
            )
            each = given.forward_ms / 1e3 / program.placement.stages_per_microbatch
            task = Task(schedule, given.microbatches, Emulation(each, each, each, 2**18))
            rounds = [
                [
                    bring_together(ranks.run(run_steps, task=task, steps=given.steps, setting=each))
                    for each in settings.values()
                ]
                for _ in range(given.rounds)
            ]
            timeline = simulate(program, costs)
            write(f"{schedule:12}{timeline.makespan:19.0f} {timeline.period:6.0f} | ")
            write(f"{_median(rounds, 0, 'makespan'):18.0f} {_median(rounds, 0, 'period'):6.1f}")
            for place in range(1, len(settings)):
                over = statistics.median(r[place].period / r[0].period for r in rounds) - 1
                write(
                    f" | {_median(rounds, place, 'period'):12.1f} {over:+10.1%} "
                    f"{_median(rounds, place, 'wait'):8.1f}"
                )
            write("\n")


def _median(rounds: list[list[Found]], place: int, figure: str) -> float:
    return float(statistics.median(getattr(found[place], figure) for found in rounds))


if __name__ == "__main__":
    main()
