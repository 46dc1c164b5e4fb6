"""Interleaved 1F1B with split backward: weight gradients fill what bubble the V stages leave.

Qi et al., 2023, https://arxiv.org/abs/2401.10241 (ZB-H1's rule on interleaved stages); the order is
that of ``ScheduleInterleavedZeroBubble`` in torch.distributed.pipelining.

2 ranks, 4 microbatches, 2 stages per rank, B twice as long as F, I and W one F each; a slot is half
an F, and the second half stands below the first (``.``: idle)::

    rank 0 | 0F0 0F1 2F0 2F1  .  2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0
    rank 1 |  .  1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1

    rank 0 | 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
    rank 1 | 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3

Rank r warms up with (V-1)N + P-1-r forwards, N = ``schedule.group`` (default: the least N >= P that
leaves no last group smaller than P), then runs one F, one I, and from the r-th backward on one W,
so its Ws lag r behind. Where F = I = W and N = P divides M, that takes M(F+I+W) + (P-1)F/V, the
least possible, with P microbatches held on every rank; a last group that is not full may leave a
gap. For other costs F and I keep their order, and the Ws move into the time in which ranks wait
(``weight_gaps.py``) where that is faster, at the same peak.
Any M >= 1: the order is that of the next multiple of N without the microbatches that do not exist,
as in ``rounds.py``.
"""

from __future__ import annotations

from dataclasses import replace

from strategies.ir.instruction import Instruction, input_gradient, weight_gradient
from strategies.ir.kinds import Kind
from strategies.ir.program import Program, chain, loop
from strategies.schedules.rounds import grouped_order
from strategies.schedules.schedule import Rows, Schedule, Shape, drop_padding
from strategies.schedules.search.weight_gaps import fill_bubbles_with_w


def order(shape: Shape) -> Rows:
    """Warm-up, one F and one I and one W in turn, drain; Ws moved where the costs are not equal."""
    rows = _equal_costs(shape)
    if shape.durations is None or shape.durations.equal:
        return rows
    placement = loop(shape.pp, shape.stages_per_rank)
    links = chain(placement.num_stages)
    program = Program("interleaved_zb", placement, shape.num_microbatches, rows, links)
    return fill_bubbles_with_w(program, shape.durations).ranks


def _equal_costs(shape: Shape) -> Rows:
    group = shape.group or shape.pp
    padded = replace(shape, num_microbatches=-(-shape.num_microbatches // group) * group)
    rows = []
    for rank, unsplit in enumerate(grouped_order(padded, group)):
        forwards = [item for item in unsplit if item.kind is Kind.F]
        cells = [
            (item.stage, item.microbatch)
            for item in unsplit
            if item.kind is Kind.B and item.microbatch is not None
        ]
        inputs = [input_gradient(*cell) for cell in cells]
        weights = [weight_gradient(*cell) for cell in cells]
        warmup = min((shape.stages_per_rank - 1) * group + shape.pp - 1 - rank, len(forwards))
        row: list[Instruction] = forwards[:warmup]
        for index in range(len(cells)):
            row += forwards[warmup + index : warmup + index + 1]
            row.append(inputs[index])
            row += weights[index - rank : index - rank + 1] if index >= rank else []
        row += weights[max(len(cells) - rank, 0) :]
        rows.append(drop_padding(row, shape))
    return tuple(rows)


INTERLEAVED_ZB = Schedule(
    "interleaved_zb",
    order,
    stages_per_rank=2,
    virtual_stages=True,
    grouped=True,
    cost_aware=True,
    splits_backward=True,
)
