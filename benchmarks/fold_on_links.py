"""Is the reduction hidden under the pipeline on slow links, and does the simulator know how well?

    sudo make bench-links
    python -m benchmarks.fold_on_links --scenarios one-link pp4 --repetitions 9
    python -m benchmarks.fold_on_links --predict-only        (no root, no links)

Every rank stands on a host of its own: a network namespace with one or two interfaces that carry
``--rate-mbit`` per direction. Compute sleeps, so that few cores carry all ranks; messages and
gradients are really sent. All contenders stand ready in the same processes and take turns step by
step, each with and without reductions; all ranks begin a step at the same time. A step ends when
the last rank has its reduced gradients.

The simulator gets the bandwidth and the latency of the links as measured by messages in the same
run, the sleeps, and the buckets: ``strategies.costs.analytic`` on ``gpus_per_node=1``. For torch's
schedules it says what ours of that name takes with overlap.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from benchmarks.fold_on_links_scenario import Link, Scenario, predict, scenarios
from benchmarks.fold_on_links_table import Line, make_line, markdown
from benchmarks.link_hosts import MissingRightError, hosts, run_on
from benchmarks.table import Table, command, machine

WARMUPS = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scenario, measured.

    Attributes:
        scenario: What was run.
        link: As measured.
        reduction_s: One bucket's all-reduce with nothing beside it; not an input of the simulator.
        lines: One per contender.
    """

    scenario: Scenario
    link: Link
    reduction_s: float
    lines: tuple[Line, ...]


def measure(scenario: Scenario, *, rate_mbit: float, warmups: int, repetitions: int) -> Outcome:
    """Makes the hosts, runs everything, and brings the figures together.

    Raises:
        MissingRightError: This machine cannot make such hosts.
        RuntimeError: A rank failed.
    """
    count = scenario.pp * scenario.dp
    with hosts(count, interfaces=scenario.interfaces, rate_mbit=rate_mbit) as names:
        found = run_on(
            names, "benchmarks.fold_on_links_rank:run_rank",
            scenario=scenario, warmups=warmups, repetitions=repetitions,
        )  # fmt: skip
    link = found["link"]
    lines = [
        make_line(
            scenario, contender, predict(scenario, contender, link), [r[i] for r in found["ranks"]]
        )
        for i, contender in enumerate(scenario.contenders)
    ]
    return Outcome(scenario, link, found["reduction_s"], tuple(lines))


def predictions(scenario: Scenario, link: Link) -> str:
    """What the simulator says."""
    table = Table(scenario.name, "step", "without reductions", "exposed reduction", numbers=True)
    for contender in scenario.contenders:
        if contender.engine == "ours":
            told = predict(scenario, contender, link)
            seconds = (told.step_s, told.bare_s, told.exposed_s)
            table.add(contender.name + told.chosen, *(f"{1e3 * value:.0f}" for value in seconds))
    return f"{table}\n"


def main() -> None:
    arguments = _parser().parse_args()
    chosen = [scenarios()[name] for name in arguments.scenarios]
    if arguments.predict_only:
        link = Link(arguments.rate_mbit * 1e6 / 8, 0.0)
        sys.stdout.write("\n".join(predictions(scenario, link) for scenario in chosen))
        return
    # Ended from outside, the namespaces go as they do on Ctrl-C.
    signal.signal(signal.SIGTERM, _interrupted)
    words = command("fold_on_links")
    texts, contents = [], []
    try:
        for scenario in chosen:
            outcome = measure(
                scenario,
                rate_mbit=arguments.rate_mbit,
                warmups=WARMUPS,
                repetitions=arguments.repetitions,
            )
            conditions = f"medians of {arguments.repetitions} steps after {WARMUPS}."
            text = markdown(scenario, outcome.link, outcome.lines, conditions=conditions)
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
            texts.append(text)
            contents.append(asdict(outcome))
    except MissingRightError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("fold_on_links: interrupted; ranks and namespaces are gone.")
    about = f"{machine()}\n{words}\n"
    sys.stdout.write(about)
    if arguments.markdown is not None:
        arguments.markdown.write_text("\n".join([*texts, about]))
    if arguments.json is not None:
        content = {"command": words, "machine": machine(), "scenarios": contents}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fold_on_links")
    names = list(scenarios())
    parser.add_argument("--scenarios", nargs="+", default=names, choices=names)
    parser.add_argument("--repetitions", type=int, default=5, metavar="N")
    parser.add_argument("--rate-mbit", type=float, default=200.0, metavar="R")
    parser.add_argument("--predict-only", action="store_true", help="the simulator's part alone")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the tables")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures of all repetitions")
    return parser


if __name__ == "__main__":
    main()
