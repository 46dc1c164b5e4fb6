from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from strategies import UniformCosts, simulate
from strategies.analysis.memory import peak_activations
from strategies.compiler import compile_compute
from strategies.errors import ProgramError
from strategies.ir import Kind, verify
from strategies.ir.program import bidirectional
from strategies.lowering.send_recv import add_messages
from strategies.passes.split_backward import split_backward
from strategies.plan import Plan
from strategies.schedules import SCHEDULES, Durations
from strategies.schedules.search.weight_gaps import makespan
from tests.strategies.programs import lines, plans, texts, written


def equal(num_stages, latency=0.0):
    ones = (1.0,) * num_stages
    return Durations(ones, ones, ones, latency)


def split(program, durations=None):
    before = texts(program)
    result = verify(split_backward(program, durations or equal(program.placement.num_stages)))
    assert texts(program) == before
    return texts(result)


def adjacent(program):
    """Each W right behind its I."""
    rows = []
    for row in program.ranks:
        parts = [
            (replace(item, kind=Kind.I), replace(item, kind=Kind.W))
            if item.kind is Kind.B
            else (item,)
            for item in row
        ]
        rows.append(tuple(part for pair in parts for part in pair))
    return program.with_ranks(tuple(rows))


ONE_F_ONE_B = """
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
"""


def test_weight_gradients_fill_the_time_in_which_a_rank_waits():
    """Rank 1 begins two Ws late, which sends its I earlier; its memory is that of rank 0."""
    assert split(written(ONE_F_ONE_B, num_microbatches=3)) == lines(
        """
        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
        """
    )


def test_a_rank_holds_more_than_it_did_only_where_that_is_faster():
    program = written(ONE_F_ONE_B, num_microbatches=3)
    assert peak_activations(program) == (2, 1)
    assert peak_activations(split_backward(program, equal(2))) == (2, 2)
    light = Durations((1.0, 0.2), (1.0, 0.2), (1.0, 0.2))
    assert peak_activations(split_backward(program, light)) == (2, 1)


def test_where_nobody_waits_w_follows_its_i():
    assert split(written("0F0 0B0 0F1 0B1", num_microbatches=2)) == ["0F0 0I0 0W0 0F1 0I1 0W1"]


def test_a_gap_takes_a_weight_gradient_only_if_that_pays():
    """A W of 4 in a wait of 2 would hold up stage 0."""
    program = written(ONE_F_ONE_B, num_microbatches=3)
    heavy = Durations((1.0, 1.0), (1.0, 1.0), (4.0, 0.1))
    assert split(program, heavy) == split(adjacent(program), heavy)


def test_a_program_without_full_backwards_stays_as_it_is():
    program = written("0F0 0I0 0F1 0I1 0W1 0W0", num_microbatches=2)
    assert split_backward(program, equal(1)) is program


def test_an_edge_to_a_backward_names_its_weight_gradient_the_part_that_ends_last():
    program = written(
        """
        0F0 0F1 0R0@1B0 0B0 0B1@1B1
        1F0 1B0 1F1 1B1
        """,
        num_microbatches=2,
    )
    result = split(program)
    assert result[0].split()[:4] == ["0F0", "0F1", "0R0@1W0", "0I0"]
    assert "0I1@1W1" in result[0]


def test_a_weight_gradient_that_others_wait_for_is_run_when_the_rank_waits():
    """Rank 1 has nothing left to do but 1F1, which waits for rank 0, which waits for 1W0."""
    program = written(
        """
        0F0 0F1@1B0 0B0 0B1
        1F0 1B0 1F1 1B1
        """,
        num_microbatches=2,
    )
    assert split(program) == lines(
        """
        0F0 0F1@1W0 0I0 0W0 0I1 0W1
        1F0 1I0 1W0 1F1 1I1 1W1
        """
    )


def test_a_fused_pair_stays_whole_and_so_does_an_edge_to_it():
    program = written(
        """
        0F0 0F1 0F2 0B0@1B0 0B1 0B2
        1F0 (1F1;1B0)OVERLAP_F_B 1B1 1F2 1B2
        """,
        num_microbatches=3,
    )
    result = split(program)
    assert "(1F1;1B0)OVERLAP_F_B" in result[1]
    assert "0I0@1B0" in result[0]
    assert not any(name in result[1].split() for name in ("1I0", "1W0", "1B1"))


def test_two_weight_copies():
    program = written(
        """
        0F0 1F1 1B1 0B0
        0F1 1F0 1B0 0B1
        """,
        num_microbatches=2,
        placement=bidirectional(2),
    )
    assert split(program) == lines(
        """
        0F0 1F1 1I1 1W1 0I0 0W0
        0F1 1F0 1I0 1W0 0I1 0W1
        """
    )


@pytest.mark.parametrize("word", ["0REDUCE0", "0STEP"])
def test_updates_come_later(word):
    program = written(f"0F0 0B0 {word}", num_microbatches=1)
    with pytest.raises(ProgramError) as error:
        split_backward(program, equal(1))
    assert str(error.value) == (
        f"written: backwards are split before {word} is added. Call split_backward on a program of "
        "F, B, I, W, R and fused pairs."
    )


def test_messages_come_later():
    program = add_messages(verify(written(ONE_F_ONE_B, num_microbatches=3)))
    with pytest.raises(ProgramError, match="split before 0SEND_F0>1 is added"):
        split_backward(program, equal(2))


@pytest.mark.parametrize("share", [0.5, 0.6])
@pytest.mark.parametrize("microbatches", [8, 16])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_1f1b_gets_the_time_and_memory_of_zb_h1(pp, microbatches, share):
    compute = compile_compute(Plan("1f1b", pp, max(microbatches, 2 * pp)))
    first, second = 2 * share, 2 * (1 - share)
    durations = Durations((1.0,) * pp, (first,) * pp, (second,) * pp)
    program = verify(split_backward(compute, durations))
    time = (pp - 1) * (1 + first - second) + 3 * program.num_microbatches
    assert makespan(program, durations) == pytest.approx(time)
    assert max(peak_activations(program)) == pp


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_interleaved_1f1b_gets_to_the_bound_of_split_backwards(pp, stages):
    compute = compile_compute(Plan("interleaved_1f1b", pp, 2 * pp, stages))
    durations = equal(pp * stages)
    time = makespan(split_backward(compute, durations), durations) / stages
    assert time == pytest.approx(6 * pp + (pp - 1) / stages)


@st.composite
def unsplit(draw, **bounds):
    """The bare order of any schedule whose backwards are whole."""
    plan = draw(plans(**bounds))
    assume(not SCHEDULES[plan.schedule].splits_backward)
    return compile_compute(replace(plan, split_backward=False, costs=None))


per_stage = st.lists(st.floats(0.1, 3.0), min_size=32, max_size=32)


@given(unsplit(), per_stage, per_stage, per_stage, st.floats(0, 1))
def test_it_is_never_slower_than_adjacent_parts_nor_larger_than_the_unsplit_program(
    compute, first, second, third, latency
):
    stages = compute.placement.num_stages
    durations = Durations(
        tuple(first[:stages]), tuple(second[:stages]), tuple(third[:stages]), latency
    )
    program = verify(split_backward(compute, durations))
    plain = verify(adjacent(compute))
    assert makespan(program, durations) <= makespan(plain, durations) * (1 + 1e-9)
    assert max(peak_activations(program)) <= max(peak_activations(compute)) + 1e-9
    for row, before in zip(program.ranks, compute.ranks, strict=True):
        kept = [replace(i, kind=Kind.B) if i.kind is Kind.I else i for i in row]
        assert [i for i in kept if i.kind is not Kind.W] == list(before)
    assert program.ranks == split_backward(compute, durations).ranks


@settings(max_examples=25)
@given(unsplit(max_pp=4, max_microbatches=8), st.sampled_from([0.3, 1.0, 1.6]), st.floats(0, 1))
def test_the_simulator_agrees_with_the_time_it_went_by(compute, inputs, latency):
    stages, share = compute.placement.num_stages, compute.placement.stages_per_microbatch
    durations = Durations(
        (1.0 / share,) * stages,
        (inputs / share,) * stages,
        ((2 - inputs) / share,) * stages,
        latency,
    )
    program = verify(split_backward(compute, durations))
    costs = UniformCosts(backward_input=inputs, p2p=latency)
    predicted = simulate(add_messages(program), costs).makespan
    assert predicted == pytest.approx(makespan(program, durations))
