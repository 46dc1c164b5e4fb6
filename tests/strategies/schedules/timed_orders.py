"""Orders made for given durations, compiled and simulated; random durations for properties."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from hypothesis import strategies as st

from strategies import simulate
from strategies.analysis.memory import peak_activations
from strategies.analysis.metrics import Metrics, measure
from strategies.analysis.timeline import Timeline
from strategies.costs.table import CostTable
from strategies.ir.program import Placement, Program, chain
from strategies.ir.verify import verify
from strategies.lowering.send_recv import add_messages
from strategies.passes.updates import add_updates
from strategies.plan import Plan
from strategies.schedules import SCHEDULES
from strategies.schedules.schedule import Durations, Rows
from strategies.schedules.search.weight_gaps import times_of


@dataclass(frozen=True, slots=True)
class TimedOrder:
    """A verified program with its timeline under the durations it was made for."""

    program: Program
    timeline: Timeline
    figures: Metrics

    @property
    def span(self) -> float:
        """Max over ranks of the time from first to last compute.

        ``figures.period`` counts messages as well, which are under way before a rank begins.
        """
        ranks = range(len(self.program.ranks))
        events = [list(self.timeline.compute(rank)) for rank in ranks]
        return max(max(e.end for e in row) - min(e.start for e in row) for row in events)

    @property
    def peak(self) -> float:
        """Of the rank that holds most, in microbatches."""
        return max(peak_activations(self.program))


class GivenCosts:
    """A cost table of given durations."""

    def __init__(self, durations: Durations) -> None:
        self.durations = durations

    def table(self, program: Program) -> CostTable:
        given, stages = self.durations, program.placement.num_stages
        halves = zip(given.backward_input, given.backward_weight, strict=True)
        return CostTable(
            name="given",
            time_unit="F",
            forward=given.forward,
            backward=tuple(first + second for first, second in halves),
            backward_input=given.backward_input,
            backward_weight=given.backward_weight,
            recompute=given.forward,
            step=(0.0,) * stages,
            reduce=((),) * stages,
            latency=(given.latency,) * len(program.boundaries),
            occupancy=(0.0,) * len(program.boundaries),
        )


def uniform(
    placement: Placement,
    forward: float,
    backward_input: float,
    backward_weight: float,
    *,
    latency: float = 0.0,
    last: float = 1.0,
) -> Durations:
    """Figures per rank and microbatch, spread over the rank's stages; the last stage takes more."""
    share = 1.0 / placement.stages_per_microbatch
    scale = (share,) * (placement.num_stages - 1) + (share * last,)
    forwards, inputs, weights = (
        tuple(value * part for part in scale)
        for value in (forward, backward_input, backward_weight)
    )
    return Durations(forwards, inputs, weights, latency)


def placement_of(name: str, pp: int) -> Placement:
    """Stages to ranks of a registered schedule."""
    schedule = SCHEDULES[name]
    shape = schedule.resolve(Plan(schedule.name, pp, 1))
    return schedule.place(shape)


def rows_of(name: str, pp: int, num_microbatches: int, durations: Durations | None) -> Rows:
    """What a registered schedule makes of these durations; None for equal ones."""
    schedule = SCHEDULES[name]
    shape = schedule.resolve(Plan(schedule.name, pp, num_microbatches))
    return schedule.order(replace(shape, durations=durations))


def timed(
    placement: Placement, num_microbatches: int, rows: Rows, durations: Durations
) -> TimedOrder:
    """Compiles and simulates an order, verified after each step."""
    compute = Program("timed", placement, num_microbatches, rows, chain(placement.num_stages))
    program = verify(add_messages(verify(add_updates(verify(compute)))))
    costs = GivenCosts(durations)
    timeline = simulate(program, costs)
    return TimedOrder(program, timeline, measure(timeline, costs))


def figures_of(
    placement: Placement, num_microbatches: int, rows: Rows, durations: Durations
) -> tuple[float, float]:
    """(makespan, period), without messages."""
    program = Program("timed", placement, num_microbatches, rows, chain(placement.num_stages))
    start, end = times_of(program, durations)
    spans = pairwise(program.graph.offsets)
    return max(end), max(end[high - 1] - start[low] for low, high in spans)


@st.composite
def uneven_durations(draw: st.DrawFn, num_stages: int) -> Durations:
    """F, I and W that differ between each other and from stage to stage, with latency."""
    spread = draw(st.sampled_from([0.0, 0.1, 0.4]))
    ratios = [1.0, draw(st.floats(0.6, 1.8)), draw(st.floats(0.3, 1.5))]
    scale = [draw(st.floats(1.0 - spread, 1.0 + spread)) for _ in range(num_stages)]
    forward, backward_input, backward_weight = (
        tuple(ratio * part for part in scale) for ratio in ratios
    )
    latency = draw(st.sampled_from([0.0, 0.05, 0.3]))
    return Durations(forward, backward_input, backward_weight, latency)
