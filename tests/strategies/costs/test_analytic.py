"""All figures of a tiny machine worked out by hand: 100 FLOP/s, 10 B/s memory, 4 B elements."""

from dataclasses import replace

import pytest

from strategies import compile_program, simulate
from strategies.analysis.memory import peak_bytes
from strategies.costs.analytic import AnalyticCosts
from strategies.costs.hardware import ElementSizes, Hardware
from strategies.costs.load import Load, sum_loads
from strategies.errors import CostError
from strategies.ir.program import bidirectional
from tests.strategies.programs import written

MACHINE = Hardware(
    name="abacus",
    peak_flops=100.0,
    efficiency=0.5,
    memory_gb=1.0,
    memory_bandwidth=10.0,
    intra_bandwidth=8.0,
    intra_latency_s=0.25,
    inter_bandwidth=2.0,
    inter_latency_s=1.0,
    gpus_per_node=2,
)
STAGES = (
    Load(forward_flops=100, parameters=5, output_elements=2, saved_elements=7),
    Load(forward_flops=200, parameters=10, output_elements=10, saved_elements=3),
    Load(forward_flops=50, parameters=20, output_elements=1, saved_elements=0),
)


def table(dp=1, buckets=1, **options):
    program = compile_program(schedule="1f1b", pp=3, num_microbatches=2, buckets=buckets)
    return AnalyticCosts(STAGES, MACHINE, dp=dp, **options).table(program)


def test_each_number_format_has_its_own_peak_or_the_one_for_all():
    machine = replace(MACHINE, memory_bandwidth=1e9, peak_bf16_flops=400.0)
    program = compile_program(schedule="1f1b", pp=3, num_microbatches=2)

    def forward(hardware, number_format):
        return AnalyticCosts(STAGES, hardware, number_format=number_format).table(program).forward

    assert forward(machine, "fp32") == forward(machine, "tf32") == (2, 4, 1)
    assert forward(machine, "bf16") == (0.5, 1, 0.25)
    with pytest.raises(CostError, match=r"abacus has no peak for fp32: it has one for bf16\. Try"):
        forward(replace(machine, peak_flops=None), "fp32")


def test_an_update_that_leaves_weights_to_others_copies_them_first():
    late = compile_program(schedule="pipedream_2bw", pp=3, num_microbatches=3)
    steps = AnalyticCosts(STAGES, MACHINE).table(late).step
    # Read and written, 4 B per parameter, at 10 B/s; the last rank has one version.
    more = [now - before for now, before in zip(steps, table().step, strict=True)]
    assert more == pytest.approx([2 * 5 * 4 / 10, 2 * 10 * 4 / 10, 0])


def test_figures_that_costs_share_are_not_those_of_other_machines():
    program = compile_program(schedule="1f1b", pp=3, num_microbatches=2)
    costs, other = AnalyticCosts(STAGES, MACHINE), replace(MACHINE, peak_flops=50.0)
    shared = costs.table(program)
    assert replace(costs, dp=2).known is costs.known
    assert replace(costs, hardware=other).table(program) == (
        AnalyticCosts(STAGES, other).table(program)
    )
    assert costs.table(program) == shared


def test_compute_takes_flops_over_reached_peak_or_bytes_over_bandwidth():
    # 100/50 = 2 s; 2 * 10 elements * 4 B / 10 B/s = 8 s beats 200/50; 50/50 = 1 s.
    assert table().forward == (2, 8, 1)
    assert table().backward == (4, 16, 2)
    assert table().backward_input == table().backward_weight == table().recompute == (2, 8, 1)
    assert (table().name, table().time_unit) == ("analytic", "s")


def test_messages_take_their_bytes_over_the_link_between_the_ranks():
    # Ranks 0 and 1 share a node, rank 2 is on another one.
    assert table().occupancy == (2 * 4 / 8, 10 * 4 / 2)
    assert table().latency == (0.25, 1.0)


def test_with_two_replicas_every_stage_is_a_node():
    assert table(dp=2).occupancy == (2 * 4 / 2, 10 * 4 / 2)
    assert table(dp=2).latency == (1.0, 1.0)


def test_one_replica_reduces_nothing():
    assert table().reduce == ((0,), (0,), (0,))


def test_replicas_of_a_node_reduce_in_a_ring():
    # n=2: 2 * 1/2 * (parameters * 4 B / 2 buckets) / 8 B/s + 2 * 0.25 s, twice.
    assert table(dp=2, buckets=2).reduce == ((1.75, 1.75), (3.0, 3.0), (5.5, 5.5))


def test_a_ring_over_nodes_goes_at_the_speed_of_the_network():
    # n=3: 2 * 2/3 * bytes / 2 B/s + 4 * 1 s.
    assert table(dp=3).reduce == (
        pytest.approx((20 * 2 / 3 + 4,)),
        pytest.approx((40 * 2 / 3 + 4,)),
        pytest.approx((80 * 2 / 3 + 4,)),
    )


def test_a_stage_without_buckets_reduces_nothing():
    assert [len(row) for row in table(dp=2, buckets=(2, 0, 1)).reduce] == [2, 0, 1]


def test_the_optimizer_moves_seven_values_per_parameter():
    assert table().step == (7 * 5 * 4 / 10, 7 * 10 * 4 / 10, 7 * 20 * 4 / 10)


def test_memory_is_state_and_what_forwards_keep():
    assert table().activation_bytes == (28, 12, 0)
    assert table().state_bytes == (5 * 16, 10 * 16, 20 * 16)
    half = table(element_bytes=2, optimizer_elements=1)
    assert half.activation_bytes == (14, 6, 0)
    assert half.state_bytes == (5 * 6, 10 * 6, 20 * 6)
    program = compile_program(schedule="1f1b", pp=3, num_microbatches=4)
    # 1F1B holds 3, 2, 1 microbatches.
    assert peak_bytes(program, table()) == (80 + 84, 160 + 24, 320)


def test_a_whole_step_by_hand():
    """One microbatch down and up again, 1 s and 0.25 s on the first link, 20 s and 1 s."""
    program = compile_program(schedule="1f1b", pp=3, num_microbatches=1, buckets=0)
    costs = AnalyticCosts(STAGES, replace(MACHINE, memory_bandwidth=1e9))
    # F: 2, 4, 1; B: 4, 8, 2; steps are next to nothing.
    assert simulate(program, costs).makespan == pytest.approx(
        2 + 1.25 + 4 + 21 + 1 + 2 + 21 + 8 + 1.25 + 4, abs=1e-5
    )


def test_owners_of_two_copies_reduce_with_each_other():
    program = written(
        """
        0F0 1F1 1B1 0B0 0REDUCE0 1REDUCE0
        0F1 1F0 1B0 0B1 0REDUCE0 1REDUCE0
        """,
        num_microbatches=2,
        placement=bidirectional(2),
    )
    reduce = AnalyticCosts(STAGES[:2], MACHINE).table(program).reduce
    assert reduce == ((20 / 8 + 0.5,), (40 / 8 + 0.5,))


def test_loads_of_another_cut_are_refused():
    program = compile_program(schedule="1f1b", pp=2)
    with pytest.raises(CostError) as error:
        AnalyticCosts(STAGES, MACHINE).table(program)
    assert str(error.value) == "costs of 3 stages for a program of 2."


def test_a_stage_is_the_sum_of_its_units_and_hands_on_what_the_last_one_does():
    assert sum_loads(list(STAGES)) == Load(350, 35, 1, 10, num_units=3)
    assert sum_loads([]) == Load(0, 0, 0, 0, num_units=0)


def test_what_some_units_do_not_say_is_taken_from_what_they_do():
    first = Load(
        10.0, 5, 2, 8, backward_flops=(1.0, 2.0), waiting_elements=3, owns=(1,),
        tied=((1, 9), (7, 4)), first_saved_elements=100, listed=True,
        works=(("matmul", 1), ("norm", 2)), exchanged=(6,),
    )  # fmt: skip
    second = Load(
        20.0, 6, 3, 9, tied=((7, 6),), first_saved_elements=50, works=(("norm", 1),),
        exchanged=(7, 8), rebuilt_elements=2,
    )  # fmt: skip
    assert sum_loads([first, second]) == Load(
        30.0,
        5 + 6 + 6,  # the larger of what both use of group 7; group 1 is its own
        3,
        100 + 8 + 9,
        backward_flops=(1.0 + 20.0, 2.0 + 20.0),
        num_units=2,
        works=(("matmul", 1), ("norm", 3)),
        listed=True,
        rebuilt_elements=2,
        waiting_elements=3 + 9,
        exchanged=(6, 7, 8),
    )


def test_sharded_weights_halve_a_reduction_and_share_optimizer_and_state():
    plain, sharded = (
        AnalyticCosts(STAGES, MACHINE, dp=2).table(
            compile_program(schedule="1f1b", pp=3, num_microbatches=2, overlap=overlap)
        )
        for overlap in ("grad_reduce", "zero1")
    )
    # A ring of two on one node: half of 5 * 4 B at 8 B/s, and a latency.
    assert sharded.gather == (0.5 * 20 / 8 + 0.25, 0.5 * 40 / 8 + 0.25, 0.5 * 80 / 8 + 0.25)
    assert sharded.reduce == tuple((time,) for time in sharded.gather)
    assert plain.reduce == tuple((2 * time,) for time in sharded.gather)
    assert sharded.step == tuple(time / 2 for time in plain.step)
    assert plain.state_bytes == (80, 160, 320)
    assert sharded.state_bytes == (60, 120, 240)
    assert AnalyticCosts(STAGES, MACHINE, dp=2, optimizer_elements=0).table(
        compile_program(schedule="1f1b", pp=3, num_microbatches=2, overlap="zero1")
    ).state_bytes == (40, 80, 160)


def test_sixteen_bit_weights_are_summed_and_updated_in_thirty_two():
    sizes = ElementSizes(weight=2, activation=2, main=4)
    program = compile_program(schedule="1f1b", pp=3, num_microbatches=2, overlap="zero1")
    plain = compile_program(schedule="1f1b", pp=3, num_microbatches=2)
    costs = AnalyticCosts(STAGES, MACHINE, dp=2, sizes=sizes)
    # Weight 2, gradient 4, copy 4 and moments 8 bytes for each of 5, 10, 20 parameters.
    assert costs.table(plain).state_bytes == (90, 180, 360)
    assert costs.table(program).state_bytes == (5 * 6 + 30, 10 * 6 + 60, 20 * 6 + 120)
    assert costs.table(plain).activation_bytes == (14, 6, 0)
    assert costs.table(plain).occupancy == (2 * 2 / 2, 10 * 2 / 2)
    # Reads 4 + 4 + 8, writes 4 + 8 and the 2 bytes of the rounded weight.
    assert costs.table(plain).step == (5 * 30 / 10, 10 * 30 / 10, 20 * 30 / 10)
    assert costs.table(program).step == (5 * 15 / 10, 10 * 15 / 10, 20 * 15 / 10)
    # A ring of two on one node sends half: 4 bytes of each gradient, 2 of each weight.
    assert costs.table(program).reduce[0] == (0.5 * 20 / 8 + 0.25,)
    assert costs.table(program).gather[0] == 0.5 * 10 / 8 + 0.25
    short = AnalyticCosts(STAGES, MACHINE, dp=2, sizes=replace(sizes, wire=2))
    assert short.table(program).reduce[0] == (0.5 * 10 / 8 + 0.25,)


SHARED = (
    Load(100, 5, output_elements=2, saved_elements=7, forward_sums=(6,), backward_sums=(6, 6)),
    *STAGES[1:],
)


def shared_table(**options):
    program = compile_program(schedule="1f1b", pp=3, num_microbatches=2)
    return AnalyticCosts(SHARED, MACHINE, tp=2, **options).table(program)


def test_sharers_add_up_tensors_over_their_own_links():
    # 2 * 1/2 * 6 * 4 B / 8 B/s + 2 * 0.25 s = 3.5 s a tensor, beside 2 s of compute.
    found = shared_table()
    assert found.forward[0] == found.recompute[0] == 2 + 3.5
    assert found.backward_input[0] == 2 + 2 * 3.5
    assert found.backward_weight[0] == 2
    # In a whole backward the sums run under the weights' gradients.
    assert found.backward[0] == 2 + max(2, 2 * 3.5)
    assert found.forward[1:] == (8, 1)


def test_boundary_tensors_travel_in_slices_and_are_gathered():
    # Two sharers fill a node: both messages go from node to node, half a tensor per sharer.
    assert shared_table().occupancy == (2 * 4 / 2 / 2, 10 * 4 / 2 / 2)
    gathered = tuple(0.5 * count * 4 / 8 + 0.25 for count in (2, 10))
    assert shared_table().latency == tuple(1.0 + more for more in gathered)
    assert shared_table(sequence_parallel=True).latency == (1.0, 1.0)


def test_replicas_of_sharers_lie_apart():
    # Ranks 0 and 2: other nodes, although dp=2 alone would share one.
    program = compile_program(schedule="1f1b", pp=3, num_microbatches=2, buckets=1)
    costs = AnalyticCosts(STAGES, MACHINE, dp=2, tp=2)
    assert costs.table(program).reduce[0] == (2 * 0.5 * 5 * 4 / 2 + 2 * 1.0,)


def test_one_link_for_messages_and_reductions_is_for_buffered_messages():
    assert not table().one_link
    assert table(one_link=True).one_link
    with pytest.raises(CostError, match=r"Try costs\.transport=buffered"):
        table(one_link=True, transport="rendezvous")


def test_what_an_update_has_changed_is_kept_twice_but_for_what_nobody_has():
    """Weights and moments; of two parameters there is one moment less."""
    stage = replace(STAGES[0], lean_parameters=2)
    program = compile_program(schedule="1f1b", pp=1, num_microbatches=1)
    states = [
        AnalyticCosts((stage,), MACHINE, keeps_updates=keeps).table(program).state_bytes
        for keeps in (False, True)
    ]
    plain = 5 * (4 + 4) + 5 * 8 - 2 * 4
    assert states == [(plain,), (plain + 5 * (4 + 8) - 2 * 4,)]


def test_gradients_in_32_bits_need_no_wider_copy_for_the_update():
    program = compile_program(schedule="1f1b", pp=1, num_microbatches=1)
    for gradient, wider in ((4, 0), (2, 5 * 4)):
        sizes = ElementSizes(weight=2, gradient=gradient, activation=2, main=4)
        memory = AnalyticCosts(STAGES[:1], MACHINE, sizes=sizes).table(program).memory
        assert memory is not None
        assert memory.step_temporaries == (wider,)


def test_an_input_is_what_others_hand_over_and_not_all_that_they_give():
    handed = ((0, 1, 1), (1, 2, 1))
    assert table(handed=handed).stage_input == (0.0, 1 / 3, 0.0)
    assert table().stage_input == (0.0, 2 / 3, 0.0)
