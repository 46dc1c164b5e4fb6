"""``python -m launcher explain rank0.json rank1.json``: why a step of somebody's run took so long.

The files are torch.profiler's (Kineto, Chrome's format; .gz as well), one per rank of a pipeline,
of torch.distributed.pipelining, torchtitan or NeMo AutoModel; a folder stands for all in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.config import LaunchConfig
from launcher.report.ascii import draw
from launcher.report.html import Panel, write_timeline_html
from launcher.report.predicted import write_schedule_files, write_trace
from launcher.report.result import metrics_mapping, versions, write_result
from launcher.report.summary import format_duration, format_percent
from launcher.terminal import say, terminal_width
from strategies.analysis.metrics import Metrics, measure
from strategies.errors import DataError
from strategies.referee.trace import Explanation, Wait, explain, put_together, read_trace

_LISTED = 5  # waits, and causes
_ENDINGS = (".json", ".json.gz", ".pt.trace.json", ".trace.json")
_MOST_FILES = 4096


def run(config: LaunchConfig, run_dir: Path) -> int:
    """Reads, brings onto one clock, blames, simulates and compares."""
    traces = [read_trace(path) for path in _files(config.trace)]
    found = explain(put_together(traces))
    timeline = found.measured.timeline
    metrics = measure(timeline, found.costs)
    write_schedule_files(run_dir, timeline, metrics)
    panels = _panels(found, metrics)
    write_timeline_html(run_dir / "timeline.html", panels, title="a trace, explained")
    write_trace(run_dir / "trace.json", panels)
    write_result(run_dir / "result.json", _mapping(found, metrics))
    say(draw(timeline, width=terminal_width()))
    say("\n".join([*_about(found), *_slow(found), *_blamed(found), *_compared(found)]))
    say(f"files: {run_dir}")
    return 0


def _files(named: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for name in named:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = sorted(each for each in path.iterdir() if each.name.endswith(_ENDINGS))
            if not inside:
                raise DataError(f"trace={name} is a folder without a trace (.json, .json.gz).")
            found += inside
        else:
            found.append(path)
    if len(found) > _MOST_FILES:
        raise DataError(f"trace= names {len(found)} files; at most {_MOST_FILES} are read.")
    return found


def _panels(found: Explanation, metrics: Metrics) -> list[Panel]:
    panels = [
        Panel("measured", found.measured.timeline, metrics),
        Panel("the same order, measured durations", found.same, measure(found.same, found.costs)),
    ]
    if found.without_slow is not None:
        panels.append(Panel("the same, without the slow rank", found.without_slow))
    if found.ours:
        best = found.ours[0]
        panels.append(Panel(f"{best.name}, measured durations", best.timeline))
    return panels


# ---------------------------------------------------------------------------------------- in words


def _about(found: Explanation) -> list[str]:
    measured = found.measured
    program, clocks = measured.timeline.program, measured.clocks
    files = len(measured.traces)
    lines = [
        f"{files} ranks, {program.placement.num_stages} stages, {program.num_microbatches} "
        f"microbatches; {_steps(measured.steps)}"
    ]
    if clocks.moved:
        moved = ", ".join(
            f"rank {rank} by {shift * 1e3:+.3f} ms (+- {doubt * 1e3:.3f})"
            for rank, (shift, doubt) in enumerate(
                zip(clocks.shift_s, clocks.uncertain_s, strict=True)
            )
            if shift
        )
        lines.append(f"clocks moved, as {clocks.messages} messages say: {moved}")
    else:
        lines.append(f"clocks agree: none of {clocks.messages} messages contradicts them")
    if clocks.early_s > 0:
        lines.append(
            f"some message still arrives {_s(clocks.early_s)} before it was sent: clocks drift"
        )
    if measured.replicas:
        lines.append(
            f"{len(measured.replicas)} files are of other replicas and left out, as "
            f"{measured.replicas[0]}"
        )
    return lines


def _steps(steps: Sequence[float]) -> str:
    if len(steps) == 1:
        return f"one step, {_s(steps[0])}"
    return (
        f"{len(steps)} steps, {_s(min(steps))} to {_s(max(steps))}; the one in the middle is shown"
    )


def _slow(found: Explanation) -> list[str]:
    timeline = found.measured.timeline
    lines = [
        f"bubble {format_percent(timeline.bubble_ratio)} of {_s(timeline.makespan)}; "
        f"communication that shows {_s(found.exposed)} on all ranks together"
    ]
    if found.slow_rank is None or found.slow_stage is None:
        return [*lines, "no rank is slower than the others by more than 5 %"]
    rank, factor = found.slow_rank
    stage, times = found.slow_stage
    own = timeline.program.placement.stages_of(rank)
    line = f"slow: rank {rank}, a microbatch takes {factor:.2f} times what it takes elsewhere"
    if len(own) > 1:
        line += f"; of its stages {list(own)} most of all stage {stage} ({times:.2f} times)"
    else:
        line += f" (stage {stage})"
    lines.append(line)
    if found.without_slow is not None:
        lines.append(
            f"  were it like the others: {_s(found.without_slow.makespan)}, bubble "
            f"{format_percent(found.without_slow.bubble_ratio)}"
        )
    return lines


def _blamed(found: Explanation) -> list[str]:
    lines = ["longest waits:"]
    lines += [f"  {_wait(wait)}" for wait in found.waits[:_LISTED]]
    total = sum(wait.seconds for wait in found.waits)
    lines.append("whom ranks waited for, in the end:")
    for (rank, stage, kind), seconds in list(found.blame.items())[:_LISTED]:
        share = format_percent(seconds / total)
        lines.append(f"  {stage}{kind.value} on rank {rank}: {_s(seconds)}, {share} of all waits")
    own = sum(wait.own for wait in found.waits)
    if own > 0.01 * total:
        lines.append(f"  nobody: {_s(own)}, the value was there (a host that launches late)")
    return lines


def _wait(wait: Wait) -> str:
    if wait.before is None:
        head = f"rank {wait.rank} is done, {_s(wait.seconds)} before the last"
    else:
        head = f"rank {wait.rank}, before {wait.before}: {_s(wait.seconds)}"
    if wait.awaited is not None:
        head += f" for {wait.awaited} of rank {wait.source}"
    if wait.blamed:
        rank, item, _ = max(wait.blamed, key=lambda entry: entry[2])
        head += f", most of it while rank {rank} ran {item}"
    elif wait.own:
        head += "; nothing was missing"
    return head


def _compared(found: Explanation) -> list[str]:
    took = found.measured.timeline.makespan
    same = found.same.makespan
    lines = [
        f"the same order with these durations and nothing in between: {_s(same)} "
        f"({same / took - 1:+.1%}), bubble {format_percent(found.same.bubble_ratio)}"
    ]
    for ours in found.ours[:3]:
        lines.append(
            f"  {ours.name:<17} {_s(ours.makespan)} ({ours.makespan / same - 1:+.1%})   "
            f"holds {ours.peak:g} microbatches' activations"
        )
    return lines


def _s(seconds: float) -> str:
    return format_duration(seconds, "s")


def _mapping(found: Explanation, metrics: Metrics) -> dict[str, object]:
    measured = found.measured
    clocks = measured.clocks
    slow = found.slow_rank
    return {
        "status": "done",
        "mode": "explain",
        "versions": versions(),
        **metrics_mapping(metrics),
        "steps_s": list(measured.steps),
        "busy_s": list(found.busy),
        "exposed_communication_s": found.exposed,
        "clock_shift_s": list(clocks.shift_s),
        "clock_uncertain_s": list(clocks.uncertain_s),
        "clock_early_s": clocks.early_s,
        "slow_rank": None if slow is None else slow[0],
        "slow_rank_factor": None if slow is None else slow[1],
        "slow_stage": None if found.slow_stage is None else found.slow_stage[0],
        "forward_s": list(found.costs.forward),
        "backward_s": list(found.costs.backward),
        "message_s": found.costs.message,
        "same_order_s": found.same.makespan,
        "same_order_bubble_ratio": found.same.bubble_ratio,
        "without_slow_s": None if found.without_slow is None else found.without_slow.makespan,
        "without_slow_bubble_ratio": None
        if found.without_slow is None
        else found.without_slow.bubble_ratio,
        "waits": [
            {
                "rank": wait.rank,
                "before": None if wait.before is None else str(wait.before),
                "seconds": wait.seconds,
                "for": None if wait.awaited is None else str(wait.awaited),
                "of_rank": wait.source,
                "message_s": wait.message,
                "own_s": wait.own,
                "blamed": [[rank, str(item), each] for rank, item, each in wait.blamed],
            }
            for wait in found.waits
        ],
        "blame": [
            {"rank": rank, "stage": stage, "kind": kind.value, "seconds": seconds}
            for (rank, stage, kind), seconds in found.blame.items()
        ],
        "alternatives": [
            {"schedule": each.name, "step_time": each.makespan, "peak_activations": each.peak}
            for each in found.ours
        ],
    }
