"""What a stage's passes take, from FLOPs and bytes: seconds of its F, B, I and W.

On a GPU what the kernels of its units take (``kernels``); else FLOPs over reached peak, or bytes
over memory bandwidth where that takes longer, and a backward is twice a forward, half of it for the
inputs.

Ranks that share matrices (tp) add up tensors as replicas do. In a whole backward that runs under
the weights' gradients, as what sequence-parallel layers gather again does. A boundary tensor
travels as one slice per such rank and is gathered.

Ranks that share experts (ep) exchange tokens in both directions, in a forward and in a backward,
and what runs meanwhile is the layer's shared experts. What the fullest of them gets over the mean
is a figure that is given.

Of schedules, placements and replicas this knows nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strategies.costs.hardware import (
    ElementSizes,
    Group,
    Hardware,
    NumberFormat,
    all_to_all,
    exchangers,
    reduce_scatter_seconds,
    sharers,
)
from strategies.costs.kernels import Seconds, memory_bound, unit_seconds
from strategies.costs.load import Load
from strategies.costs.token_exchange import Exchange


def by_kernels(hardware: Hardware, load: Load) -> bool:
    """Whether it takes what its kernels take; what it hands on takes no time then."""
    return bool(load.works) and (hardware.num_sms is not None or load.listed)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The ranks of a stage, and their machine; attributes as those of ``AnalyticCosts``."""

    hardware: Hardware
    sizes: ElementSizes
    number_format: NumberFormat
    tp: int
    sequence_parallel: bool
    ep: int
    expert_tp: bool
    imbalance: float

    def of(self, load: Load) -> tuple[float, float, float, float]:
        """Of F, B, I and W, with all that ranks exchange in them."""
        summed, back = self._sums(load.forward_sums), self._sums(load.backward_sums)
        # Weight gradients of what is cut along the sequence gather their inputs again.
        gathered = back / 2 if self.sequence_parallel else 0.0
        forward, inputs, weights, again = self._computed(load)
        wait, (there, whole, half) = self._waiting(load), self.travelling(load)
        forward, inputs, weights = forward + wait, inputs + wait, weights + wait
        again += self._sums(load.again_sums)
        return (
            forward + summed + there,
            again + inputs + whole + max(weights, back + gathered),
            again + inputs + half + back,
            weights + gathered,
        )

    def travelling(self, load: Load) -> tuple[float, float, float]:
        """Seconds of an F, a B and an I in which tokens are on their way to experts and back."""
        travel, again = self._exchange(load.exchanged), self._exchange(load.again_exchanged)
        # A whole backward has both halves of the shared experts' own to run meanwhile.
        one, both = self._beside(load, 1.0), self._beside(load, 2.0)
        return travel - one, again + travel - both, again + travel - one

    def exchanges(self, stages: Sequence[Load]) -> tuple[Exchange, ...]:
        """Per stage, what is on its way while others may compute; () for nothing."""
        if self.ep == 1:
            return ()
        group, element = self._exchangers(), self.sizes.activation
        known = {
            size: 2
            * all_to_all(self.hardware, group, size * element / self._parts * self.imbalance)
            for size in {size for load in stages for size in load.exchanged}
        }
        return tuple(
            Exchange(
                sum(known[size] for size in load.exchanged) - self._beside(load, 1.0),
                len(load.exchanged),
                min(1.0, load.expert_flops / max(load.forward_flops, 1.0)),
            )
            for load in stages
        )

    def gather(self, count: int) -> float:
        """Completing a boundary tensor from its slices."""
        if self.tp == 1 or self.sequence_parallel:
            return 0.0
        group = sharers(self.hardware, self.tp)
        return reduce_scatter_seconds(self.hardware, group, count * self.sizes.activation)

    def _forward(self, load: Load) -> float:
        return self._pass(load, load.forward_flops)

    def _backward(self, load: Load, part: int) -> float:
        """Of the inputs' gradients (0), or the weights' (1)."""
        if load.backward_flops is None:
            return self._forward(load)
        flops = load.backward_flops[part]
        return self._pass(load, flops) if flops else 0.0

    def _pass(self, load: Load, flops: float) -> float:
        """With what launching kernels and walking lists takes, of a stage and its units."""
        moved = memory_bound(self.hardware, 2 * load.output_elements * self.sizes.activation)
        overhead = self.hardware.stage_overhead_s + load.num_units * self.hardware.unit_overhead_s
        if self.hardware.num_sms is None:
            return max(self._computing(flops), moved) + overhead
        # Kernels that are not listed: what is kept has been written, and is read.
        kept = memory_bound(self.hardware, 2 * load.saved_elements * self.sizes.activation)
        return self._computing(flops) + moved + kept + overhead

    def _computed(self, load: Load) -> Seconds:
        """Without what ranks add up."""
        hardware = self.hardware
        if not by_kernels(hardware, load):
            backward = self._backward(load, 0), self._backward(load, 1)
            return Seconds(self._forward(load), *backward, self._computing(load.again_flops))
        waiting = 1.0 + hardware.lockstep_loss if self.tp > 1 else 1.0
        found = [
            (
                unit_seconds(
                    work.spread(self.ep, self.imbalance), hardware, self.sizes, self.number_format
                ),
                number * waiting,
            )
            for work, number in load.works
        ]
        forward, inputs, weights, again = (
            sum(took[part] * n for took, n in found) for part in range(4)
        )
        started = 0.0
        if hardware.num_sms is None:
            started = hardware.stage_overhead_s + load.num_units * hardware.unit_overhead_s
        return Seconds(forward + started, inputs + started, weights + started, again)

    def _computing(self, flops: float) -> float:
        took = flops / (self.hardware.peak(self.number_format) * self.hardware.efficiency)
        return took * (1.0 + self.hardware.lockstep_loss) if self.tp > 1 else took

    def _sums(self, sizes: tuple[int, ...]) -> float:
        """Adding up tensors over tensor-parallel ranks, one after the other."""
        if self.tp == 1:
            return 0.0
        group, element = sharers(self.hardware, self.tp), self.sizes.activation
        return sum(
            2 * reduce_scatter_seconds(self.hardware, group, size * element) for size in sizes
        )

    def _waiting(self, load: Load) -> float:
        """What the rank with most tokens takes longer than the mean, in each third of a step."""
        extra = self.imbalance - 1.0 if self.ep > 1 else 0.0
        if not extra or by_kernels(self.hardware, load):  # whose experts have its rows
            return 0.0
        return self._computing(load.expert_flops * extra)

    def _exchange(self, sizes: Sequence[int]) -> float:
        """Tokens to experts and back, layer by layer; gradients take the same paths.

        Ranks that share matrices each send their part of the tokens, and gather the results.
        """
        if self.ep == 1 and (self.tp == 1 or self.expert_tp):
            return 0.0
        hardware, element = self.hardware, self.sizes.activation
        group, took = self._exchangers(), 0.0
        sizes_s = all_to_all(hardware, group, 0)  # how many tokens are going to come
        known: dict[int, tuple[float, float]] = {}  # mostly all layers are alike
        for size in sizes:
            if size not in known:
                part, gathered = size * element / self._parts * self.imbalance, 0.0
                if self._parts > 1:
                    gathered = reduce_scatter_seconds(
                        hardware, sharers(hardware, self.tp), size * element
                    )
                known[size] = sizes_s + 2 * all_to_all(hardware, group, part), gathered
            travel, gathered = known[size]
            took += travel
            took += gathered
        return took

    def _beside(self, load: Load, passes: float) -> float:
        """What of an exchange's first way runs under shared experts, of so many times a forward."""
        if self.ep == 1 or not load.beside_flops:
            return 0.0
        group, element = self._exchangers(), self.sizes.activation
        each = passes * self._computing(load.beside_flops / len(load.exchanged))
        parts = (size * element / self._parts * self.imbalance for size in load.exchanged)
        return sum(min(each, all_to_all(self.hardware, group, part)) for part in parts)

    @property
    def _parts(self) -> int:
        """Ranks that send a part each of the tokens that they all have."""
        return 1 if self.expert_tp else self.tp

    def _exchangers(self) -> Group:
        return exchangers(self.hardware, self.ep, self.tp if self.expert_tp else 1)
