import json
import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from launcher.report.html import Panel, timeline_html
from launcher.report.predicted import read_timelines, trace_json, write_trace
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.ir.kinds import COMPUTE_KINDS, Kind


def predicted(schedule="foldx_fifo", pp=2, num_microbatches=4, **costs):
    program = compile_program(schedule=schedule, pp=pp, num_microbatches=num_microbatches)
    return simulate(program, UniformCosts(grad_reduce=4, **costs))


def trace(*timelines):
    labels = {"simulated": "predicted", "measured": "measured"}
    return trace_json([Panel(labels[timeline.origin], timeline) for timeline in timelines])


def measured(timeline, second):
    def scale(rows):
        return tuple(tuple(5.0 + second * time for time in row) for row in rows)

    return replace(
        timeline,
        start=scale(timeline.start),
        end=scale(timeline.end),
        time_unit="s",
        origin="measured",
    )


def by_phase(text):
    whole = json.loads(text)
    assert set(whole) == {"traceEvents", "displayTimeUnit", "otherData"}
    found = defaultdict(list)
    for event in whole["traceEvents"]:
        found[event["ph"]].append(event)
    return found


def test_every_event_has_the_fields_of_its_phase():
    phases = by_phase(trace(predicted()))
    assert set(phases) == {"M", "X", "C", "s", "f"}
    fields = {
        "M": {"ph", "name", "pid", "args"},
        "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
        "C": {"ph", "name", "pid", "ts", "args"},
        "s": {"ph", "name", "cat", "id", "pid", "tid", "ts"},
        "f": {"ph", "name", "cat", "id", "pid", "tid", "ts", "bp"},
    }
    for phase, events in phases.items():
        for event in events:
            assert set(event) - {"tid"} == fields[phase] - {"tid"}
            assert event.get("ts", 0) >= 0
            assert event.get("dur", 0) >= 0


def test_a_process_per_origin_and_a_thread_per_rank_and_channel():
    timeline = predicted()
    phases = by_phase(trace(timeline, measured(timeline, 0.01)))
    names = {
        (event["pid"], event.get("tid")): event["args"]["name"]
        for event in phases["M"]
        if event["name"] in ("process_name", "thread_name")
    }
    threads = ["rank 0 compute", "rank 0 collectives", "rank 1 compute", "rank 1 collectives"]
    for pid, process in ((1, "predicted (foldx_fifo)"), (2, "measured (foldx_fifo)")):
        assert names[pid, None] == process
        assert [names[pid, tid] for tid in (1, 2, 3, 4)] == threads
    assert len(names) == 10


def test_one_f_is_shown_as_a_millisecond_and_the_file_says_so():
    text = trace(predicted("1f1b"))
    (first,) = [event for event in by_phase(text)["X"] if event["name"] == "1F0"]
    assert (first["ts"], first["dur"]) == (1000.0, 1000.0)
    assert first["args"] == {"kind": "F", "stage": 1, "microbatch": 0}
    scale = json.loads(text)["otherData"]["time_scale"]
    assert scale == {"predicted (1f1b)": "1 F is shown as 1000 us"}


def test_seconds_become_microseconds_since_the_first_instruction():
    phases = by_phase(trace(measured(predicted("1f1b"), 0.02)))
    (first,) = [event for event in phases["X"] if event["name"] == "1F0"]
    assert (first["ts"], first["dur"]) == (20000.0, 20000.0)


@pytest.mark.parametrize("schedule", ["1f1b", "foldx_fifo"])
def test_all_instructions_are_there_and_slices_of_a_thread_do_not_overlap(schedule):
    timeline = predicted(schedule, pp=3, num_microbatches=5, p2p=0.1)
    slices = by_phase(trace(timeline))["X"]
    kinds = COMPUTE_KINDS | {Kind.REDUCE}
    names = sorted(str(i) for row in timeline.program.ranks for i in row if i.kind in kinds)
    assert sorted(event["name"] for event in slices) == names
    threads = defaultdict(list)
    for event in slices:
        threads[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            assert start >= end - 1e-6


def test_each_message_is_an_arrow_from_inside_its_producer_to_inside_its_consumer():
    timeline = predicted("1f1b", pp=2, num_microbatches=2)
    phases = by_phase(trace(timeline))

    def slice_at(event):
        (found,) = [
            x
            for x in phases["X"]
            if x["tid"] == event["tid"] and x["ts"] < event["ts"] < x["ts"] + x["dur"]
        ]
        return found["name"]

    ends = {event["id"]: event for event in phases["f"]}
    arrows = {(slice_at(event), slice_at(ends.pop(event["id"]))) for event in phases["s"]}
    assert arrows == {("0F0", "1F0"), ("0F1", "1F1"), ("1B0", "0B0"), ("1B1", "0B1")}
    assert ends == {}


def test_the_counter_of_activations_reaches_the_peak():
    timeline = predicted()
    counters = by_phase(trace(timeline))["C"]
    for rank, peak in enumerate(peak_activations(timeline.program)):
        mine = [e["args"] for e in counters if e["name"] == f"rank {rank} activations held"]
        assert max(values["microbatches"] for values in mine) == peak


def test_a_file_keeps_what_the_page_of_the_same_panels_draws(tmp_path):
    timeline = predicted()
    panels = [Panel("predicted", timeline), Panel("measured", measured(timeline, 0.01))]
    write_trace(tmp_path / "trace.json", panels)
    assert (tmp_path / "trace.json").read_text(encoding="ascii") == trace_json(panels)
    kept = read_timelines(tmp_path / "trace.json")
    assert [data.label for data in kept] == ["predicted", "measured"]
    page = timeline_html(panels, title="a step")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1))
    assert data["panels"] == [found.panel for found in kept]
    written = json.loads((tmp_path / "trace.json").read_text())["otherData"]["timelines"]
    assert written["kinds"] == data["kinds"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"otherData": {"time_scale": {}}}'])
def test_a_file_that_keeps_no_timelines_says_so(text, tmp_path):
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError):
        read_timelines(tmp_path / "trace.json")
