"""Rates that all ranks have begun with, and whether they still do: a number per step says it.

A callback that sets a rate on one rank alone trains some stages with another rate than the others,
and nothing shows it. So each rank says in the message that it sends behind its forwards anyway what
its rates come to; where that differs, all ranks look, and stop before the update.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from strategies.runtime.messages.exchange import everybody
from strategies.runtime.messages.fingerprint import (
    CHANGING,
    MismatchError,
    alike,
    rates,
    tell_odd_rates,
)


class SharedRates:
    """Of the optimizers of a training.

    Attributes:
        names: Those of rates that are the same on all ranks.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """Collective."""
        self._optimizers = list(optimizers)
        self.names = alike(everybody().everyone(rates(self._optimizers)))
        self._places = [
            (number, index, key)
            for number, optimizer in enumerate(self._optimizers)
            for index in range(len(optimizer.param_groups))
            for key in CHANGING
            if f"{key} of group {index} of optimizer {number}" in self.names
        ]
        self._last: tuple[Any, ...] = ()
        self._mark = 0

    def mark(self) -> int:
        """The same number on ranks whose rates are the same now."""
        groups = [optimizer.param_groups for optimizer in self._optimizers]
        values = tuple(_plain(groups[n][i].get(key)) for n, i, key in self._places)
        if values != self._last:
            self._last, self._mark = values, zlib.crc32(repr(values).encode())
        return self._mark

    def refuse(self) -> None:
        """Names what differs; collective, where a mark has."""
        exchange = everybody()
        own = {name: v for name, v in rates(self._optimizers).items() if name in self.names}
        odd = tell_odd_rates(exchange.everyone((exchange.rank, "", own)))
        if odd is not None:
            raise MismatchError(
                f"{odd}. This step was not applied.",
                fix="Change rates on every rank alike, and go on with the last checkpoint.",
            )


def _plain(value: Any) -> Any:
    """A rate may be a tensor; one on a device is not waited for."""
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" else None
    return tuple(value) if isinstance(value, list) else value
