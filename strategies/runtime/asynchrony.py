"""Do reductions really go on by themselves? Asked once, before the first step.

A reduction that waits inside its call stands in the backward it was to hide under, and nothing in
its result tells: the run is only slow. Torch's own ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` does that to
every collective.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from strategies.errors import PlanError
from strategies.runtime.reduction import Reduction
from strategies.synchronous_reductions import synchronous_reductions, torch_waits

_PATIENCE_S = 30.0  # for a call that takes microseconds


def check_asynchronous(
    group: dist.ProcessGroup,
    members: Sequence[int],
    start: Callable[[Tensor], Reduction],
    device: torch.device,
    *,
    patience_s: float = _PATIENCE_S,
) -> None:
    """Starts a small reduction on all members but the last, which joins when it hears of them.

    If the call waited for the last member, that one would wait for word in vain. Collective over
    the group; its members' clocks do not matter.

    Args:
        group: Of the reductions.
        members: Its global ranks.
        start: What starts a reduction over the group.
        device: Where gradients are.
        patience_s: How long the last member waits for word.

    Raises:
        PlanError: A reduction has become synchronous; the last member sees it.
    """
    if torch_waits(os.environ):
        raise PlanError(synchronous_reductions(os.environ))
    probe = torch.zeros(len(members), device=device)
    # From here on everybody is there.
    dist.all_reduce(probe, group=group)
    probe.cpu()
    store = PrefixStore(f"asynchronous/{group.group_name}", _get_default_store())
    *others, last = members
    if dist.get_rank() != last:
        reduction = start(probe)
        store.set(str(dist.get_rank()), "started")
    else:
        try:
            store.wait([str(member) for member in others], timedelta(seconds=patience_s))
        except dist.DistStoreError as error:
            raise PlanError(synchronous_reductions(os.environ)) from error
        reduction = start(probe)
    reduction.finish()
