"""trace.json: timelines in Chrome's trace format, for ui.perfetto.dev or chrome://tracing.

Beside the events, which such viewers draw, ``otherData`` keeps the timelines as our own pictures
draw them: what a sweep reads of a run's folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from launcher.report.html import Panel
from launcher.report.result import write_atomically
from launcher.report.rows import KIND_NAMES, TimelineData, held_over_time, timeline_rows, zeroed
from strategies.analysis.timeline import Event, Timeline
from strategies.ir.kinds import COMPUTE_KINDS, Kind
from strategies.small_file import read_json

# The format counts in microseconds. The unit F has no length in seconds; 1 F is drawn as 1 ms.
_US_PER_UNIT = {"F": 1000.0, "s": 1e6}

# An arrow binds to the slice that is open at its time: a moment inside, not on the border.
_INSIDE = 0.01
_MOST_BYTES = 1 << 28

TraceEvent = dict[str, object]


def write_trace(path: Path, panels: Sequence[Panel]) -> None:
    write_atomically(path, trace_json(panels))


def trace_json(panels: Sequence[Panel]) -> str:
    """One process per panel, threads for each rank's compute and collective channel.

    Messages are arrows from the producer to the consumer; activations held are counters.
    """
    flow_ids = count(1)
    events: list[TraceEvent] = []
    units: dict[str, str] = {}
    for pid, panel in enumerate(panels, start=1):
        timeline = zeroed(panel.timeline)
        name = f"{panel.label} ({timeline.program.schedule})"
        if name in units:
            name += f" {pid}"
        unit = timeline.time_unit
        units[name] = "1 F is shown as 1000 us" if unit == "F" else "real time"
        events += _named(pid, None, "process_name", name=name)
        events += _named(pid, None, "process_sort_index", sort_index=pid)
        events += _process(timeline, pid, flow_ids)
    drawn = [panel.data for panel in panels]
    other = {
        "time_scale": units,
        "timelines": {
            "kinds": KIND_NAMES,
            "labels": [data.label for data in drawn],
            "panels": [data.panel for data in drawn],
        },
    }
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    return json.dumps(trace, separators=(",", ":"), allow_nan=False) + "\n"


def read_timelines(path: Path) -> tuple[TimelineData, ...]:
    """What a ``trace.json`` keeps for pictures.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no such file, or one of a version that kept none or numbered kinds
            otherwise.
    """
    try:
        kept = read_json(path, most_bytes=_MOST_BYTES)["otherData"]["timelines"]
        kinds = tuple(kept["kinds"])
        if kinds != KIND_NAMES[: len(kinds)]:
            raise ValueError(f"{path} numbers kinds as {kinds}")
        return tuple(
            TimelineData(label, panel)
            for label, panel in zip(kept["labels"], kept["panels"], strict=True)
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} keeps no timelines ({error})") from error


def _process(timeline: Timeline, pid: int, flow_ids: Iterator[int]) -> Iterator[TraceEvent]:
    tids = count(1)
    thread_of: dict[Event, int] = {}
    for rank, row in enumerate(timeline_rows(timeline, instants=True)):
        for name, lanes in (("compute", row.compute), ("collectives", row.channel)):
            for lane in lanes:
                tid = next(tids)
                yield from _named(pid, tid, "thread_name", name=f"rank {rank} {name}")
                yield from _named(pid, tid, "thread_sort_index", sort_index=tid)
                for event in lane:
                    thread_of[event] = tid
                    yield _slice(timeline, event, pid, tid)
        for time, held in held_over_time(timeline, rank):
            yield {
                "ph": "C",
                "name": f"rank {rank} activations held",
                "pid": pid,
                "ts": _us(timeline, time),
                "args": {"microbatches": held},
            }
    yield from _arrows(timeline, pid, thread_of, flow_ids)


def _slice(timeline: Timeline, event: Event, pid: int, tid: int) -> TraceEvent:
    item = event.instruction
    args: dict[str, object] = {"kind": item.kind.value, "stage": item.stage}
    if item.microbatch is not None:
        args["microbatch"] = item.microbatch
    if item.bucket is not None:
        args["bucket"] = item.bucket
    return {
        "ph": "X",
        "name": str(item).partition("@")[0],
        "cat": item.kind.value,
        "pid": pid,
        "tid": tid,
        "ts": _us(timeline, event.start),
        "dur": round(_us(timeline, event.end) - _us(timeline, event.start), 3),
        "args": args,
    }


def _arrows(
    timeline: Timeline, pid: int, thread_of: dict[Event, int], flow_ids: Iterator[int]
) -> Iterator[TraceEvent]:
    graph = timeline.program.graph
    ranks = range(len(timeline.program.ranks))
    events = [event for rank in ranks for event in timeline.events(rank)]
    for node, item in enumerate(graph.nodes):
        if item.kind not in COMPUTE_KINDS:
            continue
        for need in graph.needs[node]:
            if graph.nodes[need].kind is not Kind.RECV:
                continue
            sender = events[graph.needs[graph.partner[need]][0]]
            receiver = events[node]
            common = {"cat": "message", "name": str(graph.nodes[need]), "id": next(flow_ids)}
            for phase, event, share in (("s", sender, 1 - _INSIDE), ("f", receiver, _INSIDE)):
                time = event.start + share * (event.end - event.start)
                yield {
                    "ph": phase,
                    **common,
                    "pid": pid,
                    "tid": thread_of[event],
                    "ts": _us(timeline, time),
                    **({"bp": "e"} if phase == "f" else {}),
                }


def _named(pid: int, tid: int | None, what: str, **args: object) -> Iterator[TraceEvent]:
    thread = {} if tid is None else {"tid": tid}
    yield {"ph": "M", "name": what, "pid": pid, **thread, "args": args}


def _us(timeline: Timeline, time: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(time * _US_PER_UNIT[timeline.time_unit], 3)
