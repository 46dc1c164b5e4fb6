"""From the recorders of all ranks to one timeline, of the same type that the simulator makes."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from strategies.timeline import Timeline

if TYPE_CHECKING:
    from strategies.runtime.engine import Engine


def gather_timeline(engine: Engine, *, median: bool) -> Timeline | None:
    """One recorded training step over the ranks of this replica's pipeline; collective.

    The ranks of one machine share a clock. Steps are told by their number, which all ranks count
    alike.

    Returns:
        None when no full training step was recorded.
    """
    full = [r for r in engine.recorder.kept if r.program is engine.programs.train]
    chosen = None
    if full:
        spans = {record.step: record.finished - record.begun for record in full}
        middle = statistics.median_low(spans.values())
        by_span = next(step for step, span in spans.items() if span == middle)
        chosen = by_span if median else full[-1].step
    where = engine.coordinates
    replica = where.replica(where.dp_rank)
    group = engine.control_group
    if group is not None:
        box = [chosen]
        dist.broadcast_object_list(box, src=replica[0], group=group)
        chosen = box[0]
    record = next((r for r in full if r.step == chosen), None)
    own: Any = None if record is None else engine.recorder.seconds(record)
    gathered: list[Any] = [own]
    if group is not None:
        gathered = [None] * len(replica)
        dist.all_gather_object(gathered, own, group=group)
        gathered = gathered[where.tp_rank :: where.tp]
    if any(entry is None for entry in gathered):
        return None
    zero = min(min(v for v in start if v) for start, _ in gathered)
    program = engine.programs.train
    return Timeline(
        program,
        tuple(tuple(max(0.0, v - zero) for v in start) for start, _ in gathered),
        tuple(tuple(max(0.0, v - zero) for v in end) for _, end in gathered),
        "s",
        "measured",
    )
