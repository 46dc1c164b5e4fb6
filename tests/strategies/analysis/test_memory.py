"""What ranks hold, by hand for small programs, and against the peaks of ``memory``."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from strategies import UniformCosts, compile_program
from strategies.analysis.memory import (
    Sizes,
    memory_over_time,
    peak_activations,
    peak_bytes,
    peak_held,
    peak_memory,
    peak_memory_bytes,
    peak_saved,
)
from strategies.compiler import compile_plan
from strategies.costs.analytic import AnalyticCosts
from strategies.costs.load import Load
from strategies.costs.table import StageMemory
from strategies.ir.program import bidirectional, v
from strategies.plan import Plan, Recompute
from strategies.schedules import find_schedule
from tests.strategies.planner.models import MACHINE
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
    assert peak_held(program, 0, Sizes.whole([10.0], waiting=[4.0])) == 24
    assert peak_held(program, 0, Sizes.whole([10.0])) == 30


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


# ------------------------------------------------------------------------------------ memory model
#
# What ranks hold, by hand for small programs, and against the peaks of ``memory``.


def memory(stages=1, **changes):
    given = {
        "parameters": 1000,
        "gradients": 2000,
        "optimizer": 4000,
        "activations": 100,
        "waiting": 60,
        "inputs": 10,
        "outputs": 7,
        "forward_temporaries": 3,
        "backward_temporaries": 5,
    }
    return StageMemory(**{name: (value,) * stages for name, value in {**given, **changes}.items()})


def curve(text, *, num_microbatches, **changes):
    program = written(text, num_microbatches=num_microbatches)
    return [held for _, held in memory_over_time(program, memory(**changes), 0)]


def test_activations_and_results_stay_until_the_backward():
    held = curve("0F0 0F1 0B0 0B1 0STEP", num_microbatches=2)
    assert [(h.activations, h.communication, h.temporaries) for h in held] == [
        (100, 7, 3),
        (200, 14, 3),
        (200, 14, 5),
        (100, 7, 5),
    ]
    assert {(h.parameters, h.gradients, h.optimizer) for h in held} == {(1000, 2000, 4000)}
    assert held[1].total == 7000 + 200 + 14 + 3


def test_between_i_and_w_only_what_w_needs_is_held():
    held = curve("0F0 0I0 0F1 0W0 0I1 0W1", num_microbatches=2)
    assert [h.activations for h in held] == [100, 100, 160, 160, 100, 60]


def test_a_checkpointed_forward_holds_its_input_and_r_rebuilds_the_rest():
    held = curve("0F0 0F1 0R0 0B0 0R1 0B1", num_microbatches=2)
    assert [(h.stage_inputs, h.recompute, h.activations) for h in held] == [
        (10, 0, 0),
        (20, 0, 0),
        (20, 90, 0),
        (20, 90, 0),
        (10, 90, 0),
        (10, 90, 0),
    ]
    assert [h.saved for h in held] == [10, 20, 110, 110, 100, 100]


def test_a_recomputed_pair_with_a_split_backward_waits_like_any_other():
    held = curve("0F0 0R0 0I0 0F1 0W0 0R1 0I1 0W1", num_microbatches=2)
    assert [h.saved for h in held] == [10, 100, 100, 70, 70, 100, 100, 60]


def test_receives_count_from_when_they_are_posted_until_they_are_used():
    program = written(
        """
        0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1
        1RECV_F0<0 1F0 1RECV_F1<0 1F1 1B0 1SEND_B0>0 1B1 1SEND_B1>0
        """,
        num_microbatches=2,
        lowered=True,
    )
    sizes = memory(2, outputs=0)
    sizes = StageMemory(**{n: getattr(sizes, n) for n in sizes.__slots__} | {"outputs": (8, 0)})
    # Rank 0: two gradients of 8 posted ahead; results of 8 each until their backward; one message
    # on the way from the first forward on.
    first = [held.communication for _, held in memory_over_time(program, sizes, 0)]
    assert first == [16 + 8, 16 + 16 + 8, 8 + 16 + 8, 0 + 8 + 8]
    # Rank 1: two inputs posted, then used; the last stage hands nothing on but gradients.
    second = [held.communication for _, held in memory_over_time(program, sizes, 1)]
    assert second == [8, 0, 0, 8]


def test_the_peak_is_the_moment_at_which_all_together_is_most():
    program = written("0F0 0F1 0B0 0B1", num_microbatches=2)
    table = replace(uneven(program, [1]).table(program), memory=memory())
    (peak,) = peak_memory(program, table)
    assert peak.total == 7000 + 200 + 14 + 5
    assert peak_memory_bytes(program, table) == (peak.total,)


LOAD = Load(forward_flops=1e6, parameters=100, output_elements=10, saved_elements=50)


def test_error_feedback_keeps_an_update_and_the_weights_before_it():
    asked = {"schedule": "pipedream_2bw", "pp": 2, "num_microbatches": 2}
    plain, fed = (compile_program(**asked, error_feedback=share) for share in (0.0, 1.0))
    table = replace(UniformCosts().table(plain), memory=memory(2))
    before, after = (peak_memory(program, table) for program in (plain, fed))
    assert before is not None
    assert after is not None
    # The first rank has the weights before an update anyway: microbatches use them.
    assert [held.parameters for held in before] == [2000, 1000]
    assert [held.parameters for held in after] == [2000, 2000]
    # Beside the optimizer's state there is the update before, an element per weight.
    state = [AnalyticCosts((LOAD, LOAD), MACHINE).table(p).state_bytes for p in (plain, fed)]
    assert [b - a for a, b in zip(*state, strict=True)] == [4 * LOAD.parameters] * 2


def test_costs_without_a_breakdown_give_state_and_activations():
    program = written("0F0 0F1 0B0 0B1", num_microbatches=2)
    table = uneven(program, [1], activation_bytes=(100,), state_bytes=(7000,)).table(program)
    assert peak_memory(program, table) is None
    assert peak_memory_bytes(program, table) == (7200,) == peak_bytes(program, table)


def test_costs_without_bytes_give_nothing():
    program = written("0F0 0B0", num_microbatches=1)
    assert peak_memory_bytes(program, UniformCosts().table(program)) == (None,)


@pytest.mark.parametrize("policy", ["full", "mario"])
def test_recomputation_saves_memory(policy):
    options = {"schedule": "1f1b", "pp": 4, "num_microbatches": 8}
    plain = peak_saved(compile_program(**options), memory(4))
    again = peak_saved(compile_program(recompute=Recompute(policy), **options), memory(4))
    assert plain == (400, 300, 200, 100)
    assert all(less <= more for less, more in zip(again, plain, strict=True))
    assert again[0] < 150


@settings(max_examples=40, deadline=None)
@given(plan=plans())
def test_the_saved_peak_is_that_of_the_program_s_order(plan):
    program = compile_plan(plan).train
    stages = program.placement.num_stages
    sizes = memory(stages, waiting=100)
    table = uneven(
        program, [1] * stages, activation_bytes=(100,) * stages, state_bytes=(0,) * stages
    ).table(program)
    assert peak_saved(program, sizes) == peak_bytes(program, table)


def assert_given_back(program):
    """Before the last backward of a rank only what it frees is there, and messages."""
    sizes = memory(program.placement.num_stages)
    for rank, row in enumerate(program.ranks):
        _, last = memory_over_time(program, sizes, rank)[-1]
        ends = [item for item in row if item.microbatch is not None and not item.peer]
        freed = sum(60 if part.kind.value == "W" else 100 for part in ends[-1].parts)
        assert last.saved == freed


@settings(max_examples=40, deadline=None)
@given(plan=plans())
def test_everything_is_given_back(plan):
    assert_given_back(compile_plan(plan).train)


@pytest.mark.parametrize(
    "plan", [Plan("1f1b", 4, 8, pairs=True), Plan("dualpipe_v", 2, 8, pairs=True)]
)
def test_fused_pairs_give_back_what_both_halves_have_taken(plan):
    program = compile_plan(plan).train
    assert any(item.halves for row in program.ranks for item in row)
    assert_given_back(program)
