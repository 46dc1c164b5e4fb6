"""What found shardings leave of a unit on one rank, as the planner counts it."""

import pytest

from launcher.workloads.traced_shape import TracedShape
from strategies.costs.trace_file import Line, TracedModel, TracedUnit
from strategies.errors import PlanError
from strategies.planner.shardings.operators import (
    Choice,
    Message,
    Operator,
    OperatorGraph,
    Value,
)
from strategies.planner.shardings.unit_cuts import UnitCut, unit_cuts

WHOLE = Choice(("R",), ("R",), "replicated")
COLUMN = Choice(("E",), ("S1",), "column", work=0.5, weights=0.5, split_dim=0)
ROW = Choice(
    ("S1",), ("R",), "row", work=0.5, weights=0.5, split_dim=1, messages=(Message("sum", 80.0),)
)
GRAPH = OperatorGraph(
    "Net",
    2,
    4,
    (Value(80.0), Value(320.0), Value(80.0)),
    (
        Operator("in", "Linear", "linear", (), (0,), (Choice((), ("R",), "replicated"),),
                 flops=1000.0, parameters=("in.weight",), weights=100.0),
        Operator("mlp.up", "Linear", "linear", (0,), (1,), (WHOLE, COLUMN), flops=4000.0,
                 parameters=("mlp.up.weight",), weights=400.0),
        Operator("mlp.down", "Linear", "linear", (1,), (2,), (WHOLE, ROW), flops=4000.0,
                 parameters=("mlp.down.weight",), weights=400.0),
    ),
)  # fmt: skip


def test_a_unit_has_the_share_of_its_layers_and_the_sums_at_its_ends():
    first, second = unit_cuts(GRAPH, (0, 1, 1), ("in", "mlp"))
    assert first == UnitCut()
    assert (second.work, second.weights) == (0.5, 0.5)
    assert second.kept == pytest.approx((320 / 2 + 80) / 400)
    assert second.forward_sums == (20.0,)  # of 4 rows
    assert second.backward_sums == (20.0,)  # the entrance of the first


def test_a_traced_model_is_planned_with_the_shares_that_are_found():
    unit = TracedUnit("mlp", 800, (), *(Line(0.0, n) for n in (2000.0, 2000.0, 2000.0, 1600.0)))
    trace = TracedModel("Net", 800, (unit,), ())
    shape = TracedShape(trace, "class", sequence=1, activation_bytes=4)
    with pytest.raises(PlanError, match="a trace knows its layers whole"):
        shape.loads(4, 2)
    cut = UnitCut(0.5, 0.5, 0.6, (20.0,), (20.0,))
    shape = TracedShape(trace, "class", 1, 4, cuts=lambda tp, rows: (cut,))
    (whole,), (share,) = shape.loads(4), shape.loads(4, 2)
    assert share.forward_flops == whole.forward_flops / 2
    assert share.parameters == 400
    assert share.saved_elements == round(whole.saved_elements * 0.6)
    assert share.forward_sums == share.backward_sums == (80,)
