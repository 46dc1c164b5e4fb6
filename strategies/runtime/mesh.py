"""Processes as a grid, and every communicator that a program needs, made once in one order.

Global rank = pp_rank * dp + dp_rank: neighbours in a reduction lie next to each other (inside a
node first), the pipeline spans nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a process stands.

    Attributes:
        pp: Number of pipeline ranks.
        dp: Number of replicas.
        pp_rank: Pipeline rank of this process.
        dp_rank: Replica of this process.
    """

    pp: int
    dp: int
    pp_rank: int
    dp_rank: int

    @classmethod
    def of(cls, global_rank: int, *, pp: int, dp: int) -> Coordinates:
        """Coordinates of a global rank; dp is innermost."""
        return cls(pp, dp, global_rank // dp, global_rank % dp)

    @property
    def world_size(self) -> int:
        """Number of processes, pp * dp."""
        return self.pp * self.dp

    def global_rank(self, pp_rank: int, dp_rank: int) -> int:
        """The inverse of ``of``."""
        return pp_rank * self.dp + dp_rank

    def pipeline(self, dp_rank: int) -> tuple[int, ...]:
        """Global ranks of one replica, first stage first."""
        return tuple(self.global_rank(rank, dp_rank) for rank in range(self.pp))

    def replicas(self, pp_ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Global ranks of all replicas of some pipeline ranks."""
        return tuple(
            self.global_rank(pp_rank, dp_rank) for pp_rank in pp_ranks for dp_rank in range(self.dp)
        )


@dataclass
class Communicators:
    """Process groups by purpose and members; all are created by ``create`` on every process."""

    coordinates: Coordinates
    _groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = field(default_factory=dict)

    def create(
        self,
        wanted: list[tuple[str, tuple[int, ...]]],
        *,
        backends: dict[str, str],
        timeout_s: float,
    ) -> None:
        """Makes all groups in the order of ``wanted``, which is the same on every process.

        Args:
            wanted: (purpose, global ranks); groups of one process are left out.
            backends: Backend per purpose.
            timeout_s: How long an operation of theirs waits.
        """
        for key in dict.fromkeys(wanted):
            purpose, ranks = key
            if len(ranks) > 1 and key not in self._groups:
                # Every process takes part in making every group, also in foreign ones.
                group = dist.new_group(
                    list(ranks),
                    backend=backends[purpose],
                    timeout=timedelta(seconds=timeout_s),
                )
                assert isinstance(group, dist.ProcessGroup) or group is not None
                self._groups[key] = group

    def get(self, purpose: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group, None for a single process."""
        return None if len(ranks) < 2 else self._groups[purpose, ranks]

    def destroy(self) -> None:
        """Gives all groups back; collective, in the order of their making."""
        for group in self._groups.values():
            if dist.get_rank(group) >= 0:
                dist.destroy_process_group(group)
        self._groups.clear()
