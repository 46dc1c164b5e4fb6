"""Bytes per element of everything that precision decides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ElementSizes:
    """Bytes of one element.

    Attributes:
        weight: Of the model, as it computes and is gathered.
        gradient: Of its sum.
        wire: Of a gradient on its way to be reduced.
        activation: Kept, and sent from stage to stage.
        moment: Of the optimizer's state.
        main: Of the optimizer's own copy of the weights; 0 where it updates the model's.
    """

    weight: int = 4
    gradient: int = 4
    wire: int = 4
    activation: int = 4
    moment: int = 4
    main: int = 0

    @classmethod
    def all(cls, size: int) -> ElementSizes:
        """One size for everything, and no copy."""
        return cls(size, size, size, size, size)
