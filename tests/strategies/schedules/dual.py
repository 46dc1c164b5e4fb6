"""What the tests of DualPipe and of its V share: torch's lists, and programs without pairs."""

from __future__ import annotations

import pytest

from strategies.compiler import compile_compute
from strategies.ir.program import Program
from strategies.ir.verify import verify
from strategies.lowering.send_recv import add_messages
from strategies.passes.variants import accumulate_only
from strategies.plan import Plan


def without_pairs(schedule: str, pp: int, num_microbatches: int) -> Program:
    """The same order, lowered, with each pair's forward and backward as two instructions."""
    compute = compile_compute(Plan(schedule, pp, num_microbatches))
    rows = tuple(tuple(part for item in row for part in item.parts) for row in compute.ranks)
    return verify(add_messages(accumulate_only(compute.with_ranks(rows))))


def torchs_lists(pp: int, num_microbatches: int) -> list[list[str]]:
    """Rank -> instructions of torch's DualPipeV, spelled as ours are."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    rows = visualizer.get_schedule_ops("DualPipeV", pp, num_microbatches, 2)
    return [
        [str(action) for action in row if action is not None and "REDUCE" not in str(action)]
        for row in rows
    ]
