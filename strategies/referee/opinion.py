"""What there is to say of an order: whether it runs, with which messages it would, what is better.

    from strategies.referee import examine

    opinion = examine(open("theirs.csv").read(), name="theirs.csv")
    assert opinion.runs, opinion.asked.grid

The order is read in torch's notation with its messages where the file has them, and judged under
every promise that a transport can make; the one asked for decides. What is simulated afterwards is
the order of its computations, lowered by our own rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from strategies.analysis.memory import peak_activations
from strategies.analysis.timeline import Timeline
from strategies.compiler import compile_plan, resolve_shape
from strategies.costs.table import Costs
from strategies.errors import PlanError
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import MESSAGE_KINDS
from strategies.ir.program import Program
from strategies.lowering.send_recv import add_messages
from strategies.plan import Plan, ScheduleFile
from strategies.referee.semantics import SEMANTICS, Grouped, Semantics, Verdict, judge
from strategies.schedules import SCHEDULES
from strategies.schedules.custom import NAME, read_order
from strategies.simulator.engine import simulate


@dataclass(frozen=True, slots=True)
class Repair:
    """An order that runs: the same computations.

    Attributes:
        program: The repaired order.
        ungrouped: Whether it runs only with every message in a call of its own.
        placed: Whether all messages stand where our lowering has them.
    """

    program: Program
    ungrouped: bool
    placed: bool


def repair(program: Program, semantics: Semantics, *, grouped: Grouped = False) -> Repair | None:
    """An order that runs under ``semantics``, for one that does not; None where none can.

    Then computations wait for each other, or an instruction uses what nobody makes.
    """
    bare = replace(program, ranks=program.compute_rows(), lowered=False)
    if not judge(bare, semantics).runs:
        return None
    if grouped and judge(program, semantics).runs:
        return Repair(program, ungrouped=True, placed=False)
    lowered = add_messages(bare)
    return Repair(
        lowered,
        ungrouped=bool(grouped) and not judge(lowered, semantics, grouped=grouped).runs,
        placed=True,
    )


def notation(program: Program) -> str:
    """The order as CSV in torch's notation, with its messages if there are any."""
    return "".join(
        ",".join(_cell(item) for item in row if item.microbatch is not None) + "\n"
        for row in program.ranks
    )


def _cell(item: Instruction) -> str:
    text = str(item)
    return text.partition(">")[0].partition("<")[0] if item.kind in MESSAGE_KINDS else text


@dataclass(frozen=True, slots=True)
class Opinion:
    """What became of an order.

    Attributes:
        program: As it was read; ``lowered`` if the file has messages.
        asked: The verdict that decides.
        verdicts: Those under every promise; only the first for an order without messages.
        repaired: One that runs, where this one does not; None where its computations deadlock.
        grouped: Whether messages side by side go as one group.
    """

    program: Program
    asked: Verdict
    verdicts: tuple[Verdict, ...]
    repaired: Repair | None
    grouped: Grouped = False

    @property
    def runs(self) -> bool:
        return self.asked.runs

    @property
    def whole(self) -> Program:
        """The file's order, or the repaired one."""
        return self.program if self.repaired is None else self.repaired.program

    @property
    def compute_file(self) -> ScheduleFile:
        """The computations of ``whole`` as a file that ``schedule=custom`` takes."""
        bare = replace(self.whole, ranks=self.whole.compute_rows(), lowered=False)
        return ScheduleFile(self.program.schedule, notation(bare))


@dataclass(frozen=True, slots=True)
class Ours:
    """A schedule of ours for the same stages, ranks and microbatches.

    Attributes:
        name: In the registry.
        likeness: 1.0 for the same order on every rank, 0.0 for nothing in common.
        timeline: Of its step.
        peak: Most activations that a rank holds at once, in microbatches of all its stages.
    """

    name: str
    likeness: float
    timeline: Timeline
    peak: float

    @property
    def makespan(self) -> float:
        """Of its step, in the costs' unit."""
        return self.timeline.makespan


def examine(
    text: str,
    *,
    name: str = "schedule.csv",
    semantics: Semantics = "one_queue",
    grouped: Grouped = False,
    placement: str | None = None,
) -> Opinion:
    """Reads and judges an order.

    Args:
        text: CSV in torch's notation, ``compute_only`` or ``compute_comms``, a line per rank.
        name: What messages call it.
        semantics: The promise of the transport that it is for.
        grouped: Whether messages side by side in a list go as one group, or as a ``whole`` one.
        placement: ``loop``, ``v`` or ``bidirectional``; None to take it from the rows.

    Raises:
        PlanError: ``placement`` is not for so many ranks.
        ProgramError: The text is no order; the message has line and column.
    """
    program = read_order(ScheduleFile(name, text, placement), messages=True)
    if not program.lowered:
        verdict = judge(program, semantics)
        return Opinion(program, verdict, (verdict,), None)
    verdicts = tuple(judge(program, each, grouped=grouped) for each in SEMANTICS)
    asked = verdicts[SEMANTICS.index(semantics)]
    fixed = None if asked.runs else repair(program, semantics, grouped=grouped)
    return Opinion(program, asked, verdicts, fixed, grouped)


def alternatives(program: Program, costs: Costs) -> list[Ours]:
    """Our schedules for as many stages, ranks, microbatches and copies of the weights.

    The most alike first. ``program``: computations only, or lowered.
    """
    found = []
    for other in _others(program, costs):
        timeline = simulate(other, costs)
        peak = max(peak_activations(other), default=0.0)
        found.append(Ours(other.schedule, _likeness(program, other), timeline, peak))
    return sorted(found, key=lambda entry: (-entry.likeness, entry.makespan))


def _others(program: Program, costs: Costs) -> Iterator[Program]:
    pp, stages = len(program.ranks), program.placement.num_stages
    copies = program.placement.weight_copies
    for name in SCHEDULES:
        if name == NAME or not SCHEDULES[name].synchronous:
            continue
        per_rank = None if stages == pp else stages // pp
        for chosen in dict.fromkeys((per_rank, None)):
            plan = Plan(name, pp, program.num_microbatches, chosen, costs=costs)
            try:
                shape = resolve_shape(plan)
            except PlanError:
                continue  # Its rules forbid these numbers.
            place = SCHEDULES[name].place(shape)
            if (place.num_stages, place.weight_copies) == (stages, copies):
                yield compile_plan(plan).train
                break


def _likeness(program: Program, other: Program) -> float:
    ratios = [
        SequenceMatcher(None, _words(row), _words(its), autojunk=False).ratio()
        for row, its in zip(program.compute_rows(), other.compute_rows(), strict=True)
    ]
    return sum(ratios) / len(ratios)


def _words(row: tuple[object, ...]) -> list[str]:
    return [str(item) for item in row if getattr(item, "microbatch", None) is not None]
