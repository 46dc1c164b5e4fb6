"""A model's operators, the values between them, and how each may be cut over ranks. Torch-free.

A trace of shapes makes it (``strategies.tracing.operator_trace``), the search reads it, and a small
JSON file keeps it. States of a value, for ``tp`` ranks:

- ``R``: every rank has the whole of it;
- ``E``: the same, and gradients that ranks have of it are added up (the entrance of a layer whose
  outputs are cut);
- ``S1``: cut along dimension 1; ``S1:3``: that dimension is three equal parts side by side, each of
  which is cut (queries, keys and values from one matrix);
- ``V2``: scores of a classifier, cut along dimension 2, which need not come out even.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from strategies.errors import ModelError
from strategies.sharding_plan import LayerKind, StyleName
from strategies.small_file import parse_json

WHOLE, ENTERED = "R", "E"
FORMAT = "foldpipe-operators"
VERSION = 3

MessageKind = Literal["sum", "gather"]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor between operators.

    Attributes:
        elements: Of the whole.
        gradient: Whether a backward makes a gradient of it; what has none is never cut.
    """

    elements: float
    gradient: bool = True


@dataclass(frozen=True, slots=True)
class Message:
    """What a choice sends.

    Attributes:
        kind: All-reduce, or all-gather.
        elements: Of the whole tensor.
        backward: Whether the backward sends it.
        once: Once per step instead of once per microbatch: a weight's gradient.
    """

    kind: MessageKind
    elements: float
    backward: bool = False
    once: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run an operator on ``tp`` ranks.

    Attributes:
        inputs: States that it needs of the operator's inputs.
        outputs: States of what it leaves.
        style: Of a layer; None for an operation without weights of its own.
        work: Share of the operator's work that a rank does.
        weights: Share of its weights that a rank has.
        split_dim: Of the weight, as in a ``LayerSharding``; likewise all that follow.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    style: StyleName | None = None
    work: float = 1.0
    weights: float = 1.0
    messages: tuple[Message, ...] = ()
    split_dim: int | None = None
    block: int = 1
    segments: int = 1
    whole_input: bool = True
    whole_output: bool = True
    partial: bool = False

    @property
    def cut(self) -> bool:
        return self.style not in (None, "replicated")


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of a layer or of an operation.

    Attributes:
        name: Name of the layer, or of the module in which the operation runs.
        operation: ``linear``, ``conv``, ...; or torch's name of the operation.
        kind: Of a layer; None for an operation.
        inputs: Numbers of its input values, without those that cannot be cut.
        outputs: Likewise.
        choices: The first is the one where nothing is cut.
        flops: Of a forward.
        product: (rows, columns, inner, batch) of its matrix product, all 0 where it has none.
        moved: Elements that a forward reads and writes.
        parameters: Names of its weights.
        weights: Elements of all of them.
    """

    name: str
    operation: str
    kind: LayerKind | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    choices: tuple[Choice, ...]
    flops: float = 0.0
    product: tuple[int, int, int, int] = (0, 0, 0, 0)
    moved: float = 0.0
    parameters: tuple[str, ...] = ()
    weights: float = 0.0


@dataclass(frozen=True, slots=True)
class OperatorGraph:
    """All operators of one microbatch, in the order in which they run.

    Attributes:
        model: Name of its class.
        tp: Ranks that the choices are for.
        rows: Of the microbatch.
        unknown: (operation, module, number of the operator) without known shardings.
    """

    model: str
    tp: int
    rows: int
    values: tuple[Value, ...]
    operators: tuple[Operator, ...]
    unknown: tuple[tuple[str, str, int], ...] = field(default=())

    def tied(self) -> list[tuple[int, ...]]:
        """Groups of operators that share a weight: they must cut it alike."""
        users: dict[str, list[int]] = {}
        for number, operator in enumerate(self.operators):
            for name in operator.parameters:
                users.setdefault(name, []).append(number)
        return sorted({tuple(group) for group in users.values() if len(group) > 1})


def dump_graph(graph: OperatorGraph) -> str:
    """Its file's text: equal lists of choices stand there once."""
    tables: dict[tuple[Choice, ...], int] = {}
    operators = []
    for operator in graph.operators:
        entry = {name: getattr(operator, name) for name in Operator.__slots__}
        entry["choices"] = tables.setdefault(operator.choices, len(tables))
        operators.append(list(entry.values()))
    content = {
        "format": FORMAT,
        "version": VERSION,
        "model": graph.model,
        "tp": graph.tp,
        "rows": graph.rows,
        "values": [[value.elements, value.gradient] for value in graph.values],
        "choices": [[asdict(choice) for choice in table] for table in tables],
        "operators": operators,
        "unknown": graph.unknown,
    }
    return json.dumps(content) + "\n"


def parse_graph(text: str) -> OperatorGraph:
    """The graph in a file's text.

    Raises:
        ModelError: It is none, or damaged, or of another version.
    """
    try:
        content = parse_json(text)
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise ValueError("another format")
        tables = [tuple(map(_choice, table)) for table in content["choices"]]
        values = tuple(Value(float(size), bool(own)) for size, own in content["values"])
        operators = tuple(_operator(entry, tables) for entry in content["operators"])
        if any(
            not 0 <= number < len(values)
            for operator in operators
            for number in (*operator.inputs, *operator.outputs)
        ):
            raise ValueError("an operator of a value that is not there")
        return OperatorGraph(
            str(content["model"]),
            int(content["tp"]),
            int(content["rows"]),
            values,
            operators,
            tuple((str(op), str(at), int(number)) for op, at, number in content["unknown"]),
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"a damaged operator graph ({type(error).__name__}: {error})") from error


def _choice(entry: Mapping[str, Any]) -> Choice:
    return Choice(
        **{
            **entry,
            "inputs": tuple(entry["inputs"]),
            "outputs": tuple(entry["outputs"]),
            "messages": tuple(Message(**message) for message in entry["messages"]),
        }
    )


def _operator(entry: Sequence[Any], tables: Sequence[tuple[Choice, ...]]) -> Operator:
    name, operation, kind, inputs, outputs, table, flops, product, moved, own, size = entry
    operator = Operator(
        str(name), str(operation), kind, tuple(inputs), tuple(outputs), tables[table],
        float(flops), tuple(product), float(moved), tuple(own), float(size),
    )  # fmt: skip
    if any(
        len(choice.inputs) != len(operator.inputs) or len(choice.outputs) != len(operator.outputs)
        for choice in operator.choices
    ):
        raise ValueError(f"choices of {name} for another number of values")
    return operator
