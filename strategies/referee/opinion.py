"""What is to be said of somebody's order: whether it runs, what would repair it, what is better.

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
from strategies.compiler import compile_plan, resolve_shape
from strategies.costs.table import Costs
from strategies.errors import DeadlockError, PlanError
from strategies.ir.graph import build_needs
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import MESSAGE_KINDS, Kind
from strategies.ir.program import Program
from strategies.lowering.send_recv import add_messages
from strategies.plan import Plan, ScheduleFile
from strategies.referee.semantics import SEMANTICS, Grouped, Semantics, Verdict, judge
from strategies.schedules import SCHEDULES
from strategies.schedules.csv_file import parse_cells
from strategies.schedules.custom import NAME, read_order
from strategies.simulator.engine import simulate

# --------------------------------------------------------------------------------------------------
# The smallest change after which an order can run, found by moving what is in the way.
#
# An order that stands still has a ring of instructions that wait for each other; one whose messages
# cross has two that changed places. Only what stands in the ring, or at the other end of it, needs
# to move, so every legal place of those is tried, nearest first (a SEND stays behind what makes its
# value, a RECV before what uses it). Where one move is not enough the one that lets the order get
# furthest is kept and the search goes on. Orders whose computations wait for each other get those
# moved first; messages that no move sets right are placed anew, by the rule of our own lowering.

_MOST_MOVES = 24
_FURTHEST = 24  # places that a message is tried at, to either side


@dataclass(frozen=True, slots=True)
class Move:
    """An instruction that stands elsewhere now; places count from 0 in the rank's list."""

    rank: int
    item: Instruction
    before: int
    after: int

    def __str__(self) -> str:
        places = abs(self.after - self.before)
        way = "later" if self.after > self.before else "earlier"
        return (
            f"rank {self.rank}: {self.item} {places} {'place' if places == 1 else 'places'} {way}"
        )


@dataclass(frozen=True, slots=True)
class Repair:
    """An order that runs, and how it differs.

    Attributes:
        program: The repaired order.
        moves: What was moved, one after the other; empty where all messages were placed anew.
        anew: Whether they were.
        moved: How many instructions stand elsewhere among the others of their rank.
        ungrouped: Whether it runs only with every message in a call of its own.
    """

    program: Program
    moves: tuple[Move, ...]
    anew: bool
    moved: int
    ungrouped: bool = False


def repair(program: Program, semantics: Semantics, *, grouped: Grouped = False) -> Repair:
    """The nearest order that runs under ``semantics``, for one that does not.

    Raises:
        ProgramError: An instruction uses what nobody makes: no order helps.
    """
    moves: list[Move] = []
    fixed = _computes(program, moves)
    verdict = judge(fixed, semantics, grouped=grouped)
    while not verdict.runs and len(moves) < _MOST_MOVES:
        found = _best_move(fixed, verdict, grouped=grouped)
        if found is None:
            break
        move, fixed, verdict = found
        moves.append(move)
    if verdict.runs:
        return Repair(fixed, tuple(moves), anew=False, moved=_distance(program, fixed))
    if grouped and judge(program, semantics).runs:
        return Repair(program, (), anew=False, moved=0, ungrouped=True)
    lowered = add_messages(_bare(fixed))
    apart = bool(grouped) and not judge(lowered, semantics, grouped=grouped).runs
    return Repair(lowered, (), anew=True, moved=_distance(program, lowered), ungrouped=apart)


def _bare(program: Program) -> Program:
    return replace(program, ranks=program.compute_rows(), lowered=False)


def _computes(program: Program, moves: list[Move]) -> Program:
    """The program with computations in an order that values allow, messages moved along."""
    try:
        _ = _bare(program).graph
    except DeadlockError:
        bare = _untangled(_bare(program), moves)
        return add_messages(bare) if program.lowered else bare
    return program


def _untangled(bare: Program, moves: list[Move]) -> Program:
    """Every rank keeps its order until all wait; then the first that could run goes first."""
    graph = build_needs(bare)
    rows = [list(range(*graph.offsets[rank : rank + 2])) for rank in range(len(bare.ranks))]
    heads = [0] * len(rows)
    done = bytearray(len(graph.nodes))

    def ready(node: int) -> bool:
        return all(done[need] for need in graph.needs[node])

    while any(head < len(row) for head, row in zip(heads, rows, strict=True)):
        going = True
        while going:
            going = False
            for rank, row in enumerate(rows):
                while heads[rank] < len(row) and ready(row[heads[rank]]):
                    done[row[heads[rank]]] = 1
                    heads[rank] += 1
                    going = True
        choices = [
            (place - heads[rank], rank, place)
            for rank, row in enumerate(rows)
            for place in range(heads[rank], len(row))
            if ready(row[place])
        ]
        if choices:
            _, rank, place = min(choices)
            node = rows[rank].pop(place)
            rows[rank].insert(heads[rank], node)
            moves.append(Move(rank, graph.nodes[node], place, heads[rank]))
    return bare.with_ranks(tuple(tuple(graph.nodes[node] for node in row) for row in rows))


def _best_move(
    program: Program, verdict: Verdict, *, grouped: Grouped
) -> tuple[Move, Program, Verdict] | None:
    """The shortest move after which it runs; else that which gets furthest, if further than now."""
    best: tuple[Move, Program, Verdict] | None = None
    reached = _progress(verdict)
    for move in sorted(_moves(program, verdict), key=lambda move: abs(move.after - move.before)):
        row = list(program.ranks[move.rank])
        row.insert(move.after, row.pop(move.before))
        rows = (*program.ranks[: move.rank], tuple(row), *program.ranks[move.rank + 1 :])
        moved = program.with_ranks(rows)
        now = judge(moved, verdict.semantics, grouped=grouped)
        if now.runs:
            return move, moved, now
        if _progress(now) > reached:
            best, reached = (move, moved, now), _progress(now)
    return best


def _progress(verdict: Verdict) -> tuple[int, int]:
    """How far an order gets: past its crossings first, then instruction by instruction."""
    if verdict.crossing is not None:
        return (0, verdict.crossing.number)
    return (1, len(verdict.order))


def _moves(program: Program, verdict: Verdict) -> Iterator[Move]:
    """Every legal other place of the messages that are involved, or at their other ends."""
    graph = build_needs(program)
    nodes = {node for node in verdict.involved if graph.partner[node] >= 0}
    for node in sorted(nodes | {graph.partner[node] for node in nodes}):
        rank, item = graph.rank[node], graph.nodes[node]
        start, end = graph.offsets[rank : rank + 2]
        first, last = start, end - 1
        if item.kind is Kind.SEND:
            here = [need for need in graph.needs[node] if graph.rank[need] == rank]
            first = max(here, default=start - 1) + 1
        else:
            users = (user for user in range(start, end) if node in graph.needs[user])
            last = min(users, default=end) - 1
        for place in range(max(first, node - _FURTHEST), min(last, node + _FURTHEST) + 1):
            if place != node:
                yield Move(rank, item, node - start, place - start)


def _distance(before: Program, after: Program) -> int:
    """How many instructions stand elsewhere among the others of their rank."""
    moved = 0
    for old, new in zip(before.ranks, after.ranks, strict=True):
        names = [str(item) for item in old], [str(item) for item in new]
        blocks = SequenceMatcher(None, *names, autojunk=False).get_matching_blocks()
        moved += len(new) - sum(block.size for block in blocks)
    return moved


def notation(program: Program) -> str:
    """The order as CSV in torch's notation, with its messages if there are any."""
    return "".join(
        ",".join(_cell(item) for item in row if item.microbatch is not None) + "\n"
        for row in program.ranks
    )


def _cell(item: Instruction) -> str:
    text = str(item)
    return text.partition(">")[0].partition("<")[0] if item.kind in MESSAGE_KINDS else text


# --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Opinion:
    """What became of an order.

    Attributes:
        program: As it was read; ``lowered`` if the file has messages.
        asked: The verdict that decides.
        verdicts: Those under every promise; only the first for an order without messages.
        repaired: The nearest order that runs, where this one does not.
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
        """The order that runs: the file's, or the repaired one."""
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
        makespan: Of its step, in the costs' unit.
        peak: Most activations that a rank holds at once, in microbatches of all its stages.
    """

    name: str
    likeness: float
    makespan: float
    peak: float


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
    file = ScheduleFile(name, text, placement)
    program, _ = read_order(parse_cells(text, name=name), file, messages=True)
    if not program.lowered:
        verdict = judge(program, semantics)
        fixed = None if verdict.runs else repair(program, semantics)
        return Opinion(program, verdict, (verdict,), fixed)
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
        found.append(Ours(other.schedule, _likeness(program, other), timeline.makespan, peak))
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
