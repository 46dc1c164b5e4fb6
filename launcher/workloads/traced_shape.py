"""A traced model in the terms of the cost model and the planner. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from launcher.workloads.transformer_shape import UnitSpec
from strategies.costs.analytic import Load
from strategies.costs.trace_file import TracedModel, TracedUnit
from strategies.errors import PlanError
from strategies.planner.unit_graph import Tensor, UnitGraph, handed_on


@dataclass(frozen=True, slots=True)
class TracedShape:
    """What a trace knows of a model that only its ranks can build."""

    trace: TracedModel
    name: str  # of the model, as it was asked for
    sequence: int  # tokens; 1 where rows are no text
    activation_bytes: int  # of an element: the trace counts bytes, costs count elements

    @property
    def layers(self) -> int:
        """Units: all of them can be put on stages of their own."""
        return len(self.trace.units)

    @property
    def num_parameters(self) -> int:
        """Tied ones once."""
        return self.trace.num_parameters

    @property
    def is_chain(self) -> bool:
        """Whether every unit feeds only the next one."""
        return all(t.consumers == (t.producer + 1,) for t in self.trace.tensors)

    def unit_specs(self) -> tuple[UnitSpec, ...]:
        loads = self.loads(1)
        return tuple(
            UnitSpec(
                name=unit.name,
                parameters=load.parameters,
                forward_flops=round(load.forward_flops),
                output_elements=load.output_elements,
                saved_elements=load.saved_elements,
                tied_parameters=unit.tied_parameters,
            )
            for unit, load in zip(self.trace.units, loads, strict=True)
        )

    def loads(self, rows: int) -> tuple[Load, ...]:
        """One load per unit, for a microbatch of so many sequences."""
        return tuple(self._load(number, unit, rows) for number, unit in enumerate(self.trace.units))

    def graph(self, rows: int) -> UnitGraph:
        """What goes from unit to unit, in elements."""
        tensors = tuple(
            Tensor(t.producer, t.consumers, t.num_bytes.at(rows) / self.activation_bytes)
            for t in self.trace.tensors
        )
        return UnitGraph((1.0,) * len(self.trace.units), tensors)

    def _load(self, number: int, unit: TracedUnit, rows: int) -> Load:
        crossing = self.trace.crossing_bytes(number, rows)
        return Load(
            forward_flops=unit.forward_flops.at(rows),
            parameters=unit.parameters,
            output_elements=round(crossing / self.activation_bytes),
            saved_elements=round(unit.saved_bytes.at(rows) / self.activation_bytes),
            backward_flops=(unit.input_flops.at(rows), unit.weight_flops.at(rows)),
            owns=(number,),
            tied=unit.tied,
        )


def check_traced_tp(shape: TracedShape, tp: int) -> None:
    """Refuses tensor-parallel ranks: a trace is one of whole layers."""
    if tp > 1:
        raise PlanError(
            f"tp={tp} with model={shape.name}: a trace knows its layers whole, not a rank's share "
            "of them. Try tp=1."
        )


def stage_handing(
    shape: TracedShape, stages: Sequence[range], rows: int
) -> tuple[tuple[int, int, int], ...]:
    """(source, target, elements) of what stages hand to which others."""
    assert all(a.stop == b.start for a, b in pairwise(stages))
    return handed_on(shape.graph(rows), tuple(map(len, stages)))
