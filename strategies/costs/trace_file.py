"""What a trace found out about a model, and the file in which it is kept. Torch-free.

A trace runs nothing and allocates no weights: shapes alone say how many operations a unit has, what
it keeps for its backward, and which tensors go from unit to unit. All figures are straight lines in
the rows (sequences) of a microbatch. One JSON object::

    {"format": "foldpipe-trace", "version": 4, "model": "Net", "num_parameters": 1234,
     "units": [{"name": "layers.0", "parameters": 72, "forward_flops": [0, 128], ...}, ...],
     "tensors": [{"producer": 0, "consumers": [1, 3], "num_bytes": [0, 32]}, ...],
     "unknown": [["aten::cdist", "layers.2"], ...], "declared": false}

The pairs are (whatever the rows, per row).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from strategies.errors import ModelError
from strategies.small_file import parse_json

FORMAT = "foldpipe-trace"
VERSION = 4


@dataclass(frozen=True, slots=True)
class Line:
    """A figure that depends on the rows of a microbatch."""

    fixed: float = 0.0  # Whatever the rows.
    per_row: float = 0.0

    def at(self, rows: float) -> float:
        """The figure for so many rows; never negative."""
        return max(0.0, self.fixed + self.per_row * rows)

    @classmethod
    def through(cls, first: tuple[int, float], second: tuple[int, float] | None) -> Line:
        """Through (rows, figure) pairs; with one of them, through the origin.

        >>> Line.through((2, 5.0), (4, 9.0))
        Line(fixed=1.0, per_row=2.0)
        """
        if second is None or second[0] == first[0]:
            return cls(0.0, first[1] / first[0])
        per_row = (second[1] - first[1]) / (second[0] - first[0])
        return cls(first[1] - per_row * first[0], per_row)


@dataclass(frozen=True, slots=True)
class TracedAgain:
    """A unit that computes again, in its backward, what is cheap.

    Attributes:
        saved_bytes: Kept meanwhile; as ``TracedUnit.saved_bytes`` otherwise.
        flops: Of products that run again.
        elements: Read and written by all else that runs again.
    """

    saved_bytes: Line
    flops: Line
    elements: Line


@dataclass(frozen=True, slots=True)
class TracedExperts:
    """What a unit's layers with experts take of it, all of them together.

    Attributes:
        layers: How many there are.
        experts: Of each, or what divides those of all.
        parameters: Of all experts.
        flops: Of a forward, of its experts.
        saved_bytes: What their computation keeps.
        sent_bytes: All tokens on their way to their experts.
    """

    layers: int
    experts: int
    parameters: int
    flops: Line
    saved_bytes: Line
    sent_bytes: Line


@dataclass(frozen=True, slots=True)
class TracedUnit:
    """One unit that a pipeline may cut around.

    Attributes:
        name: Its module's name inside the LightningModule.
        parameters: That it uses and no unit before it.
        tied: What it uses of the parameters of units before it, as (unit, how many).
        forward_flops: Two operations per multiply-add.
        input_flops: Of the backward, for the gradients of its inputs.
        weight_flops: Of the backward, for those of its weights.
        saved_bytes: Kept from forward to backward; what the unit before keeps, too, is not counted.
        again: What it takes with ``recompute=selective``; None where it cannot be run so on shapes.
        experts: What of all that are experts that ranks can share; None where there are none.
        cost: By which ranks balance their stages.
    """

    name: str
    parameters: int
    tied: tuple[tuple[int, int], ...]
    forward_flops: Line
    input_flops: Line
    weight_flops: Line
    saved_bytes: Line
    again: TracedAgain | None = None
    experts: TracedExperts | None = None
    cost: Line = Line()

    @property
    def tied_parameters(self) -> int:
        return sum(count for _, count in self.tied)


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """What one unit (by number) makes and later ones, ascending, use."""

    producer: int
    consumers: tuple[int, ...]
    num_bytes: Line


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A model as a graph of units.

    Attributes:
        model: Name of its class.
        num_parameters: Of the whole, tied ones once.
        units: In the order in which they run.
        tensors: Between them, the earliest first.
        unknown: Operations without a formula for their FLOPs, and the unit that has them; they are
            counted as one operation per element that they write.
        declared: Whether the module declares its units; else its steps are replayed.
    """

    model: str
    num_parameters: int
    units: tuple[TracedUnit, ...]
    tensors: tuple[TracedTensor, ...]
    unknown: tuple[tuple[str, str], ...] = field(default=())
    declared: bool = False

    def crossing_bytes(self, unit: int, rows: float) -> float:
        """What a cut behind a unit has to let through, each tensor once."""
        return sum(
            tensor.num_bytes.at(rows)
            for tensor in self.tensors
            if tensor.producer <= unit < max(tensor.consumers)
        )


def dump_trace(trace: TracedModel) -> str:
    content = asdict(trace) | {"format": FORMAT, "version": VERSION}
    return json.dumps(_pairs(content), indent=1, sort_keys=True) + "\n"


def parse_trace(text: str) -> TracedModel:
    """The trace in a file's text.

    Raises:
        ModelError: It is none, or damaged, or of another version.
    """
    try:
        content = parse_json(text)
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise ValueError("another format")
        units = tuple(_unit(entry) for entry in content["units"])
        tensors = tuple(_tensor(entry, len(units)) for entry in content["tensors"])
        if not units:
            raise ValueError("no units")
        return TracedModel(
            str(content["model"]),
            int(content["num_parameters"]),
            units,
            tensors,
            tuple((str(op), str(name)) for op, name in content["unknown"]),
            bool(content["declared"]),
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"a damaged trace ({type(error).__name__}: {error})") from error


def _pairs(value: object) -> object:
    if isinstance(value, dict):
        if value.keys() == {"fixed", "per_row"}:
            return [value["fixed"], value["per_row"]]
        return {key: _pairs(item) for key, item in value.items()}
    return [_pairs(item) for item in value] if isinstance(value, list | tuple) else value


def _line(value: Sequence[float]) -> Line:
    fixed, per_row = value
    return Line(float(fixed), float(per_row))


def _unit(entry: Mapping[str, Any]) -> TracedUnit:
    again, experts = entry["again"], entry["experts"]
    return TracedUnit(
        name=str(entry["name"]),
        parameters=int(entry["parameters"]),
        tied=tuple((int(unit), int(count)) for unit, count in entry["tied"]),
        forward_flops=_line(entry["forward_flops"]),
        input_flops=_line(entry["input_flops"]),
        weight_flops=_line(entry["weight_flops"]),
        saved_bytes=_line(entry["saved_bytes"]),
        again=None if again is None else TracedAgain(*(_line(again[n]) for n in _AGAIN)),
        experts=None if experts is None else _experts(experts),
        cost=_line(entry["cost"]),
    )


_AGAIN = ("saved_bytes", "flops", "elements")


def _experts(entry: Mapping[str, Any]) -> TracedExperts:
    layers, experts, parameters = (int(entry[n]) for n in ("layers", "experts", "parameters"))
    if min(layers, experts, parameters) < 1:
        raise ValueError(f"{layers} layers with {experts} experts of {parameters} parameters")
    lines = (_line(entry[name]) for name in ("flops", "saved_bytes", "sent_bytes"))
    return TracedExperts(layers, experts, parameters, *lines)


def _tensor(entry: Mapping[str, Any], count: int) -> TracedTensor:
    producer, consumers = int(entry["producer"]), tuple(map(int, entry["consumers"]))
    if not consumers or not 0 <= producer < min(consumers) <= max(consumers) < count:
        raise ValueError(f"a tensor from unit {producer} to {consumers}")
    return TracedTensor(producer, consumers, _line(entry["num_bytes"]))
