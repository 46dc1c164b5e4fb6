"""A traced model in the terms of the cost model and the planner. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING, Any

from launcher.workloads.transformer_shape import UnitSpec
from launcher.workloads.transformer_share import refuse_ep
from strategies.costs.kernels import Work
from strategies.costs.load import Load
from strategies.costs.trace_file import TracedExperts, TracedModel, TracedUnit
from strategies.errors import PlanError
from strategies.planner.cut import Tensor, handed_on

if TYPE_CHECKING:
    from strategies.planner.shardings.unit_cuts import UnitCut


@dataclass(frozen=True, slots=True)
class TracedShape:
    """What a trace knows of a model that only its ranks can build."""

    trace: TracedModel
    name: str  # of the model, as it was asked for
    sequence: int  # tokens; 1 where rows are no text
    activation_bytes: int  # of an element: the trace counts bytes, costs count elements
    # What is found for (tp, rows of a microbatch), per unit; raises PlanError where there is none.
    # For tp=1 that is what the units' operations are.
    cuts: Callable[[int, int], tuple[UnitCut, ...]] | None = field(default=None, compare=False)

    @property
    def layers(self) -> int:
        """Units: all of them can be put on stages of their own."""
        return len(self.trace.units)

    @property
    def num_parameters(self) -> int:
        """Tied ones once."""
        return self.trace.num_parameters

    @property
    def num_experts(self) -> int:
        """Of each layer that has some, or what divides those of all; 0 where ranks share none."""
        units = self.trace.units if self.trace.declared else ()
        return gcd(*(unit.experts.experts for unit in units if unit.experts is not None))

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

    @property
    def runs_again(self) -> bool:
        """Whether all its layers can recompute selectively."""
        return all(unit.again is not None for unit in self.trace.units)

    def loads(self, rows: int, tp: int = 1, *, selective: bool = False) -> tuple[Load, ...]:
        """One load per unit, for a microbatch of so many sequences, of one of ``tp`` ranks.

        Experts are known to be spread where no matrices are cut besides (tp=1).
        With ``selective`` layers compute again what is cheap; only where ``runs_again``.

        Raises:
            PlanError: The model cannot be cut into so many.
        """
        spread = tp == 1 and self.num_experts > 0
        whole = tuple(
            self._load(n, unit, rows, spread=spread) for n, unit in enumerate(self.trace.units)
        )
        if selective:
            pairs = zip(whole, self.trace.units, strict=True)
            whole = tuple(self._selective(load, unit, rows) for load, unit in pairs)
        if tp == 1 and self.unlisted() is not None:
            return whole
        cuts = self.found_cuts(tp, rows)
        again = [
            unit.again.elements.at(rows) if selective and unit.again is not None else 0.0
            for unit in self.trace.units
        ]
        return tuple(
            _share(load, cut, cuts, rows, again=moved)
            for load, cut, moved in zip(whole, cuts, again, strict=True)
        )

    def unlisted(self) -> str | None:
        """Why its units go by FLOPs, their operations not being known; else None."""
        if self.cuts is None:
            return "its operations were not looked at"
        try:
            self.cuts(1, 1)
        except PlanError as error:
            return str(error)
        return None

    def found_cuts(self, tp: int, rows: int) -> tuple[UnitCut, ...]:
        """What is found for so many ranks.

        Raises:
            PlanError: Nothing.
        """
        if self.cuts is None:
            raise PlanError(
                f"tp={tp} with model={self.name}: a trace knows its layers whole, not a rank's "
                "share of them. Try tp=1."
            )
        return self.cuts(tp, rows)

    def graph(self, rows: int) -> tuple[Tensor, ...]:
        """What goes from unit to unit, in elements."""
        return tuple(
            Tensor(t.producer, t.consumers, t.num_bytes.at(rows) / self.activation_bytes)
            for t in self.trace.tensors
        )

    def _load(self, number: int, unit: TracedUnit, rows: int, *, spread: bool) -> Load:
        experts = unit.experts if spread else None
        crossing = self.trace.crossing_bytes(number, rows)
        return Load(
            forward_flops=unit.forward_flops.at(rows),
            parameters=unit.parameters,
            output_elements=round(crossing / self.activation_bytes),
            saved_elements=round(unit.saved_bytes.at(rows) / self.activation_bytes),
            backward_flops=(unit.input_flops.at(rows), unit.weight_flops.at(rows)),
            owns=(number,),
            tied=unit.tied,
            **({} if experts is None else _of_experts(experts, rows, self.activation_bytes)),
        )

    def _selective(self, load: Load, unit: TracedUnit, rows: int) -> Load:
        again, size = unit.again, self.activation_bytes
        assert again is not None
        return replace(
            load,
            saved_elements=round(again.saved_bytes.at(rows) / size),
            again_flops=again.flops.at(rows),
        )


def _of_experts(experts: TracedExperts, rows: int, element: int) -> dict[str, Any]:
    """What a unit's load says of its experts; ``element``: bytes of one."""
    layers = experts.layers
    return {
        "experts": experts.parameters,
        "expert_flops": experts.flops.at(rows),
        "expert_saved": round(experts.saved_bytes.at(rows) / element),
        "exchanged": (round(experts.sent_bytes.at(rows) / element / layers),) * layers,
    }


def check_traced_ep(shape: TracedShape, ep: int, tp: int) -> None:
    """Refuses a number of ranks that its experts cannot be spread over, or are not known for.

    Raises:
        PlanError: It has none that ranks can share, or they do not come out even.
    """
    experts = shape.num_experts
    if not experts:
        raise PlanError(
            f"ep={ep} spreads experts over ranks, and model={shape.name} has no layer whose "
            "experts they can share (one with num_experts, expert_parameters and exchange, in a "
            "unit of pipeline_units). Try ep=1."
        )
    if tp > 1:
        raise PlanError(
            f"tp={tp} ep={ep} with model={shape.name}: a trace knows its experts whole or spread, "
            "not beside matrices that are cut. Try tp=1, or mode=train with degrees of your own."
        )
    if experts % ep:
        refuse_ep(ep, experts, f"num_experts={experts} of model={shape.name}")


def check_traced_tp(shape: TracedShape, tp: int) -> None:
    """Refuses tensor-parallel ranks for which no shardings are found."""
    if tp > 1:
        shape.found_cuts(tp, 1)


def _share(load: Load, cut: UnitCut, cuts: Sequence[UnitCut], rows: int, *, again: float) -> Load:
    """A unit's load on one of the ranks that share it; ``again``: elements that it moves twice."""
    both = load.backward_flops
    return replace(
        load,
        forward_flops=load.forward_flops * cut.work,
        parameters=round(load.parameters * cut.weights),
        saved_elements=round(load.saved_elements * cut.kept),
        forward_sums=tuple(round(size * rows) for size in cut.forward_sums),
        backward_sums=tuple(round(size * rows) for size in cut.backward_sums),
        backward_flops=None if both is None else (both[0] * cut.work, both[1] * cut.work),
        tied=tuple((unit, round(n * cuts[unit].weights)) for unit, n in load.tied),
        again_flops=load.again_flops * cut.work,
        works=((_again(cut, load, again), 1),),
        listed=True,
    )


def _again(cut: UnitCut, load: Load, elements: float) -> Work:
    """A unit's kernels on a rank, with what its backward runs again."""
    return replace(
        cut.kernels,
        again_elements=round(elements * cut.kept),
        again_products=load.again_flops / load.forward_flops if load.forward_flops else 0.0,
    )


def stage_handing(
    shape: TracedShape, stages: Sequence[range], rows: int
) -> tuple[tuple[int, int, int], ...]:
    """(source, target, elements) of what stages hand to which others."""
    assert all(a.stop == b.start for a, b in pairwise(stages))
    return handed_on(shape.graph(rows), tuple(map(len, stages)))
