"""``trace_operators``: a module's step on shapes alone, to a graph of operators and their choices.

One run on fake tensors notes every operation and, as one operator each, the calls of torch's own
layers. What depends on no weight (masks, positions, the batch) is whole on every rank and is left
out. States are then found in the order of the run: a layer may leave its output cut, and what
follows can take it so, or not. States that nobody takes are dropped in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from strategies.costs.hardware import ElementSizes, Hardware, NumberFormat
from strategies.models.snapshot import restoring
from strategies.models.tensor_parallel.layer_plan import declared_plan
from strategies.planner.shardings.operators import (
    ENTERED,
    WHOLE,
    Choice,
    Message,
    Operator,
    OperatorGraph,
    Value,
)
from strategies.planner.shardings.plan_rows import Planner
from strategies.planner.shardings.prices import Prices
from strategies.sharding_plan import CUT, ShardingPlan
from strategies.tracing.operator_run import (
    LayerCall,
    OperatorCall,
    OperatorRun,
    layer_choices,
    layer_kind,
    products,
)
from strategies.tracing.operator_shardings import Shardings

_LOSSES = ("nll_loss", "nll_loss2d", "nll_loss_forward", "nll_loss2d_forward")


def trace_operators(
    module: nn.Module,
    batch: Any,
    rows: int,
    degrees: Sequence[int],
    *,
    boundaries: Collection[str] = (),
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[OperatorGraph, ...]:
    """One graph for each number of ranks; the module is run once.

    Args:
        module: Its parameters may be on the meta device; nothing of it is changed.
        batch: One microbatch.
        rows: Of it.
        degrees: Numbers of ranks, 2 or more each.
        boundaries: Names of modules whose outputs stay whole: a pipeline may be cut behind them.
        autocast: The types in which steps run.

    Raises:
        ModelError: The step cannot run on shapes; names the operation and the module.
    """
    with restoring(module):
        run = OperatorRun(module, boundaries)
        run(batch, autocast)
    return tuple(_Graph(run, module, tp, rows).graph for tp in degrees)


@dataclass(slots=True)
class _Graph:
    """A run's graph for one number of ranks, operator by operator."""

    run: OperatorRun
    module: nn.Module
    tp: int
    rows: int
    values: list[Value] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    unknown: list[tuple[str, str, int]] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    states: dict[int, tuple[str, ...]] = field(default_factory=dict)
    # Values made of weights alone, which gradients flow through to those.
    derived: dict[int, tuple[str, ...]] = field(default_factory=dict)
    shardings: Shardings = field(init=False)
    scores: bool = False
    names: dict[int, str] = field(default_factory=dict)  # of the module's own parameters
    sizes: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shardings = Shardings(self.tp)
        functions = {_base_name(event.func) for event in self.run.events if event.func is not None}
        self.scores = bool(functions & set(_LOSSES))
        self.names = {id(p): name for name, p in self.module.named_parameters()}
        self.sizes = {name: _size(p) for name, p in self.module.named_parameters()}
        for event in self.run.events:
            if event.opaque:
                assert event.layer is not None
                self._opaque(event, event.layer)
            elif event.layer is not None:
                self._layer(event, event.layer)
            else:
                self._operation(event)

    @property
    def graph(self) -> OperatorGraph:
        ends = {self.numbers[id(t)] for t in self.run.results if id(t) in self.numbers}
        return OperatorGraph(
            type(self.module).__name__,
            self.tp,
            self.rows,
            tuple(self.values),
            _shared(_without_dead_ends(self.operators, ends)),
            tuple(self.unknown),
        )

    def _layer(self, event: OperatorCall, layer: nn.Module) -> None:
        kind = layer_kind(layer)
        assert kind is not None
        given, made = event.args[0], event.made[0]
        free = id(given) in self.numbers
        states = self.states[self.numbers[id(given)]] if free else (WHOLE,)
        call = LayerCall(layer, kind, given, states, made, free, self.tp, self.scores)
        choices = layer_choices(call)
        own = tuple(self.names[id(p)] for p in layer.parameters())
        weights = sum(_size(parameter) for parameter in layer.parameters())
        rows, columns, inner, batch = products(call)
        inputs = (self.numbers[id(given)],) if free else ()
        output = self._made(made, choices, 0)
        self.operators.append(
            Operator(
                event.module, type(layer).__name__, kind, inputs, (output,), choices,
                2.0 * rows * columns * inner * batch, (rows, columns, inner, batch),
                _size(given) + _size(made), own, weights,
            )
        )  # fmt: skip

    def _opaque(self, event: OperatorCall, layer: nn.Module) -> None:
        """A module that looks at values: whole, whatever it does inside."""
        free = [t for t in event.given if id(t) in self.numbers]
        whole = Choice((WHOLE,) * len(free), (WHOLE,) * len(event.made))
        own = tuple(self.names[id(p)] for p in layer.parameters())
        inputs = tuple(self.numbers[id(t)] for t in free)
        outputs = tuple(self._made(t, (whole,), place) for place, t in enumerate(event.made))
        weights = sum(map(_size, layer.parameters()))
        self.unknown.append((type(layer).__name__, event.module, len(self.operators)))
        self.operators.append(
            Operator(
                event.module, type(layer).__name__, None, inputs, outputs, (whole,),
                event.flops, moved=sum(map(_size, event.made)), parameters=own,
                weights=weights,
            )
        )  # fmt: skip

    def _operation(self, event: OperatorCall) -> None:
        given = event.given
        free = [t for t in given if id(t) in self.numbers]
        own = tuple(
            dict.fromkeys(
                name
                for t in given
                for name in (self.run.names.get(id(t)), *self.derived.get(id(t), ()))
                if name is not None
            )
        )
        if not free and all(id(t) in self.run.names or id(t) in self.derived for t in given):
            # Made of weights alone: whole, and gradients flow through it to those.
            self.derived.update(dict.fromkeys((id(t) for t in event.made), own) if own else ())
            return
        if not free and not own:
            return
        inputs = tuple(self.numbers[id(t)] for t in free)
        new = [t for t in event.made if id(t) not in self.numbers]
        choices = self.shardings.choices(
            event.func,
            event.args,
            event.kwargs,
            [(t, self.states[self.numbers[id(t)]]) for t in free],
            event.made,
            lambda t: t.requires_grad,
        )
        choices = _in_place(choices, event.made, free, new)
        weights = sum(self.sizes[name] for name in own)
        if own:
            added = Message("sum", weights, backward=True, once=True)
            choices = tuple(
                replace(choice, style="replicated", partial=True,
                        messages=(*choice.messages, added))
                if choice.work < 1.0 else choice
                for choice in choices
            )  # fmt: skip
        lost = len(choices) == 1 and any(len(self.states[number]) > 1 for number in inputs)
        if not self.shardings.has_rule(event.func) and (
            lost or not self.shardings.knows(event.func)
        ):
            self.unknown.append((str(event.func), event.module, len(self.operators)))
        outputs = tuple(self._made(t, choices, place) for place, t in enumerate(new))
        self.operators.append(
            Operator(
                event.module, str(event.func), None, inputs, outputs, choices, event.flops,
                moved=0.0 if _is_view(event, free)
                else sum(map(_size, free)) + sum(map(_size, new)),
                parameters=own, weights=weights,
            )
        )  # fmt: skip

    def _made(self, tensor: Tensor, choices: Sequence[Choice], place: int) -> int:
        number = len(self.values)
        self.values.append(Value(_size(tensor), tensor.requires_grad))
        self.numbers[id(tensor)] = number
        self.states[number] = tuple(dict.fromkeys(choice.outputs[place] for choice in choices))
        return number


def _in_place(
    choices: Sequence[Choice],
    made: Sequence[Tensor],
    free: Sequence[Tensor],
    new: Sequence[Tensor],
) -> tuple[Choice, ...]:
    """Without results that are inputs again: those have to stay as they are."""
    places = {id(t): place for place, t in enumerate(free)}
    found = []
    for choice in choices:
        stays = all(
            choice.inputs[places[id(t)]] == state
            for t, state in zip(made, choice.outputs, strict=True)
            if id(t) in places
        )
        if stays:
            fresh = {id(t) for t in new}
            outputs = tuple(
                state for t, state in zip(made, choice.outputs, strict=True) if id(t) in fresh
            )
            found.append(replace(choice, outputs=outputs))
    return tuple(dict.fromkeys(found))


def _without_dead_ends(operators: Sequence[Operator], ends: set[int]) -> list[Operator]:
    """Without choices whose outputs nobody takes in that state; what leaves the step is whole."""
    accepted: dict[int, set[str]] = {number: {WHOLE, ENTERED} for number in ends}
    found: list[Operator] = []
    for operator in reversed(operators):
        choices = [choice for choice in operator.choices if _is_taken(operator, choice, accepted)]
        for place, number in enumerate(operator.inputs):
            taken = {choice.inputs[place] for choice in choices}
            accepted[number] = accepted[number] & taken if number in accepted else taken
        found.append(replace(operator, choices=tuple(choices)))
    return found[::-1]


def _is_taken(operator: Operator, choice: Choice, accepted: Mapping[int, Collection[str]]) -> bool:
    """Whether all that read its outputs take them as the choice leaves them."""
    return all(
        (known := accepted.get(number)) is None
        or state in known
        or (state == WHOLE and ENTERED in known)
        for number, state in zip(operator.outputs, choice.outputs, strict=True)
    )


def _shared(operators: Sequence[Operator]) -> tuple[Operator, ...]:
    """With one list of choices for all operators that have equal ones."""
    known: dict[tuple[Choice, ...], tuple[Choice, ...]] = {}
    return tuple(
        replace(operator, choices=known.setdefault(operator.choices, operator.choices))
        for operator in operators
    )


def _is_view(event: OperatorCall, free: Sequence[Tensor]) -> bool:
    """Whether nothing is moved."""
    storages = {t.untyped_storage()._cdata for t in free}
    return all(t.untyped_storage()._cdata in storages for t in event.made)


def _base_name(func: Any) -> str:
    return str(func.overloadpacket.__name__) if hasattr(func, "overloadpacket") else ""


def _size(tensor: Tensor) -> float:
    return float(tensor.numel())


# --------------------------------------------------------------------------------------------------
# ``find_shardings``: a module, a microbatch and a machine to a plan; and plans by hand.
def find_shardings(
    module: nn.Module,
    batch: Any,
    rows: int,
    tp: int,
    hardware: Hardware,
    *,
    sizes: ElementSizes | None = None,
    number_format: NumberFormat = "fp32",
    num_microbatches: int = 1,
    boundaries: Collection[str] = (),
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> ShardingPlan:
    """The best plan for a module that says nothing about it.

    Args:
        module: Its parameters may be on the meta device; nothing of it is changed.
        batch: One microbatch.
        rows: Of it.
        tp: Ranks that share.
        hardware: Their figures and links.
        sizes: Bytes of elements; None for 4 each.
        number_format: Of matrix products.
        num_microbatches: Of a step.
        boundaries: Names of modules whose outputs stay whole.
        autocast: The types in which steps run.

    Raises:
        ModelError: The step cannot run on shapes; names the operation and the module.
    """
    (graph,) = trace_operators(module, batch, rows, [tp], boundaries=boundaries, autocast=autocast)
    prices = Prices(
        hardware,
        tp,
        sizes=sizes or ElementSizes(),
        number_format=number_format,
        num_microbatches=num_microbatches,
    )
    return Planner(graph, prices).found()


def styles_by_hand(module: nn.Module) -> dict[str, str] | None:
    """Style names by layer of a module's own ``tensor_parallel_plan()``; None where it has none."""
    plan = declared_plan(module, 1)
    if plan is None:
        return None
    rows = {name: plan.layer(name) for name, _ in module.named_modules() if name}
    return {
        name: row.style if row.style in CUT else "replicated"
        for name, row in rows.items()
        if row is not None
    }
