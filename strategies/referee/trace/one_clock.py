"""All ranks' traces on one clock, as a measured timeline.

Each host has a clock of its own. A message cannot arrive before it was sent: from every one between
two ranks follows how far their clocks are apart at least, and from those the other way at most.
Where a rank stood idle until a message came, it took next to nothing, and says it exactly. Clocks
stay as they are where no message contradicts them; else they are moved by what those messages say,
along the pairs of ranks that know it best. What then still contradicts is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from strategies.analysis.timeline import Timeline
from strategies.errors import DataError
from strategies.ir.kinds import Kind
from strategies.ir.program import Program
from strategies.plan import ScheduleFile
from strategies.referee.trace.kineto import RankTrace, Span
from strategies.schedules.custom import read_order


@dataclass(frozen=True, slots=True)
class Clocks:
    """How the ranks' clocks were brought together.

    Attributes:
        shift_s: What was added to each rank's clock.
        uncertain_s: How much each may still be off, as its messages tell.
        messages: How many were looked at.
        early_s: The worst of those that still arrive before they were sent; 0 for none.
    """

    shift_s: tuple[float, ...]
    uncertain_s: tuple[float, ...]
    messages: int
    early_s: float

    @property
    def moved(self) -> bool:
        return any(self.shift_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """One step of somebody's run, and what others of it say about durations.

    Attributes:
        timeline: The step whose time is the median; seconds.
        traces: Per pipeline rank, the file that it comes from.
        clocks: How they were brought together.
        steps: Each step's time, in seconds.
        durations: (kind, stage) -> what it took, in seconds, in all steps.
        replicas: Files that belong to other replicas of the pipeline, and were left out.
    """

    timeline: Timeline
    traces: tuple[RankTrace, ...]
    clocks: Clocks
    steps: tuple[float, ...]
    durations: Mapping[tuple[Kind, int], tuple[float, ...]]
    replicas: tuple[str, ...]


def put_together(traces: Sequence[RankTrace]) -> Measured:
    """The traces of one pipeline as a timeline.

    Raises:
        DataError: A rank is missing, or the traces are not of one pipeline.
        ProgramError: What ran is no order: an instruction is missing.
    """
    if not traces:
        raise DataError("There is no trace. Try trace=[rank0.json,rank1.json].")
    traces = sorted(traces, key=lambda trace: -1 if trace.rank is None else trace.rank)
    ranks = [_of_stage(trace.steps, stage) for stage, trace in enumerate(traces)]
    chosen, replicas = _one_pipeline(traces, ranks)
    used = [traces[place] for place in chosen]
    steps = [ranks[place] for place in chosen]
    count = min(map(len, steps))
    steps = [row[len(row) - count :] for row in steps]
    program = _program([row[0] for row in steps], used)
    clocks = _clocks(program, steps, used)
    shifted = [
        [_shifted(step, shift) for step in row]
        for row, shift in zip(steps, clocks.shift_s, strict=True)
    ]
    lines = [_timeline(program, [row[k] for row in shifted]) for k in range(count)]
    lines_by_time = sorted(lines, key=lambda line: line.makespan)
    durations: dict[tuple[Kind, int], list[float]] = {}
    for line in lines:
        for rank in range(len(program.ranks)):
            for event in line.events(rank):
                if not event.instruction.halves:
                    key = event.instruction.kind, event.instruction.stage
                    durations.setdefault(key, []).append(event.end - event.start)
    return Measured(
        lines_by_time[(count - 1) // 2],
        tuple(used),
        clocks,
        tuple(line.makespan for line in lines),
        {key: tuple(row) for key, row in durations.items()},
        tuple(replicas),
    )


# ------------------------------------------------------------------------------------------- names

_Steps = tuple[tuple[Span, ...], ...]
_LISTED = 12  # stages in a message


def _of_stage(steps: _Steps, stage: int) -> _Steps:
    """Steps whose marks name no stage, as those of the rank's only one."""
    return tuple(
        tuple(replace(span, name=span.name.replace("?", str(stage))) for span in step)
        for step in steps
    )


# ---------------------------------------------------------------------------------------- pipeline


def _one_pipeline(
    traces: Sequence[RankTrace], ranks: Sequence[_Steps]
) -> tuple[list[int], list[str]]:
    """Which files make one pipeline, by first stage, and those of its replicas."""
    groups: dict[frozenset[int], list[int]] = {}
    for place, steps in enumerate(ranks):
        held = frozenset(_stages(steps[0]))
        groups.setdefault(held, []).append(place)
    chosen = sorted((row[0] for row in groups.values()), key=lambda at: min(_stages(ranks[at][0])))
    replicas = [traces[place].file for row in groups.values() for place in row[1:]]
    all_held = {stage for place in chosen for stage in _stages(ranks[place][0])}
    missing = [stage for stage in range(max(all_held) + 1) if stage not in all_held]
    last = max(chosen, key=lambda at: max(_stages(ranks[at][0])))
    world = traces[chosen[0]].world_size
    known = f"; the job has {world} ranks, and {len(traces)} files are given" if world else ""
    if missing or traces[last].later:
        listed = ", ".join(map(str, missing[:_LISTED])) + (", ..." if missing[_LISTED:] else "")
        what = f"stages [{listed}]" if missing else f"the stages from {max(all_held) + 1} on"
        raise DataError(
            f"No trace has {what}: a rank is missing{known}. Every rank of one pipeline writes its "
            "own file; give them all, trace=[rank0.json,rank1.json]."
        )
    return chosen, replicas


def _stages(step: Sequence[Span]) -> set[int]:
    found: set[int] = set()
    for span in step:
        inner = span.name.partition(")")[0].strip("(")
        for part in inner.split(";"):
            digits = ""
            for letter in part:
                if not letter.isdigit():
                    break
                digits += letter
            found.add(int(digits))
    return found


def _program(rows: Sequence[Sequence[Span]], traces: Sequence[RankTrace]) -> Program:
    text = "".join(
        ",".join(span.name for span in sorted(row, key=lambda span: span.start)) + "\n"
        for row in rows
    )
    name = "the traces' order"
    return read_order(ScheduleFile(name, text), messages=False)


def _shifted(step: Sequence[Span], shift: float) -> dict[str, tuple[float, float]]:
    return {span.name: (span.start + shift, span.end + shift) for span in step}


def _timeline(program: Program, ranks: Sequence[Mapping[str, tuple[float, float]]]) -> Timeline:
    origin = min(start for row in ranks for start, _ in row.values())
    starts, ends = [], []
    for rank, (row, times) in enumerate(zip(program.ranks, ranks, strict=True)):
        for item in row:
            if str(item) not in times:
                raise DataError(
                    f"rank {rank}: {item} is in one step of its trace and not in another. The "
                    "steps are not of one order; record fewer of them."
                )
        starts.append(tuple(times[str(item)][0] - origin for item in row))
        ends.append(tuple(times[str(item)][1] - origin for item in row))
    return Timeline(program, tuple(starts), tuple(ends), "s", "measured")


# ------------------------------------------------------------------------------------------ clocks


@dataclass(frozen=True, slots=True)
class _Message:
    """One value that went from a rank to another.

    Attributes:
        sent: When it was made, by the clock of ``source``.
        used: When it was used, by the clock of ``target``.
        awaited: Whether the target stood idle before.
    """

    source: int
    target: int
    sent: float
    used: float
    awaited: bool


def _clocks(program: Program, steps: Sequence[_Steps], traces: Sequence[RankTrace]) -> Clocks:
    messages = [
        message
        for k in range(len(steps[0]))
        for message in _messages(program, [row[k] for row in steps])
    ]
    count = len(steps)
    pairs: dict[tuple[int, int], tuple[float, float]] = {}
    for a in range(count):
        for b in range(a + 1, count):
            one_host = traces[a].host == traces[b].host != ""
            found = _apart(
                [m for m in messages if (m.source, m.target) == (a, b)],
                [m for m in messages if (m.source, m.target) == (b, a)],
                one_host=one_host,
            )
            if found is not None:
                pairs[a, b] = found
    shift, uncertain = _spread(count, pairs)
    early = max(
        (m.sent + shift[m.source] - m.used - shift[m.target] for m in messages), default=0.0
    )
    return Clocks(tuple(shift), tuple(uncertain), len(messages), max(0.0, early))


def _apart(
    there: Sequence[_Message], back: Sequence[_Message], *, one_host: bool
) -> tuple[float, float] | None:
    """What is to be added to b's clock to make it a's, and how uncertain that is."""
    if not there and not back:
        return None
    least = max((m.sent - m.used for m in there), default=float("-inf"))
    most = min((m.used - m.sent for m in back), default=float("inf"))
    slack = 1e-5  # A clock is read a little late.
    fits = least <= slack and most >= -slack
    if one_host:
        return 0.0, 0.0  # One clock: what contradicts it is where instructions begin and end.
    if least > most:
        return (least + most) / 2, (least - most) / 2
    waited = any(m.awaited for m in there), any(m.awaited for m in back)
    if waited == (True, False) or most == float("inf"):
        near, other = least, most
    elif waited == (False, True) or least == float("-inf"):
        near, other = most, least
    else:
        near, other = (least + most) / 2, most
    if fits and not all(waited):
        return 0.0, max(0.0, min(abs(near), abs(other)))
    return near, abs(other - near) if abs(other) < float("inf") else 0.0


def _spread(
    count: int, pairs: Mapping[tuple[int, int], tuple[float, float]]
) -> tuple[list[float], list[float]]:
    """Every clock made rank 0's, over the pairs that are least uncertain."""
    shift: dict[int, float] = {0: 0.0}
    uncertain: dict[int, float] = {0: 0.0}
    while len(shift) < count:
        ways = []
        for (a, b), (apart, doubt) in pairs.items():
            if a in shift and b not in shift:
                ways.append((uncertain[a] + doubt, b, shift[a] + apart))
            elif b in shift and a not in shift:
                ways.append((uncertain[b] + doubt, a, shift[b] - apart))
        if not ways:
            rest = [rank for rank in range(count) if rank not in shift]
            shift |= dict.fromkeys(rest, 0.0)
            uncertain |= dict.fromkeys(rest, 0.0)
            break
        doubt, rank, moved = min(ways)
        shift[rank], uncertain[rank] = moved, doubt
    ranks = range(count)
    return [shift[rank] for rank in ranks], [uncertain[rank] for rank in ranks]


def _messages(program: Program, rows: Sequence[Sequence[Span]]) -> list[_Message]:
    """The values that cross ranks in one step, with the times of both ends."""
    times = [{span.name: (span.start, span.end) for span in row} for row in rows]
    made: dict[tuple[bool, int, int], tuple[int, float]] = {}
    spans = []
    typical = median(span.end - span.start for row in rows for span in row)
    for rank, row in enumerate(program.ranks):
        before = float("inf")
        for item in row:
            if str(item) not in times[rank]:
                continue
            start, end = times[rank][str(item)]
            idle = start - before
            before = end
            for part in item.parts:
                if part.kind is Kind.W or part.microbatch is None:
                    continue
                forward = part.kind is Kind.F
                made[forward, part.stage, part.microbatch] = rank, end
                spans.append((rank, forward, part.stage, part.microbatch, start, idle))
    found = []
    for rank, forward, stage, microbatch, start, idle in spans:
        source = made.get((forward, stage - 1 if forward else stage + 1, microbatch))
        if source is not None and source[0] != rank:
            awaited = idle > 0.05 * typical
            found.append(_Message(source[0], rank, source[1], start, awaited))
    return found
