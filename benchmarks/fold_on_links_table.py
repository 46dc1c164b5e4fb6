"""From the ranks' clocks to the lines of a table; knows no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.fold_on_links_scenario import FOLD, Contender, Link, Prediction, Scenario
from benchmarks.table import Table, furthest

# Predictions that are closer than this are equal: links and sleeps are not exact to it.
_SAME = 0.005


@dataclass(frozen=True, slots=True)
class Line:
    """One contender: medians over the repetitions, in seconds.

    Attributes:
        contender: Its name; with the group that was chosen, where one was.
        engine: ``ours`` or ``torch``.
        schedule: Our name.
        step_s: First start to last end over all ranks.
        bare_s: The same without reductions.
        outlasting_s: From the last compute of all ranks to the last reduction's end; None if the
            engine does not stamp them.
        sent_mb: Per interface, what the rank that sends most sends in a step, in 1e6 bytes.
        busy: A rank's emulated compute over what was asked for, less 1; of the rank that is
            furthest off.
        predicted: The simulator's figures.
        steps_s: All repetitions.
        bare_steps_s: The same without reductions.
        late_s: By how much any rank missed a common start.
    """

    contender: str
    engine: str
    schedule: str
    step_s: float
    bare_s: float
    outlasting_s: float | None
    sent_mb: tuple[float, ...]
    busy: float
    predicted: Prediction
    steps_s: tuple[float, ...]
    bare_steps_s: tuple[float, ...]
    late_s: float

    @property
    def exposed_s(self) -> float:
        """What reductions add to the step."""
        return self.step_s - self.bare_s

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.step_s / self.predicted.step_s


def make_line(
    scenario: Scenario,
    contender: Contender,
    prediction: Prediction,
    ranks: Sequence[dict[str, list[dict[str, Any]]]],
) -> Line:
    """Brings the ranks of one contender together.

    Args:
        scenario: What was run.
        contender: Who ran.
        prediction: What the simulator says.
        ranks: Per rank, the steps with (``whole``) and without (``bare``) reductions.
    """
    whole, bare = (_spans([rank[kind] for rank in ranks]) for kind in ("whole", "bare"))
    outlasting = [
        None
        if any(step["outlasting"] is None for step in steps)
        else max(s["outlasting"][1] for s in steps) - max(s["outlasting"][0] for s in steps)
        for steps in zip(*(rank["whole"] for rank in ranks), strict=True)
    ]
    stamped = [max(0.0, value) for value in outlasting if value is not None]
    sent = [
        [statistics.median(values) for values in zip(*(s["sent"] for s in steps), strict=True)]
        for steps in (rank["whole"] for rank in ranks)
    ]
    nominal = 3 * scenario.forward_s * scenario.num_microbatches
    busy = [statistics.median(step["busy"] for step in rank["whole"]) for rank in ranks]
    return Line(
        contender=contender.name + prediction.chosen,
        engine=contender.engine,
        schedule=contender.schedule,
        step_s=statistics.median(whole),
        bare_s=statistics.median(bare),
        outlasting_s=statistics.median(stamped) if stamped else None,
        sent_mb=tuple(max(values) / 1e6 for values in zip(*sent, strict=True)),
        busy=furthest(value / nominal - 1 for value in busy),
        predicted=prediction,
        steps_s=tuple(whole),
        bare_steps_s=tuple(bare),
        late_s=max(step["late"] for rank in ranks for steps in rank.values() for step in steps),
    )


def _spans(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
    return [
        max(step["ended"] for step in steps) - min(step["begun"] for step in steps)
        for steps in zip(*ranks, strict=True)
    ]


def markdown(scenario: Scenario, link: Link, lines: Sequence[Line], *, conditions: str) -> str:
    """The table, and under it what was measured beside it.

    Args:
        scenario: What was run.
        link: As measured.
        lines: One per contender.
        conditions: Repetitions and the like, a sentence.
    """
    sent = ["sent, MB"] if scenario.interfaces == 1 else ["messages, MB", "reductions, MB"]
    table = Table(
        scenario.name, "step", "simulator", "ratio", "without reductions", "simulator",
        "exposed reduction", "simulator", *sent, numbers=True,
    )  # fmt: skip
    for line in lines:
        predicted = line.predicted
        table.add(
            line.contender,
            *_ms(line.step_s, predicted.step_s),
            f"{line.ratio:.3f}",
            *_ms(line.bare_s, predicted.bare_s, line.exposed_s, predicted.exposed_s),
            *(f"{value:.1f}" for value in line.sent_mb),
        )
    notes = (
        f"{scenario.title}; M={scenario.num_microbatches}, F {1e3 * scenario.forward_s:g} ms and B "
        f"{2e3 * scenario.forward_s:g} ms per rank and microbatch, messages of "
        f"{scenario.message_bytes / 1e6:.2f} MB, {scenario.gradient_bytes / 1e6:.1f} MB of "
        f"gradients per {'stage' if scenario.per_stage else 'rank'} in buckets of at most "
        f"{scenario.bucket_mb:g} MiB. Link as measured: {link.bandwidth / 1e6:.1f} MB/s per "
        f"direction, {1e6 * link.latency_s:.0f} us. Times in ms; {conditions} {_busy(lines)}"
    )
    return f"{table}\n\n{notes}\n\n{verdict(lines)}\n"


def _busy(lines: Sequence[Line]) -> str:
    busy = {
        engine: furthest(line.busy for line in lines if line.engine == engine)
        for engine in dict.fromkeys(line.engine for line in lines)
    }
    told = ", ".join(f"{engine} {value:+.1%}" for engine, value in busy.items())
    return f"Emulated compute against what was asked for, on the worst rank: {told}."


def _ms(*seconds: float) -> list[str]:
    return [f"{1e3 * value:.0f}" for value in seconds]


def verdict(lines: Sequence[Line]) -> str:
    """The targets in words: distance from the simulator, and which Fold schedule is the fastest."""
    ours = [line for line in lines if line.engine == "ours"]
    off = max(ours, key=lambda line: abs(line.ratio - 1))
    text = f"Furthest from the simulator: {off.contender}, {100 * (off.ratio - 1):+.1f} %."
    fold = [line for line in ours if line.schedule in FOLD]
    if not fold:
        return text
    best = min(line.predicted.step_s for line in fold)
    called = [line for line in fold if line.predicted.step_s <= best * (1 + _SAME)]
    fastest = min(fold, key=lambda line: line.step_s)
    names = " = ".join(line.contender for line in called)
    word = "as predicted" if fastest in called else "NOT as predicted"
    return (
        f"{text} Fastest Fold schedule for the simulator: {names}; measured: "
        f"{fastest.contender} ({word})."
    )
