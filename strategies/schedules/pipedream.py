"""PipeDream: 1F1B without a flush, an update per microbatch, stashed weights.

Narayanan et al., 2019, https://arxiv.org/abs/1806.03377. What is called a minibatch there is a
microbatch here.

2 ranks, 1 microbatches, B twice as long as F; 5 batches from an empty pipeline to an empty one
(``#1``: with version 1 of the weights, ``-``: still running, ``.``: idle)::

    rank 0 | 0F0#0 0F1#0   .     .   0B0#0   -   0F2#1 0B1#0   -
    rank 1 |   .   1F0#0 1B0#0   -   1F1#1 1B1#1   -   1F2#2 1B2#2

    rank 0 | 0F3#2 0B2#1   -   0F4#3 0B3#2   -     .   0B4#3   -
    rank 1 |   -   1F3#3 1B3#3   -   1F4#4 1B4#4   -     .     .

Every rank updates its weights behind every backward. So that the backward of a microbatch reads the
weights of its forward, rank r keeps (stashes) the P-r versions that microbatches under way use. The
weights of rank r have seen P-1-r microbatches less than those of training on one device: with g
counted from 0,

    W_r(g + 1) = W_r(g) - step(gradient of microbatch g at W_r(max(g - (P-1-r), 0)))

With ``schedule.vertical_sync=true`` a microbatch uses one version on all ranks, that of the first,
P-1 updates late: a rank behind it applies its gradients when the first one does. Rank r then holds
P-r versions and r+1 sums of gradients.

With accumulation over K batches, of a microbatch each, K of them make one update. The weights that
an update's microbatches use are the newest that rank r has when the first of them comes:
ceil((P-1-r) / K) updates late; with one version on all ranks ceil((P-1) / K). From K = P-1 on that
is one update, and none on the last rank.

In steady state a rank never waits: bubble 0, a period of F + B per microbatch. Filling and draining
take (P-1) (F + B) together, once. Rank r holds P-r activations, like 1F1B. Any M.
"""

from __future__ import annotations

from strategies.errors import PlanError
from strategies.ir.program import Updates
from strategies.schedules import one_f_one_b
from strategies.schedules.schedule import Rows, Schedule, Shape


def order(shape: Shape) -> Rows:
    """1F1B over all batches behind each other."""
    return one_f_one_b.order(shape)


def _updates(shape: Shape) -> Updates:
    """As many microbatches as are under way behind the stage, or before the first, in updates."""
    last, size = shape.pp - 1, shape.accumulation
    behind = (last,) * shape.pp if shape.vertical_sync else tuple(range(last, -1, -1))
    return Updates(size, tuple(-(-count // size) for count in behind), shape.num_microbatches)


def _rule(shape: Shape) -> None:
    if shape.accumulation > 1 and shape.num_microbatches > 1:
        raise PlanError(
            f"num_microbatches={shape.num_microbatches} with accumulate_grad_batches="
            f"{shape.accumulation}: pipedream makes an update of every microbatch, or of as many "
            "as accumulate_grad_batches says, each a batch. Try num_microbatches=1 with smaller "
            "batches, or schedule=pipedream_2bw."
        )


# An update per microbatch, so usually one each.
PIPEDREAM = Schedule("pipedream", order, repeats=True, usual=1, rule=_rule, updates=_updates)
