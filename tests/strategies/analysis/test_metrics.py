import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.metrics import measure
from strategies.compiler import compile_plan
from strategies.ir import verify
from strategies.ir.program import bidirectional
from strategies.lowering.send_recv import add_messages
from strategies.plan import Recompute
from strategies.simulator.engine import unroll
from tests.strategies.programs import plans, uneven, written


def figures(program, costs):
    return measure(simulate(program, costs), costs)


def test_all_figures_of_1f1b():
    program = compile_program(schedule="1f1b", pp=4, num_microbatches=8)
    found = figures(program, UniformCosts(grad_reduce=2))
    assert found.makespan == 35
    # Rank 0 runs for the whole step, rank 3 from 3 to 27 and then reduces.
    assert found.period == 35
    assert found.bubble_ratio == pytest.approx(1 - 24 / 35)
    assert (found.lower_bound, found.binding_bound) == (33, "LB1 rank 3")
    assert found.bound_gap == pytest.approx(35 / 33 - 1)
    assert found.gap_to_ideal == pytest.approx(35 / 24 - 1)
    assert found.peak_activations == (4, 3, 2, 1)
    assert found.peak_memory_bytes == (None,) * 4
    assert found.exposed_grad_reduce == 2
    assert found.throughput == 8 / 35
    assert found.num_messages == 2 * 3 * 8  # there and back over three boundaries
    assert (found.weight_copies, found.synchronous) == (1, True)
    assert (found.costs, found.time_unit) == ("uniform", "F")


def test_the_gap_to_the_ideal_is_that_of_the_articles():
    program = compile_program(schedule="1f1b", pp=4, num_microbatches=8)
    assert figures(program, UniformCosts()).gap_to_ideal == pytest.approx(3 / 8)


def test_a_recompute_is_no_part_of_the_ideal():
    program = written("0F0 0R0 0B0 0STEP", num_microbatches=1, lowered=True)
    found = figures(verify(program), UniformCosts())
    assert found.makespan == 4
    assert found.bubble_ratio == 0
    assert found.gap_to_ideal == pytest.approx(1 / 3)


def test_the_two_halves_of_a_split_backward_are_part_of_the_ideal():
    program = written("0F0 0I0 0W0 0STEP", num_microbatches=1, lowered=True)
    found = figures(verify(program), UniformCosts(backward=3))
    assert found.gap_to_ideal == pytest.approx(0)


@pytest.mark.parametrize(("reduce", "exposed"), [(3, 0), (4, 0), (11, 7)])
def test_reductions_that_end_before_the_last_compute_are_not_exposed(reduce, exposed):
    """The second stage reduces from 8 on; the first one's backwards run until 12."""
    program = compile_program(schedule="foldx_aiao", pp=1, num_microbatches=2, buckets=(0, 1))
    costs = uneven(program, [1, 1], reduce=[(), (reduce,)])
    assert figures(program, costs).exposed_grad_reduce == exposed


def test_only_what_outlasts_all_ranks_is_exposed():
    program = compile_program(schedule="1f1b", pp=2, num_microbatches=2)
    # Rank 1 is done at 7 and rank 0 at 9.
    assert figures(program, uneven(program, [1, 1], reduce=[(0,), (2,)])).exposed_grad_reduce == 0
    assert figures(program, uneven(program, [1, 1], reduce=[(0,), (3,)])).exposed_grad_reduce == 1


def test_a_program_without_reductions_exposes_none():
    program = compile_program(schedule="1f1b", pp=2, num_microbatches=2, buckets=0)
    assert figures(program, UniformCosts(grad_reduce=9)).exposed_grad_reduce == 0


def test_the_period_leaves_out_the_wait_for_the_first_input():
    program = written(
        """
        0F0 0SEND_F0>1
        1RECV_F0<0 1F0
        """,
        num_microbatches=1,
        role="forward",
        lowered=True,
    )
    found = figures(verify(program), uneven(program, [2, 3]))
    assert found.makespan == 5
    assert found.period == 3


def test_two_weight_copies_are_reported():
    program = written(
        """
        0F0 1F1 1B1 0B0 0STEP 1STEP
        0F1 1F0 1B0 0B1 0STEP 1STEP
        """,
        num_microbatches=2,
        placement=bidirectional(2),
    )
    found = figures(verify(add_messages(verify(program))), UniformCosts())
    assert found.weight_copies == 2
    assert found.makespan == 6
    assert found.bubble_ratio == 0
    assert found.peak_activations == (2, 2)


def test_bytes_come_from_the_costs():
    program = compile_program(schedule="1f1b", pp=2, num_microbatches=4)
    costs = uneven(
        program, [1, 1], reduce=[(0,), (0,)], activation_bytes=(5, 7), state_bytes=(100, 200)
    )
    assert figures(program, costs).peak_memory_bytes == (110, 207)


@given(plans(), st.sampled_from((0.0, 0.5)), st.sampled_from((0.0, 6.0)))
def test_figures_hang_together(plan, p2p, reduce):
    costs = UniformCosts(p2p=p2p, grad_reduce=reduce)
    program = compile_plan(plan).train
    found = figures(program, costs)
    work = plan.num_microbatches * 3
    assert found.bubble_ratio == pytest.approx(1 - work / found.makespan)
    assert found.gap_to_ideal == pytest.approx(found.makespan / work - 1)
    assert found.bound_gap >= -1e-9
    assert work - 1e-9 <= found.lower_bound <= found.makespan + 1e-9
    assert found.period <= found.makespan + 1e-9
    assert 0 <= found.exposed_grad_reduce <= reduce + 1e-9
    if reduce == 0:
        assert found.exposed_grad_reduce == 0


@given(plans())
def test_the_same_figures_come_out_of_any_step(plan):
    """A timeline need not begin at 0."""
    costs = UniformCosts(grad_reduce=2)
    program = compile_plan(plan).train
    first, second = unroll(program, costs, steps=2)
    assert first.origin_time == 0
    assert second.makespan >= first.period - 1e-9
    assert measure(second, costs).lower_bound == measure(first, costs).lower_bound
    assert sum(map(second.busy, range(plan.pp))) == pytest.approx(
        3 * plan.num_microbatches * plan.pp
    )


UNEQUAL = st.integers(2, 6).flatmap(
    lambda pp: st.tuples(
        st.lists(st.integers(1, 4), min_size=pp, max_size=pp),
        st.lists(st.integers(1, 8), min_size=pp, max_size=pp),
        st.integers(1, 20),
    )
)


@given(UNEQUAL)
def test_unequal_stages_have_the_known_throughput(drawn):
    """n / (sum + (n - 1) max), of forwards and backwards by themselves where all forwards come
    first; one after the other a slow stage's forwards and backwards hide each other's waits."""
    forward, backward, n = drawn
    whole = [f + b for f, b in zip(forward, backward, strict=True)]
    slowest = {"1f1b": max(whole), "gpipe": max(forward) + max(backward)}
    for name, most in slowest.items():
        program = compile_program(schedule=name, pp=len(whole), num_microbatches=n)
        found = figures(program, UniformCosts(tuple(forward), tuple(backward))).throughput
        known = n / (sum(whole) + (n - 1) * most)
        assert found >= known * (1 - 1e-9)
        if name == "gpipe":
            assert found == pytest.approx(known)


@given(UNEQUAL)
def test_a_pipeline_whose_last_stage_is_slowest_has_no_more_than_the_known_throughput(drawn):
    """Nothing waits behind the last stage, so that it is busy from its first forward on."""
    forward, backward, n = drawn
    forward[-1], backward[-1] = max(forward), max(backward)
    whole = [f + b for f, b in zip(forward, backward, strict=True)]
    program = compile_program(schedule="1f1b", pp=len(whole), num_microbatches=n)
    found = figures(program, UniformCosts(tuple(forward), tuple(backward))).throughput
    assert found == pytest.approx(n / (sum(whole) + (n - 1) * whole[-1]))


def test_a_checkpointed_forward_counts_as_the_share_that_it_keeps():
    costs = UniformCosts(stage_input=0.25)
    program = compile_program(
        schedule="1f1b", pp=2, num_microbatches=4, recompute=Recompute("full")
    )
    # One is whole while it runs backwards; the first rank has another one's input beside it.
    assert measure(simulate(program, costs), costs).peak_activations == (1.25, 1.0)
