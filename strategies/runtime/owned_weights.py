"""The parameters of this rank's stages: their names, and who else holds them."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn

from strategies.ir.placement import Placement
from strategies.runtime.groups import holders_of
from strategies.runtime.mesh import Communicators, Coordinates
from strategies.runtime.stage_model import StageModel
from strategies.runtime.tensor_parallel.ranks import TensorRanks


class OwnedWeights:
    """Parameters by stage and name, once the model is cut.

    Attributes:
        by_stage: Of this rank's stages, under the names of the uncut module.
        shared: Name of a weight that several stages use -> those stages, on all ranks alike.
    """

    def __init__(self, model: StageModel, placement: Placement, where: Coordinates) -> None:
        self._placement = placement
        self._where = where
        self._model = model
        self.shared = {name: stages for name, stages in model.shared_parameters()}
        self.by_stage = {
            stage: dict(model.stage_parameters(stage))
            for stage in placement.stages_of(where.pp_rank)
        }

    def named(self) -> dict[str, nn.Parameter]:
        """By name; one that several of the rank's stages use has one entry."""
        return {name: p for named in self.by_stage.values() for name, p in named.items()}

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Each parameter once."""
        seen: set[int] = set()
        for named in self.by_stage.values():
            for parameter in named.values():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def trained(self) -> tuple[bool, ...]:
        """Which of them want a gradient, in a fixed order."""
        return tuple(p.requires_grad for named in self.by_stage.values() for p in named.values())

    def own_of(self, stage: int) -> list[nn.Parameter]:
        """What is trained of a stage and of no other."""
        named = self.by_stage[stage].items()
        return [p for name, p in named if p.requires_grad and name not in self.shared]

    def trained_shared(self) -> dict[str, nn.Parameter]:
        """What is trained and used by several stages, by name in order: the same on all holders."""
        named = self.named()
        names = sorted(name for name in self.shared if name in named)
        return {name: named[name] for name in names if named[name].requires_grad}

    def sharing(self, name: str) -> tuple[int, ...]:
        """Global ranks that hold a weight which several stages use."""
        return holders_of(self.shared[name], self._placement, self._where)

    def holders(self, *, share: bool) -> dict[str, tuple[int, ...]]:
        """Global ranks that hold the same of a parameter and of its optimizer state.

        Of a parameter that several stages share, only those of the first one: the others may hold
        less of it, under fewer names.

        Args:
            share: Those that hold the same share of it, instead of the same whole.
        """
        where = self._where
        sharers = (where.tp_rank,) if share else range(where.tp)

        def ranks_of(stage: int) -> tuple[int, ...]:
            owners = self._placement.owners(stage)
            return tuple(rank for sharer in sharers for rank in where.replicas(owners, sharer))

        found = {name: ranks_of(stage) for stage, named in self.by_stage.items() for name in named}
        shared = {
            name: ranks_of(min(stages)) for name, stages in self.shared.items() if name in found
        }
        return found | shared

    def synchronise(self, communicators: Communicators, tensor_ranks: TensorRanks | None) -> None:
        """Gives all copies of a weight the value of the first; collective.

        Modules that nobody seeded start differently in every process. Call when parameters are on
        their device.
        """
        if self._where.world_size == 1:
            return

        def broadcast(tensor: Tensor, members: tuple[int, ...]) -> None:
            group = communicators.get("reduce", members)
            if group is not None:
                dist.broadcast(tensor.detach(), src=members[0], group=group)

        done = set(self.shared)
        for stage, named in self.by_stage.items():
            owners = self._where.replicas(self._placement.owners(stage))
            for name, parameter in named.items():
                if name not in done:
                    done.add(name)
                    broadcast(parameter, owners)
        named = self.named()
        for name in sorted(self.shared):
            if name in named:
                broadcast(named[name], self.sharing(name))
        if tensor_ranks is not None:
            for name, parameter in named.items():
                if name not in self._model.shards:
                    tensor_ranks.broadcast_(parameter.detach())
