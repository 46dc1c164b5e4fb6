"""Orders with messages for the referee's tests: broken ones, and those that torch generates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strategies.ir.program import Program
from strategies.plan import ScheduleFile
from strategies.schedules.custom import read_order

# Both ranks send before they receive.
FACING = """\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1
"""
# Rank 1 takes the first message for the second one.
CROSSED = """\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1
"""
# Rank 0 wants its second stage before its first, whose result that stage needs.
TURNED = """\
2RECV_F0,2F0,2SEND_F0,0F0,0SEND_F0,2RECV_B0,2B0,2SEND_B0,0RECV_B0,0B0
1RECV_F0,1F0,1SEND_F0,3RECV_F0,3F0,3B0,3SEND_B0,1RECV_B0,1B0,1SEND_B0
"""
# Three ranks in a ring: each sends to the next one, whose receive stands behind its own send.
RING = """\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0,1RECV_F1,1F1,1SEND_F1,1RECV_B1,1B1,1SEND_B1
2RECV_F0,2F0,2B0,2SEND_B0,2RECV_F1,2F1,2B1,2SEND_B1
"""


def order(text: str) -> Program:
    return read_order(ScheduleFile("x.csv", text), messages=True)


def torch_orders(
    degrees: tuple[int, ...], counts: tuple[int, ...]
) -> Iterator[tuple[str, int, int, str]]:
    """(name, ranks, microbatches, text with messages) of what torch 2.13 can write."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    # Its list for 1F1B counts the last rank's forwards from 1; its runtime does not use that list.
    for name in (
        "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
        "DualPipeV",
    ):  # fmt: skip
        stages = 1 if name == "GPipe" else 2  # Fewer, it refuses, for all but 1F1B.
        for pp in degrees:
            for count in counts:
                try:
                    rows = visualizer.get_schedule_ops(
                        name, pp, count, stages, with_comms=name != "GPipe"
                    )
                except ValueError:
                    continue  # Fewer microbatches than the schedule takes, or stages.
                if name == "GPipe":
                    bare = {
                        rank: [cell for cell in row if cell is not None and cell.is_compute_op]
                        for rank, row in enumerate(rows)
                    }
                    placed = schedules._add_send_recv(bare, lambda stage: stage, pp)
                    rows = [placed[rank] for rank in range(pp)]
                cells = (["" if cell is None else str(cell) for cell in row] for row in rows)
                yield name, pp, count, "\n".join(map(",".join, cells))
