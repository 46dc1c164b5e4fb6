"""PipeDream: 1F1B without a flush, an update per microbatch, stashed weights.

Narayanan et al., 2019, https://arxiv.org/abs/1806.03377. What is called a minibatch there is a
microbatch here.

Every rank updates its weights behind every backward. So that the backward of a microbatch reads the
weights of its forward, rank r keeps (stashes) the P-r versions that microbatches under way use. The
weights of rank r have seen P-1-r microbatches less than those of training on one device: with g
counted from 0,

    W_r(g + 1) = W_r(g) - step(gradient of microbatch g at W_r(max(g - (P-1-r), 0)))

With ``schedule.vertical_sync=true`` a microbatch uses one version on all ranks, that of the first,
P-1 updates late: a rank behind it applies its gradients when the first one does. Rank r then holds
P-r versions and r+1 sums of gradients.

In steady state a rank never waits: bubble 0, a period of F + B per microbatch. Filling and draining
take (P-1) (F + B) together, once. Rank r holds P-r activations, like 1F1B. Any M.
"""

from __future__ import annotations

from strategies.schedules.one_f_one_b import order
from strategies.schedules.schedule import Lateness, Schedule, Shape


def _lateness(shape: Shape) -> Lateness:
    """As many updates as there are microbatches under way behind the stage, or before the first."""
    last = shape.pp - 1
    late = (last,) * shape.pp if shape.vertical_sync else tuple(range(last, -1, -1))
    return Lateness(1, late)


PIPEDREAM = Schedule("pipedream", order, repeats=True, lateness=_lateness)
