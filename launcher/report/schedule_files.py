"""schedule.txt and schedule.csv: what runs where, for people and for torch's own loader."""

from __future__ import annotations

from pathlib import Path

from launcher.report.ascii import draw, legend
from launcher.report.result import write_atomically
from launcher.report.summary import format_duration, format_percent
from strategies.analysis.metrics import Metrics
from strategies.analysis.timeline import Timeline
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import NEEDED_KINDS
from strategies.ir.program import Program


def write_schedule_files(folder: Path, timeline: Timeline, metrics: Metrics) -> None:
    """Writes ``schedule.txt`` and ``schedule.csv`` into a run's folder."""
    write_atomically(folder / "schedule.txt", schedule_text(timeline, metrics))
    write_atomically(folder / "schedule.csv", compute_csv(timeline.program))


def schedule_text(timeline: Timeline, metrics: Metrics) -> str:
    """Key figures, then the whole timeline, one line per rank of whatever length."""
    program = timeline.program
    placement, unit = program.placement, timeline.time_unit
    peaks = " ".join(f"{peak:.4g}" for peak in metrics.peak_activations)
    lines = [
        f"# {program.schedule}: {placement.num_ranks} ranks, {placement.num_stages} stages "
        f"({placement.name}), {program.num_microbatches} microbatches",
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
    lines += [
        f"# peak activations per rank, in microbatches: {peaks}",
        f"# {legend(timeline)}",
        "",
        draw(timeline),
    ]
    return "\n".join(lines) + "\n"


def compute_csv(program: Program) -> str:
    """The compute order in torch.distributed.pipelining's ``compute_only`` notation.

    A row per rank, a cell per instruction: ``0F0`` forward, ``0B0`` full backward, ``0I0`` and
    ``0W0`` its halves, ``(0F1;3B0)OVERLAP_F_B`` a fused pair. What that notation has no word for is
    left out: recompute, reductions and optimizer steps. ``schedule=custom schedule.file=`` takes it
    back; torch, too, except where a stage stands on two ranks.
    """
    rows = (
        [_torch_text(item) for item in row if item.kind in NEEDED_KINDS] for row in program.ranks
    )
    return "".join(",".join(row) + "\n" for row in rows)


def _torch_text(item: Instruction) -> str:
    """Without weight version and extra edges."""
    words = [f"{part.stage}{part.kind.value}{part.microbatch}" for part in item.parts]
    return f"({';'.join(words)}){item.kind.value}" if item.halves else words[0]
