from dataclasses import replace

import pytest
from hypothesis import given

from strategies import UniformCosts, compile_program
from strategies.compiler import compile_plan
from strategies.ir.placement import bidirectional, v
from strategies.memory import Holding, peak_activations, peak_bytes
from strategies.schedules import find_schedule
from tests.strategies.programs import plans, uneven, written


def peaks(text, **options):
    return peak_activations(written(text, **options))


def test_a_forward_is_held_until_its_backward_has_ended():
    assert peaks("0F0 0B0 0F1 0B1", num_microbatches=2) == (1,)
    assert peaks("0F0 0F1 0B0 0B1", num_microbatches=2) == (2,)
    assert peaks("0F0 0F1 0B0 0F2 0B1 0B2", num_microbatches=3) == (2,)


def test_a_split_backward_holds_until_the_weight_gradient():
    assert peaks("0F0 0I0 0F1 0I1 0W0 0W1", num_microbatches=2) == (2,)
    assert peaks("0F0 0I0 0W0 0F1 0I1 0W1", num_microbatches=2) == (1,)


def test_between_i_and_w_less_may_be_held():
    program = written("0F0 0F1 0I0 0F2 0W0 0I1 0W1 0I2 0W2", num_microbatches=3)
    # Two whole ones and what waits for one W; all of it where nothing else is said.
    assert Holding(program, [10.0], [0.0], [4.0]).peak(0) == 24
    assert Holding(program, [10.0], [0.0]).peak(0) == 30


def test_a_virtual_stage_holds_its_share():
    text = "0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1"
    assert peaks(text, num_microbatches=2, stages_per_rank=2) == (1.5,)


def test_with_two_copies_a_stage_counts_in_full():
    text = """
        0F0 1F1 1B1 0B0
        0F1 1F0 1B0 0B1
    """
    assert peaks(text, num_microbatches=2, placement=bidirectional(2)) == (2, 2)


def test_forwards_alone_keep_nothing():
    assert peaks("0F0 0F1 0F2", num_microbatches=3, role="forward") == (1,)


def test_what_is_in_flight_at_the_entry_counts_on_its_own_rank():
    text = """
        0B0
        1B0 1F1 1B1
    """
    found = peaks(text, num_microbatches=2, entry=[(0, 0), (1, 0), (0, 1)])
    assert found == (2, 1)


def test_bytes_are_state_and_activations_of_the_worst_moment():
    text = """
        0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
        1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1
    """
    program = written(text, num_microbatches=2, placement=v(2))
    costs = uneven(program, [1] * 4, activation_bytes=(10, 20, 30, 40), state_bytes=(1, 2, 3, 4))
    # Rank 0: two of stage 0, one of stage 3; rank 1: two of each of its stages.
    assert peak_bytes(program, costs.table(program)) == (5 + 60, 5 + 100)


def test_without_bytes_in_the_costs_nothing_is_said():
    program = compile_program(schedule="1f1b", pp=2, num_microbatches=2)
    assert peak_bytes(program, UniformCosts().table(program)) == (None, None)


EXACT = ("naive", "gpipe", "1f1b", "interleaved_1f1b", "foldx_fifo", "foldx_aiao")


def closed_form(plan, rank):
    """Held (stage, microbatch) pairs, for schedules and shapes where the papers' form is exact."""
    if plan.split_backward or plan.schedule not in EXACT:
        return None
    pp, microbatches, stages = plan.pp, plan.num_microbatches, plan.stages_per_rank
    if plan.schedule == "naive":
        return stages
    if plan.schedule in ("gpipe", "foldx_aiao"):
        return stages * microbatches
    if plan.schedule == "1f1b":
        return min(pp - rank, microbatches)
    group = plan.group or pp
    if microbatches % group:
        return None
    if plan.schedule == "foldx_fifo" and microbatches <= pp:
        return stages * microbatches
    return min(stages * microbatches, 2 * (pp - 1 - rank) + (stages - 1) * group + 1)


@given(plans())
def test_the_papers_closed_forms(plan):
    program = compile_plan(plan).train
    assert find_schedule(plan.schedule).name == program.schedule
    for rank, peak in enumerate(peak_activations(program)):
        expected = closed_form(plan, rank)
        if expected is None:
            share = program.placement.stages_per_microbatch
            assert 1 / share <= peak <= plan.num_microbatches + 1e-9
        else:
            assert peak == pytest.approx(expected / plan.stages_per_rank)


@given(plans())
def test_lowering_and_updates_change_no_peak(plan):
    programs = compile_plan(plan)
    assert peak_activations(programs.train) == peak_activations(programs.accumulate)
    share = 1 / programs.train.placement.stages_per_microbatch
    assert max(peak_activations(programs.forward)) == pytest.approx(share)


def test_a_recomputed_forward_holds_its_input_until_its_r():
    text = "0F0 0F1 0R0 0B0 0R1 0B1"
    assert peaks(text, num_microbatches=2) == (1,)
    program = written(text, num_microbatches=2)
    table = UniformCosts(stage_input=0.25).table(program)
    assert peak_activations(program, table) == (1.25,)
    assert peak_activations(written("0F0 0F1 0F2 0R0 0B0 0B1 0B2", num_microbatches=3), table) == (
        3.0,
    )


def test_bytes_of_recomputed_forwards_follow_their_inputs():
    program = written("0F0 0F1 0R0 0B0 0R1 0B1", num_microbatches=2)
    costs = uneven(program, [1], activation_bytes=(1000,), state_bytes=(50,))
    table = replace(costs.table(program), stage_input=(0.1,))
    assert peak_bytes(program, table) == (50 + 1100,)


def test_a_pair_in_flight_that_is_recomputed_holds_its_input():
    program = written("0R0 0B0 0F0", num_microbatches=1, entry=[(0, 0)], leaving=[(0, 0)])
    table = UniformCosts(stage_input=0.5).table(program)
    assert peak_activations(program, table) == (1.0,)
