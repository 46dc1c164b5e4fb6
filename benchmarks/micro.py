"""What single parts cost, one command each: ``python -m benchmarks.micro NAME [--OPTION VALUE]``.

``--help`` lists the names, ``NAME --help`` the options. All print medians, and assert nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from strategies import UniformCosts, compile_program, simulate
from strategies.compiler import compile_compute, compile_plan
from strategies.heartbeat import PAGE, STATE, WAITING, Heartbeat, new_page
from strategies.ir.kinds import MESSAGE_KINDS
from strategies.lowering.send_recv import add_messages, order_for_rendezvous
from strategies.passes.recompute.add_recompute import add_recompute
from strategies.passes.recompute.optimal import recompute_within
from strategies.plan import Plan, Recompute
from strategies.planner.step_time import build_order_graph, compute_program, step_time
from strategies.schedules import SCHEDULES
from strategies.simulator.engine import replay

COSTS = UniformCosts(grad_reduce=4, p2p=0.1)
SHAPES = ((4, 8), (4, 16), (8, 16))


def each_s(
    call: Callable[[], object], repetitions: int, clock: Callable[[], float] = time.process_time
) -> list[float]:
    """Seconds of every call; CPU seconds unless the clock is another one."""
    samples = []
    for _ in range(repetitions):
        begun = clock()
        call()
        samples.append(clock() - begun)
    return samples


def median_ms(call: Callable[[], object], repetitions: int) -> float:
    return 1e3 * statistics.median(each_s(call, repetitions))


def simulator(*, ranks: int, microbatches: int, repetitions: int) -> None:
    """One simulation of 1F1B, and what faster clocks gain.

    The program is compiled once, as in a search that replays it against many cost tables. The other
    lines justify the copies of the simulator's model that searches have: each is timed beside the
    general way to the same figure.
    """
    size = f"pp={ranks} num_microbatches={microbatches}"
    begun = time.process_time()
    program = compile_program(schedule="1f1b", pp=ranks, num_microbatches=microbatches)
    compiled_ms = 1e3 * (time.process_time() - begun)
    took = median_ms(lambda: simulate(program, COSTS), repetitions)
    sys.stdout.write(
        f"1f1b {size}: {sum(map(len, program.ranks))} instructions, compiled in "
        f"{compiled_ms:.0f} ms, simulate() {took:.2f} ms (median of {repetitions})\n"
    )
    quick, whole = _step_time(ranks, microbatches)
    sys.stdout.write(
        f"step_time, 1f1b {size}: {median_ms(quick, repetitions):.2f} ms instead of "
        f"{median_ms(whole, repetitions):.2f}\n"
    )


def _step_time(ranks: int, microbatches: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """A new plan's step time: of its order, or of its verified program."""
    plan = Plan("1f1b", ranks, microbatches, costs=COSTS, buckets=1)

    def quick() -> None:
        structure = build_order_graph(compute_program(plan))
        table = replace(COSTS.table(structure.draft), reduce=((4.0 / ranks,),) * ranks)
        step_time(structure, table, overlap=True)

    def whole() -> None:
        compile_plan.cache_clear()
        simulate(compile_plan(plan).train, COSTS)

    return quick, whole


def passes(*, ranks: int, microbatches: int, repetitions: int) -> None:
    """Recomputation passes on long programs, and simulating what they made.

    ``mario`` is asked for that size, ``optimal`` for half the ranks and twice the microbatches. The
    target is about a second for each pass, and milliseconds for a simulation.
    """

    def line(what: str, call: Callable[[], object]) -> None:
        found = [1e3 * took for took in each_s(call, repetitions, time.perf_counter)]
        sys.stdout.write(f"{what}: {statistics.median(found):.0f} ms, worst {max(found):.0f}\n")

    costs, mario = UniformCosts(), Recompute("mario")
    for schedule in ("1f1b", "chimera"):
        plan = Plan(schedule, ranks, microbatches, costs=costs)
        compute = compile_compute(plan)
        what = f"mario, {schedule} pp={ranks} m={microbatches}"
        line(what, partial(add_recompute, compute, mario, costs))
        program = compile_plan(replace(plan, recompute=mario)).train
        line("  simulating it", partial(replay, program, costs.table(program)))
    pp, m = ranks // 2, microbatches * 2
    for schedule, cap, split in (("1f1b", 1, False), ("1f1b", 4, True), ("zb_v", 4, False)):
        compute = compile_compute(Plan(schedule, pp, m, split_backward=split, costs=costs))
        table = costs.table(compute)
        what = f"optimal, {schedule}{' split' if split else ''} pp={pp} m={m}, {cap} activations"
        line(what, partial(recompute_within, compute, table, (cap,) * pp))


def messages(*, schedules: Sequence[str], latencies: Sequence[float]) -> None:
    """The order of messages where a send waits for its receive: simulated step times.

    Columns: the step with buffered sends, and how much longer it is with rendezvous when every
    message goes right behind its producer, and in the order that the compiler chooses; ``least``:
    what the messages of the busiest rank alone add, which no order can undercut if they hold both
    ranks.
    """
    header = ("p", "m", "p2p", "buffered", "producer", "chosen", "least")
    sys.stdout.write(
        f"{'schedule':18} {'{:>2} {:>3} {:>5} {:>9} {:>9} {:>7} {:>6}'.format(*header)}\n"
    )
    gains: dict[float, list[tuple[float, float]]] = {}
    for schedule in schedules:
        for pp, microbatches in SHAPES:
            for latency in latencies:
                step, producer, chosen, least = _rendezvous(schedule, pp, microbatches, latency)
                gains.setdefault(latency, []).append((producer, chosen))
                sys.stdout.write(
                    f"{schedule:18} {pp:2} {microbatches:3} {latency:5.2f} {step:9.2f} "
                    f"{producer:9.1%} {chosen:7.1%} {least:6.1%}\n"
                )
    for latency, pairs in gains.items():
        before, after = (statistics.mean(column) for column in zip(*pairs, strict=True))
        sys.stdout.write(
            f"mean at p2p={latency:g}F: {before:.1%} by producer, {after:.1%} as chosen\n"
        )


def _rendezvous(
    schedule: str, pp: int, microbatches: int, latency: float
) -> tuple[float, float, float, float]:
    """(buffered, producer-time order, chosen order, least), the last three over the first."""
    costs = UniformCosts(p2p=latency, transport="rendezvous")
    program = compile_compute(Plan(schedule, pp, microbatches, costs=costs))
    table = costs.table(program)
    by_producer = add_messages(program, table)
    buffered = max(replay(by_producer, replace(table, transport="buffered"))[1])
    busiest = max(sum(i.kind in MESSAGE_KINDS for i in row) for row in by_producer.ranks)
    by_producer_time = max(replay(by_producer, table)[1])
    chosen = max(replay(order_for_rendezvous(program, table), table)[1])
    least = max(0.0, 3.0 * microbatches + busiest * latency - buffered)
    return buffered, by_producer_time / buffered - 1, chosen / buffered - 1, least / buffered


def heartbeat(*, writes: int, rounds: int) -> None:
    """The writes that the executor makes per instruction, on a shared page.

    Microseconds, beside one clock read, of which the recorder makes two per instruction; less those
    of an empty loop.
    """
    beat = Heartbeat(new_page()).words

    def one() -> None:
        for place in range(writes):
            beat[STATE] = place << 1

    def two() -> None:
        for place in range(writes):
            beat[STATE] = place << 1
            beat[STATE] = place << 1

    def three() -> None:
        for place in range(writes):
            beat[STATE] = place << 1
            beat[STATE] = place << 1 | WAITING
            beat[STATE] = place << 1

    def clock() -> None:
        for _ in range(writes):
            time.perf_counter()

    def empty() -> None:
        for _ in range(writes):
            pass

    def each_us(loop: Callable[[], None]) -> float:
        return statistics.median(each_s(loop, rounds, time.perf_counter)) / writes * 1e6

    nothing = each_us(empty)
    for name, loop in {
        "SEND, RECV, REDUCE: 1 write": one,
        "F, B, I, W: 2 writes": two,
        "F, B, I with a message: 3 writes": three,
        "a clock read": clock,
    }.items():
        sys.stdout.write(f"{name:34} {each_us(loop) - nothing:.3f} us\n")
    sys.stdout.write(f"page of {PAGE} bytes; machine with {os.cpu_count()} cores\n")


def _training(name: str) -> Callable[..., None]:
    """A measure that needs torch, imported when it is asked for."""

    def run(**options: object) -> None:
        getattr(importlib.import_module("benchmarks.micro_training"), name)(**options)

    return run


# Name -> what it does, the function, and its options with their defaults.
MEASURES: Mapping[str, tuple[str, Callable[..., None], Mapping[str, object]]] = {
    "simulator": (
        "one simulation, and what faster clocks gain",
        simulator,
        {"ranks": 32, "microbatches": 64, "repetitions": 20},
    ),
    "passes": (
        "recomputation passes on long programs",
        passes,
        {"ranks": 32, "microbatches": 64, "repetitions": 5},
    ),
    "messages": (
        "the order of messages where sends wait",
        messages,
        {
            "schedules": [name for name in SCHEDULES if name not in ("custom", "naive")],
            "latencies": [0.05, 0.1, 0.25],
        },
    ),
    "heartbeat": (
        "a heartbeat per instruction",
        heartbeat,
        {"writes": 200_000, "rounds": 15},
    ),
    "recorder": ("recording every instruction", _training("recorder"), {"steps": 200}),
    "recording": (
        "recording a step of a LightningModule, and executing it",
        _training("recording"),
        {"layers": 16, "repetitions": 200},
    ),
    "recompute": ("recomputing a stage: time and bytes", _training("recompute"), {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro", description=__doc__)
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, (about, _, options) in MEASURES.items():
        measure = names.add_parser(name, help=about)
        for option, default in options.items():
            several = isinstance(default, list)
            kind = type(default[0] if isinstance(default, list) else default)
            measure.add_argument(
                f"--{option}", type=kind, default=default, nargs="+" if several else None
            )
    given = vars(parser.parse_args())
    MEASURES[given.pop("name")][1](**given)


if __name__ == "__main__":
    main()
