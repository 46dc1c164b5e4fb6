"""LB1 against closed forms, and against the best of all orders of tiny instances."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.bounds import Bound, _one_machine, lower_bound, memory_bound
from strategies.compiler import compile_compute
from strategies.errors import ProgramError
from strategies.ir import verify
from strategies.ir.program import bidirectional
from strategies.lowering.send_recv import add_messages
from strategies.plan import Plan, Recompute
from tests.strategies.programs import uneven, written


def bound(program, costs):
    return lower_bound(program, costs.table(program))


@pytest.mark.parametrize("p2p", [0.0, 0.125, 0.25])
@pytest.mark.parametrize("microbatches", [8, 9, 13])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_the_closed_form_for_equal_stages(pp, stages, microbatches, p2p):
    """m(F+B) + (p-1)((F+B)/v + 2c), where there is work enough for every wait of a rank."""
    program = compile_program(
        schedule="foldx_fifo", pp=pp, num_microbatches=microbatches, stages_per_rank=stages
    )
    expected = microbatches * 3 + (pp - 1) * (3 / stages + 2 * p2p)
    assert bound(program, UniformCosts(p2p=p2p)).value == pytest.approx(expected)


@pytest.mark.parametrize("p2p", [0.0, 0.25, 2.0])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_one_microbatch_crosses_all_stages_one_after_the_other(pp, stages, p2p):
    program = compile_program(schedule="naive", pp=pp, num_microbatches=1, stages_per_rank=stages)
    messages = 2 * (pp * stages - 1) if pp > 1 else 0
    assert bound(program, UniformCosts(p2p=p2p)).value == pytest.approx(3 * pp + messages * p2p)


def test_the_order_of_a_program_does_not_change_its_bound():
    shape = {"pp": 4, "num_microbatches": 8}
    costs = UniformCosts(p2p=0.25)
    values = {
        bound(compile_program(schedule=name, **shape), costs) for name in ("naive", "gpipe", "1f1b")
    }
    assert values == {Bound(33 + 6 * 0.25, "LB1 rank 3")}


@pytest.mark.parametrize("microbatches", [4, 8])
def test_a_split_backward_leaves_only_the_forwards_before_the_last_rank(microbatches):
    """m(F+I+W) + (p-1)F where W fills the wait for the gradients."""

    def row(rank):
        names = [f"{rank}F{m}" for m in range(microbatches)]
        names += [f"{rank}I{m}" for m in range(microbatches)]
        return " ".join(names + [f"{rank}W{m}" for m in range(microbatches)])

    program = written("\n".join(map(row, range(3))), num_microbatches=microbatches)
    lowered = add_messages(verify(program))
    found = bound(lowered, UniformCosts(backward=2))
    assert found.value == pytest.approx(microbatches * 3 + 2)


def test_the_slowest_rank_binds():
    program = compile_program(schedule="1f1b", pp=3, num_microbatches=4)
    found = bound(program, uneven(program, [1, 5, 1]))
    # Rank 1 works 4 * 15, and a forward and a backward of rank 0 lie around it.
    assert found == Bound(60 + 1 + 2, "LB1 rank 1")


def test_of_equal_ranks_the_lowest_is_named():
    text = """
        0F0 1F1 1B1 0B0
        0F1 1F0 1B0 0B1
    """
    program = written(text, num_microbatches=2, placement=bidirectional(2))
    costs = UniformCosts()
    assert bound(add_messages(verify(program)), costs) == Bound(6, "LB1 rank 0")


def test_reductions_are_left_out():
    program = compile_program(schedule="1f1b", pp=2, num_microbatches=2, buckets=2)
    assert bound(program, UniformCosts(grad_reduce=50)) == bound(program, UniformCosts())


def test_transfers_and_latencies_are_on_the_path():
    program = compile_program(schedule="1f1b", pp=2, num_microbatches=1)
    found = bound(program, uneven(program, [1, 1], latency=0.5, occupancy=2))
    assert found.value == 6 + 2 * 2.5


def preemptive_best(jobs):
    """The optimum in whole slots: at each of them the ready job with the most tail, tried out."""
    left = [duration for _, duration, _ in jobs]
    best = float("inf")

    def run(now, left, worst):
        nonlocal best
        if worst >= best:
            return
        if not any(left):
            best = worst
            return
        ready = [i for i, (head, _, _) in enumerate(jobs) if left[i] and head <= now]
        if not ready:
            run(now + 1, left, worst)
        for i in ready:
            rest = [value - (j == i) for j, value in enumerate(left)]
            ended = now + 1 + jobs[i][2] if rest[i] == 0 else 0
            run(now + 1, rest, max(worst, ended))

    run(0, left, 0)
    return best


JOBS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 2), st.integers(0, 4)), min_size=1, max_size=4
)


@given(JOBS)
def test_jacksons_schedule_is_the_preemptive_optimum(jobs):
    assert _one_machine(jobs) == preemptive_best(jobs)


def orders(stages):
    """All orders of two microbatches on a rank: each backward behind its forward."""
    jobs = [f"{stage}{kind}{m}" for stage in stages for kind in "FB" for m in range(2)]
    for order in itertools.permutations(jobs):
        place = {job: index for index, job in enumerate(order)}
        if all(place[f"{stage}F{m}"] < place[f"{stage}B{m}"] for stage in stages for m in range(2)):
            yield " ".join(order)


def best_of_all_orders(costs_of):
    """The shortest of all programs of 2 ranks, 2 microbatches that do not deadlock."""
    best = float("inf")
    for first, second in itertools.product(orders([0]), orders([1])):
        program = written(f"{first}\n{second}", num_microbatches=2, role="accumulate")
        try:
            lowered = add_messages(verify(program))
        except ProgramError:
            continue
        best = min(best, simulate(lowered, costs_of(lowered)).makespan)
    return best


@pytest.mark.parametrize(
    ("forward", "backward", "latency"),
    [
        ([1, 1], [2, 2], 0),
        ([1, 1], [2, 2], 0.5),
        ([3, 1], [1, 4], 0),
        ([1, 4], [2, 1], 0.25),
        ([2, 1], [5, 1], 1),
    ],
)
def test_no_order_at_all_beats_the_bound(forward, backward, latency):
    def costs_of(program):
        return uneven(program, forward, backward=backward, latency=latency)

    program = compile_program(schedule="1f1b", pp=2, num_microbatches=2)
    found = bound(program, costs_of(program)).value
    best = best_of_all_orders(costs_of)
    assert found <= best
    if latency == 0:
        assert found == best


COSTS = UniformCosts()


def memory_bound_of(pp, microbatches, cap, *, schedule="1f1b", costs=COSTS):
    program = compile_compute(Plan(schedule, pp, microbatches))
    return memory_bound(program, costs.table(program), (cap,) * pp)


def by_formula(pp, microbatches, cap):
    """max over s of min over n of max{g + m(F+B) + nR, g + ((m-n) L + n (R+B)) / K}."""
    return max(
        min(
            max(
                3 * s + 3 * microbatches + n,
                3 * s + ((microbatches - n) * 3 * (pp - s) + 3 * n) / cap,
            )
            for n in range(microbatches + 1)
        )
        for s in range(pp)
    )


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 4, 8, 16])
@pytest.mark.parametrize("cap", [1, 2, 3, 8])
def test_for_one_stage_per_rank_it_is_the_formula(pp, microbatches, cap):
    assert memory_bound_of(pp, microbatches, cap).value == pytest.approx(
        by_formula(pp, microbatches, cap)
    )


def test_it_names_the_rank_that_binds():
    assert memory_bound_of(4, 8, 1) == Bound(36, "LB2 rank 2")
    assert memory_bound_of(4, 8, 1).rank == 2
    assert memory_bound_of(4, 4, 1) == Bound(21, "LB2 rank 2")
    assert memory_bound_of(8, 8, 1).value == 48


def test_room_for_everything_leaves_the_work():
    assert memory_bound_of(4, 8, 8).value == 33


def test_latency_makes_a_kept_activation_wait_longer():
    slow = memory_bound_of(2, 4, 1, costs=UniformCosts(p2p=5))
    assert slow.value > memory_bound_of(2, 4, 1).value


def test_recomputation_that_is_free_leaves_no_bound_but_the_backwards():
    assert memory_bound_of(4, 8, 1, costs=UniformCosts(recompute=0)).value == 33


def test_with_two_stages_per_rank_pairs_count_their_share():
    program = compile_compute(Plan("interleaved_1f1b", 2, 4))
    table = COSTS.table(program)
    values = [memory_bound(program, table, (cap, cap)).value for cap in (0.5, 1, 2, 4)]
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1]


def test_a_rank_without_work_binds_nowhere():
    program = written("0F0 0B0", num_microbatches=1)
    costs = uneven(program, [1], backward=[2])
    assert memory_bound(program, costs.table(program), (1,)) == Bound(3, "LB2 rank 0")


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v", "chimera", "hanayo", "dualpipe"])
@pytest.mark.parametrize("policy", ["none", "full", "mario"])
def test_no_program_beats_the_bound_of_what_it_holds_itself(schedule, policy):
    from strategies.analysis.metrics import measure
    from strategies.simulator.engine import simulate

    costs = UniformCosts(forward=2, backward=3, backward_input=1, p2p=0.2)
    program = compile_program(
        schedule=schedule, pp=4, num_microbatches=8, costs=costs, recompute=Recompute(policy)
    )
    figures = measure(simulate(program, costs), costs)
    assert figures.makespan >= max(figures.lb1, figures.lb2) - 1e-9
    assert figures.lower_bound == max(figures.lb1, figures.lb2)
    assert figures.bound_gap >= -1e-9
