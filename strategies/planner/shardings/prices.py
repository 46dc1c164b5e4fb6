"""What a choice takes, in seconds of a rank per microbatch, and what a rank sends for it.

The figures are those of the one model of time: kernels of a card (``costs.kernels``), or FLOPs over
the reached peak, or bytes over memory bandwidth where that takes longer; collectives as in
``costs.rings``. A backward of a layer with weights is two products, of any other operation twice
its forward. Messages stand for themselves: none is hidden behind anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from strategies.costs.hardware import (
    ElementSizes,
    Hardware,
    NumberFormat,
    reduce_scatter_seconds,
    sharers,
)
from strategies.costs.kernels import Product, Work, unit_seconds
from strategies.planner.shardings.operators import (
    Choice,
    Message,
    Operator,
    OperatorGraph,
    Value,
)


class Price(NamedTuple):
    """Of one choice.

    Attributes:
        computing: Seconds of a forward and a backward.
        sending: Seconds of all its messages.
        forward_bytes: What a rank sends in a forward.
        backward_bytes: The same of a backward.
        weight_bytes: Of the weights on one rank.
    """

    computing: float
    sending: float
    forward_bytes: float
    backward_bytes: float
    weight_bytes: float

    @property
    def seconds(self) -> float:
        return self.computing + self.sending


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a graph's choices on a machine.

    Attributes:
        tp: Ranks that share.
        rows: Of a microbatch, over those of the graph: all that is no weight grows with them.
        sizes: Bytes of elements.
        num_microbatches: Of a step: what is sent once per step is spread over them.
        light: Operators that ``worth`` compares with replicas; see ``small_operators``.
    """

    hardware: Hardware
    tp: int
    rows: float = 1.0
    sizes: ElementSizes = field(default_factory=ElementSizes)
    number_format: NumberFormat = "fp32"
    num_microbatches: int = 1
    light: frozenset[int] = frozenset()
    _known: dict[object, float] = field(default_factory=dict)

    def of(self, operator: Operator, choice: Choice) -> Price:
        """Without the entrance of its inputs, which is one for all that read them."""
        sending = forward = backward = 0.0
        for message in choice.messages:
            seconds, sent = self._message(message)
            sending += seconds
            if message.backward:
                backward += sent
            else:
                forward += sent
        return Price(
            self._computing(operator, choice),
            sending,
            forward,
            backward,
            operator.weights * choice.weights * self.sizes.weight,
        )

    def worth(self, number: int, operator: Operator, choice: Choice) -> float:
        """What the search adds up: seconds, but for what ranks could do better as replicas.

        Ranks that share nothing of an operator do its work twice over. Where its weights are no
        reason to share them, the choice is between a cut and replicas, each with its own rows: they
        take a share of the time, and add up the weights' gradients.
        """
        if choice.work < 1.0 or number not in self.light:
            return self.of(operator, choice).seconds
        summed = self._message(Message("sum", operator.weights, backward=True, once=True))[0]
        started = self._message(Message("sum", 0.0, backward=True, once=True))[0]
        # All gradients go in a few large messages: none pays for a start of its own.
        alone = self._computing(operator, choice) / (1.0 + self.hardware.lockstep_loss)
        return alone / self.tp + summed - started

    def entrance(self, value: Value) -> tuple[float, float]:
        """Seconds and bytes of adding up a value's gradient."""
        return self._message(Message("sum", value.elements, backward=True))

    def whole(self, graph: OperatorGraph) -> float:
        """Seconds where nothing is cut."""
        took = sum(self._computing(o, o.choices[0]) for o in graph.operators)
        return took / (1.0 + self.hardware.lockstep_loss)

    def _message(self, message: Message) -> tuple[float, float]:
        """Seconds, and bytes that a rank sends."""
        if message.once:
            size = message.elements * self.sizes.gradient
        else:
            size = message.elements * self.sizes.activation * self.rows
        rounds = 2 if message.kind == "sum" else 1
        key = (message.kind, size, message.once)
        if key not in self._known:
            half = reduce_scatter_seconds(self.hardware, sharers(self.hardware, self.tp), size)
            often = self.num_microbatches if message.once else 1
            self._known[key] = rounds * half / often
        return self._known[key], rounds * size * (self.tp - 1) / self.tp

    def _computing(self, operator: Operator, choice: Choice) -> float:
        key = (operator.product, operator.flops, operator.moved, choice.work, choice.weights,
               choice.style, choice.whole_input, operator.weights)  # fmt: skip
        if key not in self._known:
            part = self._part(operator, choice)
            work = self._work(part, operator, choice)
            took = sum(unit_seconds(work, self.hardware, self.sizes, self.number_format))
            # Ranks wait for each other after each product, as the planner counts it.
            self._known[key] = took * (1.0 + self.hardware.lockstep_loss)
        return self._known[key]

    def work(self, operator: Operator, choice: Choice) -> Work:
        """A rank's kernels."""
        return self._work(self._part(operator, choice), operator, choice)

    def _part(self, operator: Operator, choice: Choice) -> Product | None:
        """A rank's share of a product."""
        rows, columns, inner, batch = operator.product
        if not rows:
            return None
        rows = max(1, round(rows * self.rows))
        if choice.style in ("column", "vocabulary") and batch > 1:
            batch = max(1, round(batch * choice.work))
        elif choice.style in ("column", "vocabulary"):
            columns = max(1, round(columns * choice.work))
        elif choice.style == "row":
            inner = max(1, round(inner * choice.work))
        elif choice.work < 1.0:
            rows = max(1, round(rows * choice.work))
        return Product(rows, columns, inner, batch)

    def _work(self, product: Product | None, operator: Operator, choice: Choice) -> Work:
        weights = round(operator.weights * choice.weights)
        if product is not None:
            return Work(products=(product,), weights=weights)
        if operator.flops:
            # A product of two activations: an attention's scores, say.
            side = max(1, round((operator.flops * choice.work * self.rows / 2) ** (1 / 3)))
            return Work(products=(Product(side, side, side),), weights=weights)
        elements = operator.moved * self.rows * choice.work
        kernels = 1 if operator.moved else 0
        return Work(
            forward_elements=round(elements), backward_elements=round(2 * elements),
            forward_kernels=kernels, backward_kernels=kernels, weights=weights,
        )  # fmt: skip


# Layers that hold less of a model's weights than this are light.
LIGHT_SHARE = 0.03


def small_operators(graph: OperatorGraph) -> frozenset[int]:
    """Operators whose weights alone are no reason to shard them: light layers and what follows.

    Layers count together that have one pattern of names and one size, and then those of one parent
    that are light each: an attention's four matrices. Tables by ids are never light: what comes of
    them is a model's largest values.
    """
    sizes: dict[tuple[str, object], float] = {}
    kinds: list[tuple[str, object] | None] = []
    counted: set[tuple[str, ...]] = set()
    for operator in graph.operators:
        if not operator.parameters:
            kinds.append(None)
            continue
        key = (pattern_of(operator.name), (operator.weights, operator.product[1:]))
        again = (operator.name, *operator.parameters)  # A layer that is called again.
        new = 0.0 if again in counted else operator.weights
        counted.add(again)
        sizes[key] = sizes.get(key, 0.0) + new
        kinds.append(key)
    least = LIGHT_SHARE * sum(sizes.values())
    together: dict[str, float] = {}
    for (pattern, _), size in sizes.items():
        if size < least:
            parent = pattern.rpartition(".")[0]
            together[parent] = together.get(parent, 0.0) + size
    light: set[int] = set()
    makers: dict[int, int] = {}
    for number, (operator, kind) in enumerate(zip(graph.operators, kinds, strict=True)):
        if kind is None:
            # As what it works on is.
            own = all(makers[value] in light for value in operator.inputs if value in makers)
        elif any(choice.style == "vocabulary" for choice in operator.choices):
            own = False
        else:
            own = sizes[kind] < least and together[kind[0].rpartition(".")[0]] < least
        if own:
            light.add(number)
        makers.update(dict.fromkeys(operator.outputs, number))
    return frozenset(light)


def pattern_of(name: str) -> str:
    """A name with stars for its numbers.

    >>> pattern_of("layers.3.mlp")
    'layers.*.mlp'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
