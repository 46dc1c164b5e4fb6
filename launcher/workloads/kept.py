"""What a selectively recomputed layer keeps and computes again, from a list of what it does.

The rule of ``strategies.runtime.selective.region``, on names and sizes instead of tensors: a result
is kept if one of the operations that made it is; what a backward asks for and is not kept is
computed again, by running the layer up to the last such tensor; products in front of that are kept
even where no backward asks for them, so that they need not run again. Torch-free.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from strategies.recompute import Family


class Made(NamedTuple):
    """An operation.

    Attributes:
        families: Of the operation, and of those that hand its result on in the same memory; none
            for what is changed in place afterwards, which is always computed again.
        results: (name, elements) of what it makes.
        flops: Of products.
    """

    families: tuple[Family, ...]
    results: tuple[tuple[str, int], ...]
    flops: float = 0.0


class Asked(NamedTuple):
    """A tensor that a backward asks for, at the time at which the forward hands it to autograd.

    Attributes:
        name: Of a result, or of what the layer is given.
        elements: Of what the layer is given; a result has its own.
    """

    name: str
    elements: int = 0


Step = Made | Asked


def kept(steps: Sequence[Step], recomputed: Collection[Family]) -> tuple[int, float]:
    """(elements that a layer keeps, FLOPs of products that it runs again).

    Args:
        steps: What it does, in order.
        recomputed: Families whose results are not kept.
    """
    again = frozenset(recomputed)
    sizes: dict[str, int] = {}
    stays: dict[str, bool] = {}
    held: dict[str, int] = {}
    last = -1  # step that hands over the last tensor that is computed again
    for place, step in enumerate(steps):
        if isinstance(step, Made):
            for name, elements in step.results:
                sizes[name] = elements
                stays[name] = not again.issuperset(step.families)
        elif stays.get(step.name, True):
            held[step.name] = sizes.get(step.name, step.elements)
        else:
            last = place
    flops = 0.0
    for step in steps[: max(0, last)]:
        if isinstance(step, Made):
            family = step.families[0] if step.families else "activation"
            if family in again:
                flops += step.flops
            elif family == "matmul":
                held.update(step.results)
    return sum(held.values()), flops
