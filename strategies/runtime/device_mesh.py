"""The ranks as torch's ``DeviceMesh``, for code of users that speaks it (DTensor, collectives)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from strategies.runtime.mesh import Communicators, Coordinates


def make_device_mesh(
    where: Coordinates, communicators: Communicators, device: torch.device
) -> DeviceMesh:
    """A mesh ``[pp, dp, tp]`` over the groups that the pipeline has already.

    No rank waits for another, and no group of several processes is made. The pipeline's own traffic
    goes over the same groups: use them between steps, on all members alike.

    Args:
        where: This process.
        communicators: Its groups.
        device: Where its stages run.
    """
    replicas = where.replicas((where.pp_rank,))
    # Those of gradients are on the fast backend, but stages with two owners reduce over both.
    purpose = "reduce" if communicators.has("reduce", replicas) else "metrics"
    groups: list[dist.ProcessGroup] = []
    for kind, members in (
        ("messages", where.pipeline(where.dp_rank)),
        (purpose, replicas),
        ("tensor", where.sharers(where.pp_rank, where.dp_rank)),
    ):
        group = communicators.get(kind, members)
        groups.append(communicators.alone() if group is None else group)
    ranks = torch.arange(where.world_size).view(where.pp, where.dp, where.tp)
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=("pp", "dp", "tp"))
