"""Puts the layers that have experts on ranks that hold a share of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import nn

from strategies.errors import ModelError
from strategies.models.expert_parallel.expert_ranks import ExpertRanks
from strategies.models.tensor_parallel.tensor_ranks import Grid, Shard


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

    Where ranks share each expert's matrices (``expert_tp``) a layer says in ``expert_slices``, by
    name, along which dimension a stacked parameter is cut so that what the experts give on each
    rank adds up to the whole: a network's inner width.
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
            ModelError: There are none, and ep > 1; or ep does not divide their experts; or what
                they declare is not there.
        """
        self.ranks = ranks
        self._cut: list[HasExperts] = []
        layers = named_expert_layers(module)
        _check_declared(layers)
        self.shards: dict[str, Shard | Grid] = {
            f"{name}.{inside}": _cut(module, ranks, name, layer, inside)
            for name, layer in layers
            for inside in layer.expert_parameters
        }
        if ranks.slicers is not None and not layers:
            raise ModelError(
                f"expert_tp=true cuts experts over tp={ranks.slicers.size} ranks, and "
                f"{type(module).__name__} has no layer that declares experts. Try expert_tp=false."
            )
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
            self._cut.append(layer)
            assert isinstance(layer, nn.Module)
            for inside in layer.expert_parameters:
                stack = layer.get_parameter(inside)
                if self.ranks.size > 1 or self.ranks.slicers is not None:
                    shard = self.shards[f"{name}.{inside}"]
                    # The same object: its hooks stay, and lists that have it.
                    stack.data = shard.local(stack.detach(), self.ranks.place)

    def compute_whole(self, whole: bool) -> None:
        """Lets layers compute with all of their experts, which are there, or ask the others."""
        for layer in self._cut:
            layer.exchange = None if whole else self.ranks


def _check_declared(layers: Sequence[tuple[str, HasExperts]]) -> None:
    """Refuses stacks that are not there, are not one matrix per expert, or have two names.

    Raises:
        ModelError: Names the layer and the parameter.
    """
    seen: dict[int, str] = {}
    for name, layer in layers:
        assert isinstance(layer, nn.Module)
        found = dict(layer.named_parameters(remove_duplicate=False))
        for inside in layer.expert_parameters:
            stack = found.get(inside)
            if stack is None:
                raise ModelError(
                    f"expert_parameters of {name} names {inside!r}, and the layer has no such "
                    f"parameter. Give names that it has: {', '.join(found) or 'none'}."
                )
            if not stack.dim() or stack.shape[0] != layer.num_experts:
                raise ModelError(
                    f"{name}.{inside} has the shape {tuple(stack.shape)}, and its layer says "
                    f"num_experts={layer.num_experts}. Give it one entry per expert of the "
                    "whole layer, along the first dimension."
                )
            other = seen.setdefault(id(stack), f"{name}.{inside}")
            if other != f"{name}.{inside}":
                raise ModelError(
                    f"{name}.{inside} and {other} are one parameter, and experts that layers "
                    "share cannot be spread over ranks. Give each layer its own, or use ep=1 and "
                    "tp=1."
                )


def _cut(
    module: nn.Module, ranks: ExpertRanks, name: str, layer: HasExperts, inside: str
) -> Shard | Grid:
    """How a stacked parameter is cut.

    Raises:
        ModelError: Its matrices are to be cut, and the layer does not say how, or do not come out
            even.
    """
    experts = Shard(0, layer.num_experts, ranks.size)
    if ranks.slicers is None:
        return experts
    tp = ranks.slicers.size
    slices: dict[str, int] | None = getattr(layer, "expert_slices", None)
    if slices is None or inside not in slices:
        raise ModelError(
            f"expert_tp=true cuts each expert of {name} over tp={tp} ranks, and the layer does not "
            f"say along which dimension of {inside} (expert_slices, see "
            "strategies/models/expert_parallel/expert_shares.py). Try expert_tp=false."
        )
    size = module.get_parameter(f"{name}.{inside}").shape[slices[inside]]
    if size % tp:
        raise ModelError(
            f"expert_tp=true: tp={tp} does not divide the {size} of dimension {slices[inside]} of "
            f"{name}.{inside}. Try expert_tp=false."
        )
    return Grid(experts, Shard(slices[inside], size, tp))


def named_expert_layers(module: nn.Module, prefix: str = "") -> list[tuple[str, HasExperts]]:
    return [
        (name, layer)
        for name, layer in module.named_modules(prefix=prefix)
        if isinstance(layer, HasExperts)
    ]
