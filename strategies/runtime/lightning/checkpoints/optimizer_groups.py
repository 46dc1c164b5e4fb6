"""Optimizers in a checkpoint: state by names of parameters, and their order in a stock file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from strategies.errors import CheckpointError
from strategies.models.unit_model import HasUnits
from strategies.runtime.lightning.checkpoints import stock_file
from strategies.runtime.lightning.checkpoints.stock_file import (
    Order,
)
from strategies.runtime.messages.exchange import everybody
from strategies.runtime.update.main_optimizer import MainOptimizer

if TYPE_CHECKING:
    from strategies.runtime.lightning.checkpoints.checkpointing_strategy import (
        CheckpointingStrategy,
    )


class OptimizerGroups:
    """Names, groups and order of what the optimizers of this rank update.

    Attributes:
        orders: As ``configure_optimizers()`` has said when it was asked; None before.
    """

    def __init__(self, strategy: CheckpointingStrategy) -> None:
        self._strategy = strategy
        self.orders: list[Order] | None = None

    def state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part, keyed by parameter names instead of positions; collective."""
        named = self._strategy.engine.named_parameters()
        # Sharded state has been put together on the first replica.
        holders = (
            {} if self._strategy.engine.mains.sharded else self._strategy.engine.holders(share=True)
        )
        state = self._named_state(optimizer, named)
        return self._strategy._shares(holders).optimizer_pieces(state, named)

    def _named_state(self, optimizer: Optimizer, named: dict[str, nn.Parameter]) -> dict[str, Any]:
        for main in self._strategy._main_optimizers:
            if main.optimizer is getattr(optimizer, "optimizer", optimizer):
                return main.named_state(named, group_of=self._strategy.engine.owners_group)
        return name_optimizer_state(optimizer, named)

    def stock_orders(self) -> list[Order]:
        """The parameters of the optimizers as they are now, in the whole module; collective."""
        if self._strategy._hooks is not None:
            found = self._strategy._hooks.group_names()
        elif self._strategy.coordinates.pp == 1:
            found = self._own_groups()
        else:
            return self._asked_orders()
        aliases = self._strategy.whole.aliases
        return [
            [[aliases.get(name, [name]) for name in group] for group in groups] for groups in found
        ]

    def _own_groups(self) -> list[list[list[str]]]:
        """Per optimizer and group the names of what is updated on this rank."""
        assert self._strategy.lightning_module is not None
        module = self._strategy.lightning_module.named_parameters(remove_duplicate=False)
        names = {id(parameter): name for name, parameter in module}
        names |= {id(p): name for name, p in self._strategy.engine.named_parameters().items()}
        return [
            [[names.get(id(p), "") for p in group] for group in main.groups]
            for main in self.updaters()
        ]

    def updaters(self) -> list[MainOptimizer]:
        return self._strategy._main_optimizers or [
            MainOptimizer.plain(each) for each in self._strategy.optimizers
        ]

    def _asked_orders(self) -> list[Order]:
        """Of ranks that have their own parameters alone: as ``configure_optimizers()`` says.

        Asked once, before the first step: later it may say something else. Groups that were added
        since have their parameters in the order of the module.
        """
        if self.orders is None:
            module = self._strategy.lightning_module
            assert module is not None
            with self._strategy.whole.shown(self._strategy.engine.model):
                self.orders = stock_file.stock_orders(module)
        added = [
            groups[len(order) :]
            for groups, order in zip(self._own_groups(), self.orders, strict=True)
        ]
        told = everybody().everyone(added)
        aliases = self._strategy.whole.aliases
        orders: list[Order] = []
        for index, order in enumerate(self.orders):
            there = zip(*(theirs[index] for theirs in told), strict=True)
            members = [{name for names in group for name in names} for group in there]
            more = [
                [aliases[n] for n in self._strategy.whole.names if n in group] for group in members
            ]
            orders.append([*order, *more])
        return orders

    def check(self, *, saves: bool) -> None:
        """Refuses optimizers that a checkpoint could not hold, before the first step; collective.

        Raises:
            CheckpointError: The same on all ranks.
        """
        problem = None
        own = self._own_groups()
        try:
            if saves:
                for optimizer in self._strategy.optimizers:
                    name_optimizer_state(optimizer, self._strategy.engine.named_parameters())
        except CheckpointError as error:
            problem = str(error)
        asked = self._strategy._options.checkpoints
        as_files = asked == "file" or (
            asked == "auto" and not isinstance(self._strategy.lightning_module, HasUnits)
        )
        if (
            saves
            and as_files
            and self._strategy._hooks is None
            and self._strategy.coordinates.pp > 1
        ):
            for groups, order in zip(own, self._asked_orders(), strict=True):
                for names, members in zip(groups, order, strict=True):
                    known = {alias for aliases in members for alias in aliases}
                    for name in names:
                        if name not in known:
                            problem = problem or stock_file.tell_unordered(name)
        problems = [said for said in everybody().everyone(problem) if said is not None]
        if problems:
            raise CheckpointError(problems[0])


def name_optimizer_state(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """An optimizer's state keyed by parameter names."""
    names = {id(parameter): name for name, parameter in named.items()}
    plain = getattr(optimizer, "optimizer", optimizer)
    groups = []
    for group in plain.param_groups:
        unknown = [p for p in group["params"] if id(p) not in names]
        if unknown:
            raise CheckpointError(
                "the optimizer updates a parameter that is no part of the module, so it has no "
                "name in a checkpoint. Build optimizers from self.parameters()."
            )
        rest = {key: value for key, value in group.items() if key != "params"}
        groups.append({**rest, "params": [names[id(p)] for p in group["params"]]})
    state = {names[id(parameter)]: dict(entry) for parameter, entry in plain.state.items()}
    return {"state": state, "param_groups": groups}
