"""What fits into the memory of a rank: the one rule, for plans, simulations, pages and refusals.

A rank's tensors at their worst moment (``analysis.memory``) are what torch's allocator hands out.
Beside them the device holds what the allocator rounds up, the process's context with the code of
its libraries, and a buffer set for each communicator that the rank is in: those that share
matrices (tp), messages of the pipeline (pp), replicas (dp), and the exchange of experts (ep). The
figures are a card's (``conf/hardware``, with their sources); of a machine that has none of them all
memory is for tensors.
"""

from __future__ import annotations

from typing import NamedTuple

from strategies.costs.hardware import Hardware


class Capacity(NamedTuple):
    """The memory of one rank, in bytes.

    Attributes:
        total: All that there is.
        context: Of it the process's.
        communicators: Of it the buffers of all communicators.
        rounding: What the allocator reserves beyond what it hands out, as a share of that.
    """

    total: int
    context: float
    communicators: float
    rounding: float

    @property
    def room(self) -> int:
        """The most bytes of tensors that fit."""
        return int((self.total - self.context - self.communicators) / (1.0 + self.rounding))

    def fits(self, held: float) -> bool:
        return held <= self.room

    def taken(self, held: float) -> float:
        """What the device has to have for so many bytes of tensors."""
        return held * (1.0 + self.rounding) + self.context + self.communicators

    def needs(self, held: float) -> str:
        """What the device has to have for so many bytes of tensors, and for what.

        >>> Capacity(int(80e9), 1e9, 2e9, 0.05).needs(60e9)
        '66 GB (tensors 60, allocator 3, context 1, communicators 2)'
        """
        beside = (
            ("allocator", held * self.rounding),
            ("context", self.context),
            ("communicators", self.communicators),
        )
        text = f"{self.taken(held) / 1e9:.4g} GB"
        parts = [("tensors", held), *(part for part in beside if part[1])]
        if len(parts) == 1:
            return text
        return f"{text} ({', '.join(f'{name} {size / 1e9:.3g}' for name, size in parts)})"

    def margin(self, held: float) -> str:
        """The same where it fits, and what is left."""
        left = (self.total - self.taken(held)) / 1e9
        return f"{self.needs(held)}; {left:.3g} of {self.total / 1e9:.4g} GB are left"


def capacity(hardware: Hardware, *, tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1) -> Capacity:
    """Of a rank of this layout."""
    communicators = sum(degree > 1 for degree in (tp, pp, dp, ep))
    return Capacity(
        round(hardware.memory_gb * 1e9),
        1e9 * hardware.context_gb,
        1e9 * hardware.communicator_gb * communicators,
        hardware.allocator_loss,
    )
