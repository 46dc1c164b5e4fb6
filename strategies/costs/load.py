"""What a unit or a stage of a model takes, as counts: FLOPs, elements, parameters; no seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from operator import add, attrgetter
from typing import Any, TypeVar

from strategies.costs.kernels import Product, Work

Value = TypeVar("Value")


def _total(values: Sequence[Any]) -> Any:  # noqa: ANN401
    """Of numbers in their order; of tuples one with the items of all."""
    return reduce(add, values)


def _counted(values: Sequence[tuple[tuple[Any, int], ...]]) -> tuple[tuple[Any, int], ...]:
    """Each item with the sum of its counts."""
    counts: dict[Any, int] = {}
    for item, number in _total(values):
        counts[item] = counts.get(item, 0) + number
    return tuple(counts.items())


def _last(values: Sequence[Value]) -> Value:
    return values[-1]


def _summed(default: Value, how: Callable[[Sequence[Any]], Any] = _total) -> Value:
    """A field that a stage has from those of its units, and says how."""
    return field(default=default, metadata={"sum": how})


@dataclass(frozen=True, slots=True)
class Load:
    """What one unit, or one stage, takes per microbatch.

    The metadata of a field say how ``sum_loads`` adds it up; those without are given to it by hand.

    Attributes:
        forward_flops: Of one forward.
        parameters: Number of parameters.
        output_elements: Elements that go to the next stage.
        saved_elements: Elements kept from forward to backward.
        forward_sums: Elements that a forward adds up over tensor-parallel ranks, tensor by tensor.
        backward_sums: The same for a backward.
        again_flops: What a backward computes again inside its layers.
        backward_flops: Of one backward, for its inputs and for its weights; None for those of a
            forward each.
        num_units: How many units it is made of.
        owns: Names of groups of parameters that it has, which others may use, too.
        tied: (group, parameters) that it uses of other units; a stage without that unit has a copy.
        works: (kernels of a unit, units that have them); () where they are not known.
        listed: Whether a trace has listed those, all that there are: they hold on any machine.
        lean_parameters: Those of which the optimizer keeps one element less than of the others.
        update_products: (product, how many) that an update of the weights computes.
        again_sums: As ``backward_sums``, of what a backward computes again.
        first_saved_elements: What it keeps beyond ``saved_elements`` where a stage begins with it.
        rebuilt_elements: What a backward rebuilds, the most at once, beside what is kept.
        waiting_elements: What an I leaves for its W; None for ``saved_elements``.
        experts: Of its parameters those that are spread over expert-parallel ranks, all of them.
        expert_flops: Of one forward, of its experts.
        expert_saved: Of its saved elements, those of its experts' tokens.
        exchanged: Elements that a layer's tokens have on their way to experts, layer by layer.
        beside_flops: Of one forward, of what is computed while tokens are on their way to experts
            (shared experts), all layers together.
        again_exchanged: The same as ``exchanged`` of what a backward computes again.
    """

    forward_flops: float = field(metadata={"sum": _total})
    parameters: int
    output_elements: int = field(metadata={"sum": _last})
    saved_elements: int
    forward_sums: tuple[int, ...] = _summed(())
    backward_sums: tuple[int, ...] = _summed(())
    again_flops: float = _summed(0.0)
    backward_flops: tuple[float, float] | None = None
    num_units: int = _summed(1)
    owns: tuple[int, ...] = ()
    tied: tuple[tuple[int, int], ...] = ()
    works: tuple[tuple[Work, int], ...] = _summed((), _counted)
    listed: bool = _summed(False, any)
    lean_parameters: int = _summed(0)
    update_products: tuple[tuple[Product, int], ...] = _summed((), _counted)
    again_sums: tuple[int, ...] = _summed(())
    first_saved_elements: int = 0
    rebuilt_elements: int = 0
    waiting_elements: int | None = None
    experts: int = _summed(0)
    expert_flops: float = _summed(0.0)
    expert_saved: int = _summed(0)
    exchanged: tuple[int, ...] = _summed(())
    beside_flops: float = _summed(0.0)
    again_exchanged: tuple[int, ...] = _summed(())


_SUMS = {entry.name: entry.metadata["sum"] for entry in fields(Load) if "sum" in entry.metadata}
_summands = attrgetter(*_SUMS)


def sum_loads(loads: Sequence[Load]) -> Load:
    """A stage from its units; what it hands on is what its last unit hands on.

    Parameters that it shares with another stage are its own as well: each has a copy, and a state.
    """
    if not loads:
        return Load(0.0, 0, 0, 0, num_units=0)
    owned = {group for load in loads for group in load.owns}
    tied: dict[int, int] = {}
    for group, count in (pair for load in loads for pair in load.tied if pair[0] not in owned):
        tied[group] = max(count, tied.get(group, 0))
    halves = [load.backward_flops or (load.forward_flops,) * 2 for load in loads]
    inputs, weights = zip(*halves, strict=True)
    columns = zip(*map(_summands, loads), strict=True)
    sums = (how(column) for how, column in zip(_SUMS.values(), columns, strict=True))
    known = any(load.backward_flops for load in loads)
    split = any(load.waiting_elements is not None for load in loads)
    waiting = [
        n.saved_elements if n.waiting_elements is None else n.waiting_elements for n in loads
    ]
    return Load(
        parameters=sum(load.parameters for load in loads) + sum(tied.values()),
        saved_elements=loads[0].first_saved_elements + sum(load.saved_elements for load in loads),
        backward_flops=(_total(inputs), _total(weights)) if known else None,
        rebuilt_elements=_rebuilt(loads),
        waiting_elements=sum(waiting) if split else None,
        **dict(zip(_SUMS, sums, strict=True)),
    )


def _rebuilt(loads: Sequence[Load]) -> int:
    """The most that a backward rebuilds beyond what it has let go of by then: the last first."""
    most = gone = 0
    for load in reversed(loads):
        most = max(most, load.rebuilt_elements - gone)
        gone += load.saved_elements
    return most
