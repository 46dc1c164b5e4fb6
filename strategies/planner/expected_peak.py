"""What zero-bubble orders hold by their papers: enough to leave some out before making them.

Making such an order takes up to seconds; that most of them do not fit is known beforehand. Only O2
goes by it, and only where the formula misses the memory by a margin, because an order made for
given costs may hold somewhat less.
"""

from __future__ import annotations

from strategies.planner.group import Group
from strategies.planner.layout import Order
from strategies.planner.space import Space

_MARGIN = 0.85


def expected_bytes(group: Group, order: Order, space: Space) -> int | None:
    """A little less than the worst rank's peak by the formula; None where there is none.

    zb_h1 and zb_v hold P microbatches on every rank, zb_h2 2 (P - r) - 1 on rank r
    (Qi et al., 2023, https://arxiv.org/abs/2401.10241, and 2024, https://arxiv.org/abs/2405.15362).
    """
    known = order.schedule in ("zb_h1", "zb_h2", "zb_v")
    if space.level != "O2" or space.schedule is not None or not known:
        return None
    if group.recompute.rewrites:
        return None
    assert group.table.activation_bytes is not None
    assert group.table.state_bytes is not None
    layout = group.layout
    ranks = [0.0] * layout.pp
    for stage, rank in enumerate(group.placement.copies[0]):
        held = min(_held(order.schedule, layout.pp, stage), layout.num_microbatches)
        ranks[rank] += group.table.state_bytes[stage]
        ranks[rank] += _MARGIN * held * group.table.activation_bytes[stage]
    return int(max(ranks))


def _held(schedule: str, pp: int, stage: int) -> int:
    """Microbatches that a stage holds; in V shape a rank's two stages share 2 P of them."""
    if schedule == "zb_h2":
        return 2 * (pp - stage) - 1
    return pp if schedule == "zb_h1" else 2 * pp - stage
