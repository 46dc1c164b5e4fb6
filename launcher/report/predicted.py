"""What every mode knows before anything runs: the program, simulated, and its files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from operator import itemgetter
from pathlib import Path

from launcher.config import LaunchConfig
from launcher.report.ascii import draw, legend
from launcher.report.html import Panel, memory_mapping, write_timeline_html
from launcher.report.result import metrics_mapping, recompute_mapping, versions, write_atomically
from launcher.report.rows import KIND_NAMES, TimelineData, held_over_time, timeline_rows, zeroed
from launcher.report.summary import format_duration, format_percent
from launcher.resolve import Run, rank_capacity
from launcher.workloads.model_share import model_flops
from strategies.analysis.memory import RankMemory, peak_memory
from strategies.analysis.metrics import Metrics, measure
from strategies.analysis.timeline import Event, Timeline
from strategies.compiler import schedule_of
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import COMPUTE_KINDS, ESSENTIAL_KINDS, Kind
from strategies.ir.program import Program
from strategies.plan import Plan
from strategies.simulator.engine import simulate
from strategies.small_file import read_json

# --------------------------------------------------------------------------------------------------
# trace.json: timelines in Chrome's trace format, for ui.perfetto.dev or chrome://tracing.
#
# Beside the events, which such viewers draw, ``otherData`` keeps the timelines as our own pictures
# draw them: what a sweep reads of a run's folder.

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


# --------------------------------------------------------------------------------------------------
def predict(run: Run) -> tuple[Timeline, Metrics]:
    """The training step as the run's costs have it."""
    timeline = simulate(run.programs.train, run.costs, cores=_cores_per_replica(run))
    cap = run.plan.recompute.max_full_activations
    return timeline, measure(timeline, run.costs, cap=cap)


def rank_memory(run: Run) -> tuple[RankMemory, ...] | None:
    """What each pipeline rank holds at its worst moment; None where the costs know no bytes."""
    return peak_memory(run.programs.train, run.costs.table(run.programs.train))


def memory_note(run: Run) -> str | None:
    """What is to be said where a rank is predicted to need more than it has; None if it fits."""
    hardware, memory = run.config.hardware, rank_memory(run)
    if memory is None or run.config.costs.name == "uniform":
        return None
    capacity = rank_capacity(run.config, run.dp)
    rank, held = max(((n, each.total) for n, each in enumerate(memory)), key=itemgetter(1))
    if capacity.fits(held):
        return None
    fix = "recompute=full, more ranks (pp, tp)"
    if run.config.recompute.name == "full":
        fix = "more ranks (pp, tp), a smaller data.microbatch_size"
    return (
        f"does not fit: rank {rank} is predicted to need {capacity.needs(held)}, and "
        f"hardware.memory_gb={hardware.memory_gb:g} (hardware={hardware.name}). Try {fix}, or "
        "another hardware=."
    )


def memory_margin(run: Run) -> str | None:
    """What the fullest rank leaves of a card's memory, where the card says what else takes some."""
    memory, capacity = rank_memory(run), rank_capacity(run.config, run.dp)
    if memory is None or run.config.costs.name == "uniform" or capacity.room == capacity.total:
        return None
    held = max(each.total for each in memory)
    return f"it fits, with {capacity.margin(held)}" if capacity.fits(held) else None


def _cores_per_replica(run: Run) -> float | None:
    """``hardware.cores`` as the ranks of one pipeline share them with all others."""
    cores = run.config.hardware.cores
    return None if cores is None else cores / (run.dp * run.config.tp)


def run_mapping(run: Run) -> dict[str, object]:
    """The keys of result.json that every mode has."""
    choice = run.programs.choice
    return asked_mapping(run.config, run.plan, run.dp, run.group, memory=rank_memory(run)) | {
        "group_choice": None if choice is None else choice.reason
    }


def asked_mapping(
    config: LaunchConfig,
    plan: Plan,
    dp: int,
    group: int | None,
    *,
    memory: Sequence[RankMemory] | None,
) -> dict[str, object]:
    """The same of a plan that is not compiled."""
    parts = None if memory is None else memory_mapping(memory)
    return {
        "status": "done",
        "mode": config.mode,
        "schedule": config.schedule.name,
        "pp": config.pp,
        "dp": dp,
        "tp": config.tp,
        "ep": config.ep,
        "expert_tp": config.expert_tp,
        "sequence_parallel": config.sequence_parallel,
        "stages_per_rank": plan.stages_per_rank,
        "num_microbatches": plan.num_microbatches,
        "recompute": config.recompute.name,
        "overlap": config.overlap.name,
        # Whose figures times and memory go by.
        "hardware": None if config.costs.name == "uniform" else config.hardware.name,
        "seed": config.seed,
        "versions": versions(),
        "group": group,
        "group_choice": None,
        "split_backward": config.schedule.split_backward,
        **_remedies(config, plan),
        # The same under a name that says so beside measured figures.
        "memory_breakdown": parts,
        "predicted_memory_breakdown": parts,
    }


def _remedies(config: LaunchConfig, plan: Plan) -> dict[str, object]:
    """Of a schedule without a flush, what is done about late gradients."""
    if schedule_of(plan).synchronous:
        return {}
    return {
        "synchronous_steps": config.schedule.synchronous_steps,
        "error_feedback": plan.error_feedback,
    }


def predicted_mapping(run: Run, metrics: Metrics) -> dict[str, object]:
    """The same with the figures of the predicted step."""
    return run_mapping(run) | metrics_mapping(metrics) | recompute_mapping(metrics)


def write_pictures(run_dir: Path, panels: Sequence[Panel], run: Run, *, table: str = "") -> None:
    """schedule.txt, schedule.csv, timeline.html (with a ``table`` above it) and trace.json."""
    first = panels[0]
    assert first.metrics is not None
    write_schedule_files(run_dir, first.timeline, first.metrics)
    drawn = with_memory(panels, run)
    write_timeline_html(run_dir / "timeline.html", drawn, title=run_title(run), table=table)
    write_trace(run_dir / "trace.json", drawn)


def run_title(run: Run) -> str:
    """What a picture of the run is called."""
    config = run.config
    degrees = f"pp={config.pp} dp={run.dp}" + (f" tp={config.tp}" if config.tp > 1 else "")
    degrees += f" ep={config.ep}" if config.ep > 1 else ""
    return f"{config.schedule.name} {degrees} num_microbatches={run.num_microbatches}"


def with_memory(panels: Sequence[Panel], run: Run) -> list[Panel]:
    """The panels, a prediction with what each rank holds, and what a rank of the machine has."""
    limit = rank_capacity(run.config, run.dp).room
    return [
        panel
        if panel.metrics is None
        else replace(panel, memory=rank_memory(run), memory_limit=limit)
        for panel in panels
    ]


# Model FLOPs of a training step, and what share of the hardware's peak they are (MFU).
#
# What the model itself asks for, whatever a run does on top: matrix products of the forward and
# twice as many in the backward, no recomputation, no padding (Chowdhery et al., 2022,
# https://arxiv.org/abs/2204.02311, appendix B). Of the scores of an attention those that a causal
# mask leaves: with all of them, as that paper counts, long sequences reach more than 1.


def step_flops(run: Run) -> int | None:
    """FLOPs of one optimizer step over all replicas, two per multiply-add.

    None where only the ranks know the model.
    """
    if run.own_model:
        return None
    sequences = run.batch_size * run.dp * run.config.trainer.accumulate_grad_batches
    return 3 * model_flops(run.shape) * sequences


def ideal_step_s(run: Run) -> float | None:
    """Seconds that a step would take if every rank computed at the peak of its precision.

    Over the measured time of a step that is the MFU.
    """
    flops = step_flops(run)
    return None if flops is None else flops / (run.world_size * run_peak(run.config))


def run_peak(config: LaunchConfig) -> float:
    """FLOP/s that a rank has at most, in what the run's matrix products are computed in."""
    return config.hardware.peak(config.trainer.number_format)


def peak_mapping(config: LaunchConfig) -> dict[str, object]:
    """What ``mfu`` in result.json is a share of: of one rank."""
    return {"peak_flops": run_peak(config), "peak_format": config.trainer.number_format}


# schedule.txt and schedule.csv: what runs where, for people and for torch's own loader.


def write_schedule_files(folder: Path, timeline: Timeline, metrics: Metrics) -> None:
    write_atomically(folder / "schedule.txt", schedule_text(timeline, metrics))
    write_atomically(folder / "schedule.csv", compute_csv(timeline.program))


def schedule_text(timeline: Timeline, metrics: Metrics) -> str:
    """Key figures, then the whole timeline, one line per rank of whatever length."""
    program = timeline.program
    placement, unit = program.placement, timeline.time_unit
    peaks = " ".join(f"{peak:.4g}" for peak in metrics.peak_activations)
    lines = [
        f"# {program.schedule}: {placement.num_ranks} ranks, {placement.num_stages} stages "
        f"({placement.name}), {_microbatches(program)}",
        f"# {timeline.origin}, {metrics.costs} costs: makespan "
        f"{format_duration(timeline.makespan, unit)}, period "
        f"{format_duration(timeline.period, unit)}, bubble ratio "
        f"{format_percent(timeline.bubble_ratio)}",
    ]
    if metrics.time_unit == unit:
        lines.append(
            f"# lower bound {format_duration(metrics.lower_bound, unit)} "
            f"({metrics.binding_bound}), {format_percent(metrics.bound_gap)} above it; exposed "
            f"reduction {format_duration(metrics.exposed_grad_reduce, unit)}"
        )
        if metrics.recomputed or metrics.binding_bound.startswith("LB2"):
            lines.append(
                f"# LB1 {format_duration(metrics.lb1, unit)} (rank {metrics.lb1_rank}), "
                f"LB2 {format_duration(metrics.lb2, unit)} (rank {metrics.lb2_rank}); "
                f"{metrics.recomputed} forwards run again"
            )
    if not metrics.synchronous:
        lines.append(
            "# without a flush, figures of the steady state; versions of the weights per rank "
            f"{_spaced(metrics.weight_versions)}, sums of gradients "
            f"{_spaced(metrics.gradient_sums)}, updates by which stages are late "
            f"{_spaced(metrics.staleness)}"
        )
    lines += [
        f"# peak activations per rank, in microbatches: {peaks}",
        f"# {legend(timeline)}",
        "",
        draw(timeline),
    ]
    return "\n".join(lines) + "\n"


def _microbatches(program: Program) -> str:
    if program.updates is None:
        return f"{program.num_microbatches} microbatches"
    return f"{program.steps:g} batches of {program.updates.per_step} microbatches"


def _spaced(values: Sequence[int]) -> str:
    return " ".join(map(str, values))


def compute_csv(program: Program) -> str:
    """The compute order in torch.distributed.pipelining's ``compute_only`` notation.

    A row per rank, a cell per instruction: ``0F0`` forward, ``0B0`` full backward, ``0I0`` and
    ``0W0`` its halves, ``(0F1;3B0)OVERLAP_F_B`` a fused pair. What that notation has no word for is
    left out: recompute, reductions and optimizer steps. ``schedule=custom schedule.file=`` takes it
    back; torch, too, except where a stage stands on two ranks.
    """
    rows = ([_torch_text(i) for i in row if i.kind in ESSENTIAL_KINDS] for row in program.ranks)
    return "".join(",".join(row) + "\n" for row in rows)


def _torch_text(item: Instruction) -> str:
    """Without weight version and extra edges."""
    words = [f"{part.stage}{part.kind.value}{part.microbatch}" for part in item.parts]
    return f"({';'.join(words)}){item.kind.value}" if item.halves else words[0]
