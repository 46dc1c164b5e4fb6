import pytest

from strategies import UniformCosts
from strategies.bounds import Bound
from strategies.compiler import compile_compute, compile_program
from strategies.memory_bound import memory_bound
from strategies.plan import Plan
from strategies.recompute import Recompute
from tests.strategies.programs import uneven, written

COSTS = UniformCosts()


def bound(pp, microbatches, cap, *, schedule="1f1b", costs=COSTS):
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
    assert bound(pp, microbatches, cap).value == pytest.approx(by_formula(pp, microbatches, cap))


def test_it_names_the_rank_that_binds():
    assert bound(4, 8, 1) == Bound(36, "LB2 rank 2")
    assert bound(4, 8, 1).rank == 2
    assert bound(4, 4, 1) == Bound(21, "LB2 rank 2")
    assert bound(8, 8, 1).value == 48


def test_room_for_everything_leaves_the_work():
    assert bound(4, 8, 8).value == 33


def test_latency_makes_a_kept_activation_wait_longer():
    slow = bound(2, 4, 1, costs=UniformCosts(p2p=5))
    assert slow.value > bound(2, 4, 1).value


def test_recomputation_that_is_free_leaves_no_bound_but_the_backwards():
    assert bound(4, 8, 1, costs=UniformCosts(recompute=0)).value == 33


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
    from strategies.metrics import measure
    from strategies.simulator.engine import simulate

    costs = UniformCosts(forward=2, backward=3, backward_input=1, p2p=0.2)
    program = compile_program(
        schedule=schedule, pp=4, num_microbatches=8, costs=costs, recompute=Recompute(policy)
    )
    figures = measure(simulate(program, costs), costs)
    assert figures.makespan >= max(figures.lb1, figures.lb2) - 1e-9
    assert figures.lower_bound == max(figures.lb1, figures.lb2)
    assert figures.bound_gap >= -1e-9
