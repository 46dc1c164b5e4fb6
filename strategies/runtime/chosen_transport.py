"""What carries this rank's boundary tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist

from strategies.runtime.mesh import Communicators, Coordinates
from strategies.runtime.tensor_parallel.ranks import TensorRanks
from strategies.runtime.tensor_parallel.sliced_transport import SlicedTransport
from strategies.runtime.transport import (
    GlooTransport,
    NcclTransport,
    StagedTransport,
    StrictTransport,
    Transport,
)


def chosen_transport(
    backend: str,
    communicators: Communicators,
    where: Coordinates,
    device: torch.device,
    tensor_ranks: TensorRanks | None,
) -> Transport | None:
    """The transport of a backend; None for a pipeline of one rank.

    Tensor-parallel ranks send a slice each, unless their stream is cut along the sequence anyway.
    """
    transport = _whole(backend, communicators, where, device)
    if transport is None or tensor_ranks is None or tensor_ranks.sequence:
        return transport
    return SlicedTransport(transport, tensor_ranks)


def _whole(
    backend: str, communicators: Communicators, where: Coordinates, device: torch.device
) -> Transport | None:
    pipeline = where.pipeline(where.dp_rank)
    group = communicators.get("messages", pipeline)
    if group is None:
        return None
    if backend == "nccl":

        def pair(source: int, target: int) -> dist.ProcessGroup:
            found = communicators.get("messages", (pipeline[source], pipeline[target]))
            assert found is not None
            return found

        return NcclTransport(pair, where.pp_rank)
    if backend == "strict":
        return StrictTransport(group)
    # Gloo sends host memory only.
    staged = backend == "staged" or device.type == "cuda"
    return StagedTransport(group) if staged else GlooTransport(group)
