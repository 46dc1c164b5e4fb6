"""PipeDream-2BW: 1F1B without a flush, two versions of the weights, one update per batch.

Double-buffered weight updates. Narayanan et al., 2021, https://arxiv.org/abs/2006.09503.

2 ranks, 2 microbatches, B twice as long as F; 4 batches from an empty pipeline to an empty one
(``#1``: with version 1 of the weights, ``-``: still running, ``.``: idle)::

    rank 0 | 0F0#0 0F1#0   .     .   0B0#0   -   0F2#0 0B1#0   -   0F3#0 0B2#0   -   0F4#1 0B3#0
    rank 1 |   .   1F0#0 1B0#0   -   1F1#0 1B1#0   -   1F2#0 1B2#0   -   1F3#0 1B3#0   -   1F4#1

    rank 0 |   -   0F5#1 0B4#1   -   0F6#2 0B5#1   -   0F7#2 0B6#2   -     .   0B7#2   -
    rank 1 | 1B4#1   -   1F5#1 1B5#1   -   1F6#2 1B6#2   -   1F7#2 1B7#2   -     .     .

Every rank goes on with the next batch while the gradients of the one before come back. The
gradients of a batch are added up (coalesced) and make one update, which is applied when the next
batch has passed: batch n, counted from 0, uses version max(n - 1, 0) on all stages, forwards and
backwards alike, so that

    W(n + 1) = W(n) - step(gradient of batch n at W(max(n - 1, 0)))

In the paper's words microbatch k, counted from 1, uses version max(floor((k - 1) / M) - 1, 0). The
gradient is one update late, whatever P is; behind an empty pipeline (at the beginning, and wherever
it was drained) the first batch is not late.

In steady state a rank never waits: bubble 0 from M = P on, a period of M (F + B). Filling and
draining take (P-1) (F + B) together, once. Rank r holds P-r activations, like 1F1B, at most 2
versions of its weights (1 on the last rank, which has no microbatch under way when it updates) and
2 sums of gradients: that of the batch before, which is reduced over the replicas meanwhile, and
this one's. The reduction has r + M-P+1 microbatches of compute to run under on rank r. M >= P.

``schedule.error_feedback=1`` corrects each update u(n) by what the one before turns out to have
been off by, W(n + 1) = W(n) + u(n) + (u(n) - u(n - 1)), after Zmushko et al., 2026,
https://arxiv.org/abs/2606.30634; one more copy of the weights, and two versions on the last rank,
too. ``schedule.synchronous_steps=N`` flushes in the first N steps.

With accumulation over K batches an update takes all of their microbatches: what is said of M and of
a batch then holds of K M and of K batches.
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
    """One update, on every stage."""
    batch = shape.num_microbatches
    return Updates(batch * shape.accumulation, (1,) * shape.pp, batch)


def _rule(shape: Shape) -> None:
    batches = shape.accumulation
    if shape.num_microbatches * batches < shape.pp:
        several = f" over accumulate_grad_batches={batches} batches" if batches > 1 else ""
        raise PlanError(
            f"num_microbatches={shape.num_microbatches}{several}: pipedream_2bw keeps two versions "
            "of the weights, and with fewer microbatches per update than ranks "
            f"(pp={shape.pp}) those under way would need more. Try "
            f"num_microbatches={-(-shape.pp // batches)}, or schedule=pipedream num_microbatches=1."
        )


PIPEDREAM_2BW = Schedule("pipedream_2bw", order, repeats=True, rule=_rule, updates=_updates)
