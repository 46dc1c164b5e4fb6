import pytest

from strategies import UniformCosts, compile_program
from strategies.compiler import compile_plan
from strategies.costs.uniform import count_buckets
from strategies.errors import CostError
from strategies.ir.placement import bidirectional
from strategies.plan import Plan
from tests.strategies.programs import written


def test_a_virtual_stage_takes_its_share_of_the_rank():
    program = compile_program(
        schedule="foldx_fifo", pp=2, num_microbatches=2, stages_per_rank=4, buckets=2
    )
    costs = UniformCosts(forward=4, backward=12, backward_input=4, grad_reduce=16, p2p=0.5)
    table = costs.table(program)
    assert (table.name, table.time_unit, table.transport) == ("uniform", "F", "buffered")
    assert table.forward == (1,) * 8
    assert table.backward == (3,) * 8
    assert table.backward_input == (1,) * 8
    assert table.backward_weight == (2,) * 8
    assert table.recompute == (1,) * 8
    assert table.step == (0,) * 8
    assert table.reduce == ((2, 2),) * 8
    assert table.latency == (0.5,) * 7
    assert table.occupancy == (0,) * 7
    assert table.activation_bytes is table.state_bytes is None


def test_half_of_a_backward_is_for_the_inputs():
    table = UniformCosts(backward=3).table(compile_program(schedule="gpipe", pp=1))
    assert (table.backward_input, table.backward_weight) == ((1.5,), (1.5,))


def test_a_recompute_has_a_price_of_its_own():
    program = compile_program(schedule="gpipe", pp=1)
    assert UniformCosts(forward=3).table(program).recompute == (3,)
    assert UniformCosts(forward=3, recompute=0).table(program).recompute == (0,)


def test_with_two_weight_copies_a_stage_costs_the_full_figure():
    program = written(
        """
        0F0 1F1 1B1 0B0 0REDUCE0 1REDUCE0
        0F1 1F0 1B0 0B1 0REDUCE0 1REDUCE0
        """,
        num_microbatches=2,
        placement=bidirectional(2),
    )
    table = UniformCosts(grad_reduce=6).table(program)
    assert (table.forward, table.backward) == ((1, 1), (2, 2))
    assert table.reduce == ((3,), (3,))


def test_buckets_are_counted_from_the_program():
    plan = Plan("1f1b", 3, 2, buckets=(2, 0, 1))
    programs = compile_plan(plan)
    assert count_buckets(programs.train) == (2, 0, 1)
    assert count_buckets(programs.accumulate) == (0, 0, 0)
    assert UniformCosts(grad_reduce=4).table(programs.train).reduce == ((2, 2), (), (4,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"forward": 0},
            "costs.forward=0 costs.backward=2: both must be > 0. "
            "Try costs.forward=1 costs.backward=2.",
        ),
        (
            {"backward": -1},
            "costs.forward=1 costs.backward=-1: both must be > 0. "
            "Try costs.forward=1 costs.backward=2.",
        ),
        (
            {"forward": float("nan")},
            "costs.forward=nan costs.backward=2: both must be > 0. "
            "Try costs.forward=1 costs.backward=2.",
        ),
        (
            {"backward": 3, "backward_input": 3},
            "costs.backward_input=3 is a share of costs.backward=3 and must lie between. "
            "Try costs.backward_input=1.5.",
        ),
        (
            {"backward_input": 0},
            "costs.backward_input=0 is a share of costs.backward=2 and must lie between. "
            "Try costs.backward_input=1.",
        ),
        ({"grad_reduce": -1}, "costs.grad_reduce is a duration >= 0. Try costs.grad_reduce=0."),
        ({"p2p": -0.5}, "costs.p2p is a duration >= 0. Try costs.p2p=0."),
        ({"p2p": float("nan")}, "costs.p2p is a duration >= 0. Try costs.p2p=0."),
        ({"recompute": -1}, "costs.recompute is a duration >= 0. Try costs.recompute=0."),
        ({"num_buckets": 0}, "costs.num_buckets=0: at least 1. Try costs.num_buckets=1."),
        (
            {"transport": "pigeon"},
            "costs.transport=pigeon is unknown. Try costs.transport=buffered or "
            "costs.transport=rendezvous.",
        ),
    ],
)
def test_figures_that_make_no_sense_are_refused(options, message):
    with pytest.raises(CostError) as error:
        UniformCosts(**options)
    assert str(error.value) == message
