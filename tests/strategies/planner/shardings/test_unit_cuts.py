"""What found shardings leave of a unit on one rank, as the planner counts it."""

from dataclasses import replace

import pytest

from launcher.workloads.traced_shape import TracedShape
from strategies.compiler import compile_program
from strategies.costs.analytic import AnalyticCosts
from strategies.costs.hardware import Hardware
from strategies.costs.kernels import Product
from strategies.costs.load import sum_loads
from strategies.costs.trace_file import Line, TracedModel, TracedUnit
from strategies.errors import PlanError
from strategies.planner.shardings.operators import (
    Choice,
    Message,
    Operator,
    OperatorGraph,
    Value,
)
from strategies.planner.shardings.plan_rows import Planner
from strategies.planner.shardings.prices import Prices
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
                 flops=1000.0, moved=90.0, parameters=("in.weight",), weights=100.0),
        Operator("mlp.up", "Linear", "linear", (0,), (1,), (WHOLE, COLUMN), flops=4000.0,
                 product=(4, 20, 20, 1), parameters=("mlp.up.weight",), weights=400.0),
        Operator("mlp.down", "Linear", "linear", (1,), (2,), (WHOLE, ROW), flops=4000.0,
                 product=(4, 20, 20, 1), parameters=("mlp.down.weight",), weights=400.0),
    ),
)  # fmt: skip


MACHINE = Hardware(
    "card", 1e9, 0.5, 1.0, 1e9, 1e8, 1e-6, 1e7, 1e-5, 8, lockstep_loss=0.1, kernel_overhead_s=1e-6
)


def prices(rows: float = 1.0) -> Prices:
    return Prices(MACHINE, 2, rows=rows)


def test_a_unit_has_the_share_of_its_layers_and_the_sums_at_its_ends():
    first, second = unit_cuts(GRAPH, (0, 1, 1), ("in", "mlp"), prices())
    assert first == UnitCut(kernels=first.kernels)
    assert second.kernels.products == (Product(4, 10, 20), Product(4, 20, 10))
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
    shape = TracedShape(trace, "class", 1, 4, cuts=lambda tp, rows: (cut if tp > 1 else UnitCut(),))
    (whole,), (share,) = shape.loads(4), shape.loads(4, 2)
    assert share.forward_flops == whole.forward_flops / 2
    assert share.parameters == 400
    assert share.saved_elements == round(whole.saved_elements * 0.6)
    assert share.forward_sums == share.backward_sums == (80,)


@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("num_sms", [None, 8])
def test_the_planner_and_the_search_for_shardings_have_one_price(rows: int, num_sms: int | None):
    """Of whole units, and of shares but for sums that run under the weights' gradients."""
    machine = replace(MACHINE, num_sms=num_sms)
    own, names = Prices(machine, 2, rows=rows / 4), ("in", "mlp")
    lines = (Line(0.0, n) for n in (2000.0, 2000.0, 2000.0, 1600.0))
    unit = TracedUnit("mlp", 800, (), *lines)
    trace = TracedModel("Net", 900, (replace(unit, name="in"), unit), ())

    def cuts(tp: int, _: int) -> tuple[UnitCut, ...]:
        return unit_cuts(GRAPH, (0, 0, 0) if tp == 1 else (0, 1, 1), names, own)

    shape = TracedShape(trace, "class", 1, 4, cuts=cuts)
    program = compile_program(schedule="1f1b", pp=1, num_microbatches=1)
    for tp, picks in ((1, (0, 0, 0)), (2, (0, 1, 1))):
        stage = sum_loads(list(shape.loads(rows, tp)))
        table = AnalyticCosts((stage,), machine, tp=tp).table(program)
        priced = [own.of(o, o.choices[p]) for o, p in zip(GRAPH.operators, picks, strict=True)]
        computing = sum(price.computing for price in priced) / (1.1 if tp == 1 else 1.0)
        sent = 0.0 if tp == 1 else priced[-1].sending
        back = 0.0 if tp == 1 else own.entrance(GRAPH.values[0])[0]
        split = table.backward_input[0] + table.backward_weight[0]
        assert table.forward[0] + split == pytest.approx(computing + sent + back)
    assert shape.unlisted() is None


def test_weights_that_a_module_uses_itself_are_named_where_their_gradients_are_added_up():
    for partial in (False, True):
        choice = Choice(("R",), ("R",), partial=partial)
        used = Operator("mix", "mul", None, (2,), (3,), (choice,), parameters=("mix.scale",))
        graph = replace(
            GRAPH, values=(*GRAPH.values, Value(80.0)), operators=(*GRAPH.operators, used)
        )
        rows = Planner(graph, prices()).found().layers
        assert ("mix" in {row.pattern for row in rows}) is partial
