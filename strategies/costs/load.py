"""What a unit or a stage of a model takes, as counts: FLOPs, elements, parameters; no seconds."""

from __future__ import annotations

from dataclasses import dataclass

from strategies.costs.kernels import Product, Work


@dataclass(frozen=True, slots=True)
class Load:
    """What one unit, or one stage, takes per microbatch.

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

    forward_flops: float
    parameters: int
    output_elements: int
    saved_elements: int
    forward_sums: tuple[int, ...] = ()
    backward_sums: tuple[int, ...] = ()
    again_flops: float = 0.0
    backward_flops: tuple[float, float] | None = None
    num_units: int = 1
    owns: tuple[int, ...] = ()
    tied: tuple[tuple[int, int], ...] = ()
    works: tuple[tuple[Work, int], ...] = ()
    listed: bool = False
    lean_parameters: int = 0
    update_products: tuple[tuple[Product, int], ...] = ()
    again_sums: tuple[int, ...] = ()
    first_saved_elements: int = 0
    rebuilt_elements: int = 0
    waiting_elements: int | None = None
    experts: int = 0
    expert_flops: float = 0.0
    expert_saved: int = 0
    exchanged: tuple[int, ...] = ()
    beside_flops: float = 0.0
    again_exchanged: tuple[int, ...] = ()


def sum_loads(loads: list[Load]) -> Load:
    """A stage from its units; what it hands on is what its last unit hands on.

    Parameters that it shares with another stage are its own as well: each has a copy, and a state.
    """
    flops = again = inputs = weights = expert_flops = beside_flops = 0.0
    parameters = lean = units = waiting = experts = expert_saved = 0
    exchanged: list[int] = []
    again_exchanged: list[int] = []
    saved = loads[0].first_saved_elements if loads else 0
    known = False
    owned: set[int] = set()
    tied: dict[int, int] = {}
    works: dict[Work, int] = {}
    updates: dict[Product, int] = {}
    forward_sums: list[int] = []
    backward_sums: list[int] = []
    again_sums: list[int] = []
    for load in loads:
        flops += load.forward_flops
        again += load.again_flops
        parameters += load.parameters
        lean += load.lean_parameters
        experts += load.experts
        expert_flops += load.expert_flops
        beside_flops += load.beside_flops
        expert_saved += load.expert_saved
        exchanged += load.exchanged
        again_exchanged += load.again_exchanged
        saved += load.saved_elements
        units += load.num_units
        forward_sums += load.forward_sums
        backward_sums += load.backward_sums
        again_sums += load.again_sums
        waiting += load.saved_elements if load.waiting_elements is None else load.waiting_elements
        owned.update(load.owns)
        for work, number in load.works:
            works[work] = works.get(work, 0) + number
        for product, number in load.update_products:
            updates[product] = updates.get(product, 0) + number
        for group, count in load.tied:
            tied[group] = max(count, tied.get(group, 0))
        both = load.backward_flops
        known = known or both is not None
        inputs += load.forward_flops if both is None else both[0]
        weights += load.forward_flops if both is None else both[1]
    parameters += sum(count for group, count in tied.items() if group not in owned)
    return Load(
        flops,
        parameters,
        loads[-1].output_elements if loads else 0,
        saved,
        tuple(forward_sums),
        tuple(backward_sums),
        again,
        (inputs, weights) if known else None,
        units,
        works=tuple(works.items()),
        listed=any(load.listed for load in loads),
        lean_parameters=lean,
        update_products=tuple(updates.items()),
        again_sums=tuple(again_sums),
        rebuilt_elements=_rebuilt(loads),
        waiting_elements=waiting if any(n.waiting_elements is not None for n in loads) else None,
        experts=experts,
        expert_flops=expert_flops,
        expert_saved=expert_saved,
        exchanged=tuple(exchanged),
        beside_flops=beside_flops,
        again_exchanged=tuple(again_exchanged),
    )


def _rebuilt(loads: list[Load]) -> int:
    """The most that a backward rebuilds beyond what it has let go of by then: the last first."""
    most = gone = 0
    for load in reversed(loads):
        most = max(most, load.rebuilt_elements - gone)
        gone += load.saved_elements
    return most
