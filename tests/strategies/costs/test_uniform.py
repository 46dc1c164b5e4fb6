import pytest

from strategies import UniformCosts, compile_program
from strategies.compiler import compile_plan
from strategies.costs.uniform import count_buckets
from strategies.errors import CostError
from strategies.ir.program import bidirectional
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


def table(schedule, costs):
    return costs.table(compile_program(schedule=schedule, pp=4, num_microbatches=8))


def test_a_list_has_a_number_per_rank_which_its_stages_share():
    costs = UniformCosts(forward=[1, 2, 3, 4], backward=(4, 4, 8, 8), grad_reduce=(2, 4, 6, 8))
    plain = table("1f1b", costs)
    assert plain.forward == plain.recompute == (1, 2, 3, 4)
    assert plain.backward == (4, 4, 8, 8)
    assert plain.backward_input == plain.backward_weight == (2, 2, 4, 4)
    assert plain.reduce == ((2,), (4,), (6,), (8,))
    shared = table("zb_v", costs)  # its second stages come back
    assert shared.forward == (0.5, 1, 1.5, 2, 2, 1.5, 1, 0.5)
    assert shared.reduce == ((1,), (2,), (3,), (4,), (4,), (3,), (2,), (1,))
    twice = table("chimera", costs)
    assert twice.forward == (1, 2, 3, 4)
    assert twice.reduce == ((1,), (2,), (3,), (4,))


def test_a_list_may_have_a_number_per_stage():
    costs = UniformCosts(
        forward=(1, 2, 3, 4, 5, 6, 7, 8), recompute=(1,) * 8, grad_reduce=(3,) * 8, p2p=range_(7)
    )
    found = table("interleaved_1f1b", costs)
    assert found.forward == (1, 2, 3, 4, 5, 6, 7, 8)
    assert found.backward == found.recompute == (1,) * 8  # 2 of the rank; 1 of the stage
    assert found.reduce == ((3,),) * 8
    assert found.latency == range_(7)


def range_(count):
    return tuple(map(float, range(count)))


def test_weights_gradients_may_be_what_is_given():
    found = table("zb_h1", UniformCosts(backward=(3, 3, 6, 3), backward_weight=1))
    assert found.backward_input == (2, 2, 5, 2)
    assert found.backward_weight == (1, 1, 1, 1)
    assert table("zb_h1", UniformCosts(backward_weight=0.5)).backward_input == (1.5,) * 4


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_v", "chimera", "dualpipe"])
def test_equal_numbers_in_lists_are_one_number(schedule):
    numbers = {"forward": 1.5, "backward": 2.5, "backward_input": 1.0, "recompute": 3.0,
               "grad_reduce": 7.0}  # fmt: skip
    lists = {name: (value,) * 4 for name, value in numbers.items()}
    assert table(schedule, UniformCosts(**lists)) == table(schedule, UniformCosts(**numbers))


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        (
            "1f1b",
            {"forward": (1, 1, 2)},
            "costs.forward=[1,1,2] has 3 numbers, but pp=4: 4 are needed, one per rank. "
            "Try costs.forward=[1,1,2,2].",
        ),
        (
            "zb_v",
            {"backward": (3,)},
            "costs.backward=[3] has 1 number, but pp=4: 4 are needed, one per rank, or 8, one per "
            "stage. Try costs.backward=[3,3,3,3].",
        ),
        (
            "1f1b",
            {"grad_reduce": (1,) * 5},
            "costs.grad_reduce=[1,1,1,1,1] has 5 numbers, but pp=4: 4 are needed, one per rank. "
            "Try costs.grad_reduce=[1,1,1,1].",
        ),
        (
            "1f1b",
            {"p2p": (0.5,) * 4},
            "costs.p2p=[0.5,0.5,0.5,0.5] has 4 numbers, but there are 3 boundaries between 4 "
            "stages (pp=4). Try costs.p2p=[0.5,0.5,0.5].",
        ),
        (
            "1f1b",
            {"backward": (2, 2, 4, 2), "backward_input": 2},
            "costs.backward_input=2 costs.backward=[2,2,4,2]: on stage 0 it is 2 of 2, and must "
            "lie between 0 and that. Try costs.backward_input=null.",
        ),
        (
            "1f1b",
            {"backward": 3, "backward_weight": 3},
            "costs.backward_weight=3 costs.backward=3: on stage 0 it is 3 of 3, and must lie "
            "between 0 and that. Try costs.backward_weight=null.",
        ),
    ],
)
def test_lists_that_do_not_go_with_the_program_are_refused(schedule, options, message):
    with pytest.raises(CostError) as error:
        table(schedule, UniformCosts(**options))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            (
                {name: value},
                f"costs.{name}={shown}: expected a number {least}, or a list of them. "
                f"Try costs.{name}={fix}.",
            )
            for name, value, shown, least, fix in (
                ("forward", 0, "0", "> 0", 1),
                ("backward", -1, "-1", "> 0", 1),
                ("forward", float("nan"), "nan", "> 0", 1),
                ("forward", (1, 0), "0", "> 0", 1),
                ("backward_input", 0, "0", "> 0", 1),
                ("grad_reduce", -1, "-1", ">= 0", 0),
                ("p2p", -0.5, "-0.5", ">= 0", 0),
                ("p2p", float("nan"), "nan", ">= 0", 0),
                ("recompute", -1, "-1", ">= 0", 0),
                ("p2p", (0, -1), "-1", ">= 0", 0),
            )
        ),
        (
            {"backward_input": 1, "backward_weight": 1},
            "costs.backward_input=1 costs.backward_weight=1: with costs.backward one of them says "
            "the other. Try costs.backward_weight=null.",
        ),
        (
            {"fused": 2, "forward": (1, 2)},
            "costs.fused=2 is the duration of every pair, and costs.forward=[1,2] differs by "
            "stage. Try costs.fused=null.",
        ),
        *(
            (
                {name: value},
                f"costs.{name}={wrong!r}: expected a number {least}, or a list of them. "
                f"Try costs.{name}={fix}.",
            )
            for name, least, fix in (
                ("forward", "> 0", 1),
                ("backward", "> 0", 1),
                ("backward_input", "> 0", 1),
                ("backward_weight", "> 0", 1),
                ("recompute", ">= 0", 0),
                ("grad_reduce", ">= 0", 0),
                ("p2p", ">= 0", 0),
            )
            for value, wrong in (("1", "1"), (True, True), ([1, "2"], "2"))
        ),
        *(
            ({name: value}, f"costs.{name}={value!r}: expected {what}. Try costs.{name}={fix}.")
            for name, value, what, fix in (
                ("num_buckets", 0, "a whole number >= 1", 1),
                ("num_buckets", "2", "a whole number >= 1", 1),
                ("num_buckets", 1.5, "a whole number >= 1", 1),
                ("fused", 0, "a number > 0", 1),
                ("fused", "2", "a number > 0", 1),
                ("fused", (1, 2), "a number > 0", 1),
                ("stage_input", 1, "a share of a full activation, >= 0 and < 1", 0.1),
                ("stage_input", "0.1", "a share of a full activation, >= 0 and < 1", 0.1),
                ("stage_input", None, "a share of a full activation, >= 0 and < 1", 0.1),
            )
        ),
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
