"""Puts the layers that have experts on ranks that hold a share of them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import nn

from strategies.errors import ModelError
from strategies.models.expert_parallel.expert_ranks import ExpertRanks
from strategies.models.tensor_parallel.tensor_ranks import Shard


@runtime_checkable
class HasExperts(Protocol):
    """A layer whose experts lie in stacked parameters ``[experts, ...]``.

    Its forward calls ``exchange.around(compute, rows, counts)`` in place of ``compute(rows,
    counts)`` where ``exchange`` is not None; see ``ExpertRanks.around``. How many experts it has to
    compute is the first size of its parameters.

    Attributes:
        num_experts: In the whole layer.
        expert_parameters: Names of the stacked parameters inside the layer.
        exchange: Who computes the experts together; None where they are all here.
    """

    num_experts: int
    expert_parameters: tuple[str, ...]
    exchange: ExpertRanks | None


class ExpertShares:
    """What has been done to a module's layers with experts.

    Attributes:
        ranks: Who holds the experts together.
        shards: Name of each stacked parameter, those of other pipeline ranks included -> how it is
            cut over them, maybe into one.
    """

    def __init__(self, module: nn.Module, ranks: ExpertRanks) -> None:
        """Looks at the layers; nothing is cut.

        Raises:
            ModelError: There are none, and ep > 1; or ep does not divide their experts.
        """
        self.ranks = ranks
        layers = named_expert_layers(module)
        self.shards = {
            f"{name}.{inside}": Shard(0, layer.num_experts, ranks.size)
            for name, layer in layers
            for inside in layer.expert_parameters
        }
        if ranks.size > 1 and not layers:
            raise ModelError(
                f"ep={ranks.size} spreads experts over ranks, and {type(module).__name__} has no "
                "layer that declares experts (num_experts, expert_parameters and exchange, see "
                "strategies/models/expert_parallel/expert_shares.py). Try ep=1."
            )
        for name, layer in layers:
            if layer.num_experts % ranks.size:
                fit = max(n for n in range(1, ranks.size) if layer.num_experts % n == 0)
                raise ModelError(
                    f"ep={ranks.size} does not divide the {layer.num_experts} experts of {name}. "
                    f"Try ep={fit}."
                )

    def apply(self, module: nn.Module, unit_name: str) -> None:
        """Cuts the experts of one unit, whose weights are there; the others' memory is free."""
        for name, layer in named_expert_layers(module.get_submodule(unit_name), unit_name):
            layer.exchange = self.ranks
            assert isinstance(layer, nn.Module)
            for inside in layer.expert_parameters:
                path, _, leaf = inside.rpartition(".")
                owner = layer.get_submodule(path)
                whole = owner.get_parameter(leaf)
                assert whole.shape[0] == layer.num_experts
                if self.ranks.size > 1:
                    shard = self.shards[f"{name}.{inside}"]
                    share = shard.local(whole.detach(), self.ranks.rank)
                    setattr(owner, leaf, nn.Parameter(share, requires_grad=whole.requires_grad))


def named_expert_layers(module: nn.Module, prefix: str = "") -> list[tuple[str, HasExperts]]:
    return [
        (name, layer)
        for name, layer in module.named_modules(prefix=prefix)
        if isinstance(layer, HasExperts)
    ]
