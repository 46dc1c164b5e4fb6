"""What the order of messages is worth where a send waits for its receive: simulated step times.

    python -m benchmarks.message_order [--schedules NAME ...] [--latencies 0.05 0.1 0.25]

Columns: the step with buffered sends, and how much longer it is with rendezvous when every message
goes right behind its producer, and in the order that the compiler chooses; ``least``: what the
messages of the busiest rank alone add, which no order can undercut if they hold both ranks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace

from strategies.compiler import compile_compute
from strategies.costs.uniform import UniformCosts
from strategies.ir.kinds import MESSAGE_KINDS
from strategies.lowering.send_recv import add_messages, order_messages
from strategies.plan import Plan
from strategies.schedules import SCHEDULES
from strategies.simulator.engine import replay

SHAPES = ((4, 8), (4, 16), (8, 16))
LATENCIES = [0.05, 0.1, 0.25]


def measure(
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
    chosen = max(replay(order_messages(program, table), table)[1])
    least = max(0.0, 3.0 * microbatches + busiest * latency - buffered)
    return buffered, by_producer_time / buffered - 1, chosen / buffered - 1, least / buffered


def main() -> None:
    """Prints the table."""
    known = [name for name in SCHEDULES if name not in ("custom", "naive")]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", nargs="+", default=known, choices=known, metavar="NAME")
    parser.add_argument("--latencies", nargs="+", type=float, default=LATENCIES, metavar="L")
    given = parser.parse_args()
    write = sys.stdout.write
    header = ("p", "m", "p2p", "buffered", "producer", "chosen", "least")
    write(f"{'schedule':18} {'{:>2} {:>3} {:>5} {:>9} {:>9} {:>7} {:>6}'.format(*header)}\n")
    gains: dict[float, list[tuple[float, float]]] = {}
    for schedule in given.schedules:
        for pp, microbatches in SHAPES:
            for latency in given.latencies:
                figures = measure(schedule, pp, microbatches, latency)
                gains.setdefault(latency, []).append(figures[1:3])
                write(
                    f"{schedule:18} {pp:2} {microbatches:3} {latency:5.2f} {figures[0]:9.2f} "
                    f"{figures[1]:9.1%} {figures[2]:7.1%} {figures[3]:6.1%}\n"
                )
    for latency, pairs in gains.items():
        before, after = (statistics.mean(column) for column in zip(*pairs, strict=True))
        write(f"mean at p2p={latency:g}F: {before:.1%} by producer, {after:.1%} as chosen\n")


if __name__ == "__main__":
    main()
