"""Processes as a grid, and every communicator that a program needs, made once in one order.

Global rank = (pp_rank * dp + dp_rank) * tp + tp_rank: ranks that share matrices lie next to each
other (inside a node), then those that reduce gradients; the pipeline spans nodes. The experts of a
stage are spread over blocks of ep neighbours among the dp * tp ranks that share it; where ranks
share an expert's matrices, too, a block is ep times as many, and tokens go to ranks that have the
same share.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from strategies.errors import PlanError
from strategies.ir.program import Placement
from strategies.runtime.messages.joining import connecting

_NETWORK = "GLOO_SOCKET_IFNAME"  # Gloo reads it where a group is made.


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a process stands among pipeline ranks, replicas, and sharers of a stage's matrices."""

    pp: int
    dp: int
    pp_rank: int
    dp_rank: int
    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    sliced: int = 1  # ranks that share an expert's matrices: tp, or 1 where each has whole ones

    @classmethod
    def of(
        cls, global_rank: int, *, pp: int, dp: int, tp: int = 1, ep: int = 1, sliced: int = 1
    ) -> Coordinates:
        rest, tp_rank = divmod(global_rank, tp)
        return cls(pp, dp, rest // dp, rest % dp, tp, tp_rank, ep, sliced)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    def global_rank(self, pp_rank: int, dp_rank: int, tp_rank: int | None = None) -> int:
        """The inverse of ``of``; this process's tp_rank where none is given, as in the others."""
        own = self.tp_rank if tp_rank is None else tp_rank
        return (pp_rank * self.dp + dp_rank) * self.tp + own

    def pipeline(self, dp_rank: int, tp_rank: int | None = None) -> tuple[int, ...]:
        """Global ranks of one pipeline, first stage first."""
        return tuple(self.global_rank(rank, dp_rank, tp_rank) for rank in range(self.pp))

    def replicas(self, pp_ranks: tuple[int, ...], tp_rank: int | None = None) -> tuple[int, ...]:
        """Global ranks of all replicas of some pipeline ranks, of one tp_rank."""
        return tuple(
            self.global_rank(pp_rank, dp_rank, tp_rank)
            for pp_rank in pp_ranks
            for dp_rank in range(self.dp)
        )

    def sharers(self, pp_rank: int, dp_rank: int) -> tuple[int, ...]:
        """Global ranks that share the matrices of one pipeline rank."""
        return tuple(self.global_rank(pp_rank, dp_rank, rank) for rank in range(self.tp))

    @property
    def place(self) -> int:
        """Among the dp * tp ranks of a pipeline rank, which have as many shares of its batch."""
        return self.dp_rank * self.tp + self.tp_rank

    @property
    def ep_rank(self) -> int:
        """Which of the block's shares of each layer's experts this process holds."""
        return self.place % self.block

    @property
    def block(self) -> int:
        """Neighbours that hold all experts of a stage together."""
        return self.ep * self.sliced

    @property
    def holds_first(self) -> bool:
        """Whether this process is of the first block, which speaks for the others."""
        return self.place < self.block

    @property
    def exchanges_across(self) -> bool:
        """Whether replicas exchange tokens, so that none can run a pass without the others."""
        return self.tp % self.block > 0

    def exchangers(self) -> tuple[int, ...]:
        """Global ranks that together hold all experts of a stage, and exchange tokens.

        Of ranks that share an expert's matrices those with the same share.
        """
        first = self.pp_rank * self.dp * self.tp + self.place - self.ep_rank
        own = self.ep_rank % self.sliced
        return tuple(range(first + own, first + self.block, self.sliced))

    def expert_holders(self, pp_ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Global ranks of some pipeline ranks that hold the same experts as this process."""
        size = self.dp * self.tp
        return tuple(
            pp_rank * size + place
            for pp_rank in pp_ranks
            for place in range(self.ep_rank, size, self.block)
        )

    def replica(self, dp_rank: int) -> tuple[int, ...]:
        """Global ranks of one replica: all its pipeline ranks' sharers, in order."""
        return tuple(rank for pp_rank in range(self.pp) for rank in self.sharers(pp_rank, dp_rank))


def check_world(*, pp: int, dp: int, tp: int = 1, world_size: int) -> None:
    """Refuses a world that the degrees do not fill."""
    wanted = pp * dp * tp
    if wanted != world_size:
        sharers = "" if tp == 1 else f" times tp={tp}"
        replicas, rest = divmod(world_size, pp * tp)
        fills = f", or dp={replicas}" if replicas and not rest else ""
        raise PlanError(
            f"pp={pp} times dp={dp}{sharers} is {wanted} processes, but there are {world_size}. "
            f"Try devices={wanted}{fills}."
        )


@dataclass
class Communicators:
    """Process groups by purpose and members; all are created by ``create`` on every process."""

    coordinates: Coordinates
    _groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A gloo group has sockets and threads, one of NCCL device memory and threads; a process may
        # train more than once. What is left at the process's end, ``abort_nccl`` sees to.
        weakref.finalize(self, _give_back, self._groups).atexit = False

    def create(
        self,
        wanted: list[tuple[str, tuple[int, ...]]],
        *,
        backends: dict[str, str],
        timeout_s: float,
    ) -> None:
        """Makes all groups, but for those of one process, in an order equal on every process."""
        timeout = timedelta(seconds=timeout_s)
        with connecting(), _one_loop():
            for key in dict.fromkeys(wanted):
                purpose, ranks = key
                if len(ranks) > 1 and key not in self._groups:
                    # Every process takes part in making every group, also in foreign ones.
                    group = dist.new_group(list(ranks), backend=backends[purpose], timeout=timeout)
                    self._groups[key] = group

    def get(self, purpose: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group, None for a single process."""
        return None if len(ranks) < 2 else self._groups[purpose, ranks]

    def has(self, purpose: str, ranks: tuple[int, ...]) -> bool:
        return (purpose, ranks) in self._groups

    def alone(self) -> dist.ProcessGroup:
        """A group of this process only; no other takes part in making it."""
        rank = dist.get_rank()
        key = ("alone", (rank,))
        if key not in self._groups:
            group = dist.new_group([rank], backend="gloo", use_local_synchronization=True)
            assert isinstance(group, dist.ProcessGroup)
            self._groups[key] = group
        return self._groups[key]

    def destroy(self) -> None:
        """Gives all groups back; collective, in the order of their making.

        None is left where the default group has gone: a fit that fails ends all connections.
        """
        for group in self._groups.values() if dist.is_initialized() else ():
            if dist.get_rank(group) >= 0:
                dist.destroy_process_group(group)
        self._groups.clear()


@contextmanager
def _one_loop() -> Iterator[None]:
    """Gloo groups that are made in it share the thread that looks after the sockets.

    Torch gives each group one of its own, which looks around 100 times a second: 1 ms of CPU per
    second and group. They share that of the default group, with the network that it has chosen;
    not one for which somebody chooses another network meanwhile.
    """
    network = os.environ.get(_NETWORK)
    gloo: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)
    world: Any = dist.group.WORLD
    try:
        known = world._get_backend(torch.device("cpu")).options
        devices, threads = known._devices, known._threads
    except (AttributeError, RuntimeError):
        devices = []
    if not devices or not hasattr(gloo, "_Options"):
        yield  # A torch that has hidden these, or no gloo: groups as torch makes them.
        return

    class Sharing(gloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            if os.environ.get(_NETWORK) != network:
                super().__init__(store, rank, size, timeout)
                return
            options = gloo._Options()  # each keeps its own
            options._devices, options._threads, options._timeout = devices, threads, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = Sharing  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = gloo  # type: ignore[misc]


def _give_back(groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]) -> None:
    """Gives groups back without the other processes, which come to that at times of their own."""
    for group in groups.values() if dist.is_initialized() else ():
        if group not in distributed_c10d._world.pg_map or dist.get_rank(group) < 0:
            continue  # It was ended with all others, or is one of other ranks.
        if dist.get_backend(group) == "gloo":
            dist.destroy_process_group(group)
        else:
            # To destroy a communicator of NCCL, all its ranks of a machine have to do it at once.
            distributed_c10d._abort_process_group(group)
    groups.clear()


def abort_nccl() -> None:
    """Gives NCCL's communicators back, where the process ends and others may have ended before.

    Else torch warns that they are still there, and their destructors may wait for a peer.
    """
    if not (dist.is_initialized() and dist.is_nccl_available()):
        return
    for group in list(distributed_c10d._world.pg_map):
        try:
            backend: Any = group._get_backend(torch.device("cuda"))
        except RuntimeError:
            continue  # of host memory alone
        if isinstance(backend, dist.ProcessGroupNCCL):
            backend.abort()


Wanted = list[tuple[str, tuple[int, ...]]]


def holders_of(
    stages: Iterable[int], placement: Placement, where: Coordinates, sharer: int | None = None
) -> tuple[int, ...]:
    """Global ranks of one tp_rank (None: this process's) that hold any of some stages."""
    owners = sorted({rank for stage in stages for rank in placement.owners(stage)})
    return where.replicas(tuple(owners), sharer)


def tensor_groups(where: Coordinates) -> Wanted:
    """Who shares the matrices of a stage; needed before the model is cut."""
    ranks = range(where.pp)
    return [("tensor", where.sharers(pp, dp)) for pp in ranks for dp in range(where.dp)]


def exchange_groups(where: Coordinates) -> Wanted:
    """Who holds the experts of a stage together; needed before the model is cut."""
    blocks = range(0, where.world_size, where.block)
    return [
        ("exchange", tuple(range(first + own, first + where.block, where.sliced)))
        for first in blocks
        for own in range(where.sliced)
    ]


def expert_groups(where: Coordinates, placement: Placement, *, shards: bool) -> Wanted:
    """Who holds the same experts of a stage, for their gradients."""
    wanted: Wanted = []
    for stage in range(placement.num_stages):
        for place in range(where.block):
            rest, tp_rank = divmod(place, where.tp)
            one = replace(where, pp_rank=0, dp_rank=rest, tp_rank=tp_rank)
            holders = one.expert_holders(placement.owners(stage))
            wanted.append(("experts", holders))
            if shards:
                wanted.append(("control", holders))
    return wanted


def neighbours(
    placement: Placement, skips: Iterable[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Ordered pairs of pipeline ranks between which tensors travel, in both directions.

    Those of stages that follow each other, or that a value ``skips`` to. NCCL keeps a communicator
    with a thread for each, so other pairs get none.
    """
    links = [*((stage, stage + 1) for stage in range(placement.num_stages - 1)), *skips]
    ends = {(copy[a], copy[b]) for copy in placement.copies for a, b in links}
    return tuple(sorted({pair for a, b in ends if a != b for pair in ((a, b), (b, a))}))


def running_groups(
    where: Coordinates,
    placement: Placement,
    shared: Iterable[tuple[int, ...]],
    *,
    shards: bool,
    pairs: Iterable[tuple[int, int]] = (),
) -> Wanted:
    """All groups that any rank's program needs.

    Per weight that several stages use, ``shared`` has those stages. Each of the ordered ``pairs``
    of pipeline ranks gets a group of its own.
    """
    shared, pairs = tuple(shared), tuple(pairs)
    wanted: Wanted = [("control", where.replica(replica)) for replica in range(where.dp)]
    if shards or where.dp > 1:
        wanted.append(("control", tuple(range(where.world_size))))
    for sharer in range(where.tp):
        for replica in range(where.dp):
            pipeline = where.pipeline(replica, sharer)
            wanted.append(("messages", pipeline))
            wanted += [("messages", (pipeline[a], pipeline[b])) for a, b in pairs]
        for stage in range(placement.num_stages):
            owners = where.replicas(placement.owners(stage), sharer)
            wanted.append(("reduce", owners))
            if shards:
                # Optimizer state is put together from host memory.
                wanted.append(("control", owners))
        wanted += [("reduce", holders_of(s, placement, where, sharer)) for s in shared]
        wanted += [("metrics", where.replicas((rank,), sharer)) for rank in range(where.pp)]
    return wanted


def verdict_groups(where: Coordinates) -> Wanted:
    """Who agrees on an update while later microbatches run: in an order of its own."""
    everybody = tuple(range(where.world_size))
    return [("verdict", where.replica(replica)) for replica in range(where.dp)] + [
        ("verdict", everybody)
    ]


def checkpoint_groups(where: Coordinates) -> Wanted:
    """One rank's disk may take much longer than any message between ranks."""
    return [("checkpoint", tuple(range(where.world_size)))]


def hook_groups(where: Coordinates, *, fast: bool, together: bool) -> Wanted:
    """Ranks of each replica, for people's hooks, and pipelines, for what their stages bring.

    ``fast``: for tensors a group beside it. ``together``: and all ranks, where replicas have to
    come to the same.
    """
    replicas = [where.replica(replica) for replica in range(where.dp)]
    sharers = range(where.tp)
    pipelines = [where.pipeline(replica, s) for replica in range(where.dp) for s in sharers]
    found = [("hooks", ranks) for ranks in dict.fromkeys((*replicas, *pipelines))]
    found += [("whole", pipeline) for pipeline in pipelines if fast]
    if together and where.dp > 1:
        found.append(("hooks", tuple(sorted(rank for one in replicas for rank in one))))
    return found


def create(communicators: Communicators, wanted: Wanted, *, backend: str, timeout_s: float) -> None:
    """Makes groups, the same on all processes; what is small or waits for a disk goes by gloo."""
    if communicators.coordinates.world_size > 1:
        fast = "nccl" if backend == "nccl" else "gloo"
        # A step may gather what it has on the device, and a hook what it has on the host.
        both = "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
        backends = {
            "control": "gloo", "verdict": "gloo", "metrics": both, "messages": fast, "reduce": fast,
            "tensor": fast, "exchange": fast, "experts": fast, "checkpoint": "gloo",
            "hooks": "gloo", "whole": fast,
        }  # fmt: skip
        communicators.create(wanted, backends=backends, timeout_s=timeout_s)
