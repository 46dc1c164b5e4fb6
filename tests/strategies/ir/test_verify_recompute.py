import pytest

from strategies.ir import verify
from strategies.ir.recomputed import recomputed_pairs
from tests.strategies.programs import refusal, written


def test_one_r_between_forward_and_backward_is_right():
    program = written("0F0 0F1 0R0 0B0 0B1", num_microbatches=2)
    assert verify(program) is program
    assert recomputed_pairs(program) == {(0, 0)}


@pytest.mark.parametrize("text", ["0F0 0R0 0I0 0W0", "0F0 0R0 0B0"])
def test_it_serves_whole_and_split_backwards(text):
    assert verify(written(text, num_microbatches=1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0R0 0F0 0B0", "0R0 on rank 0 stands before 0F0, which keeps the input"),
        ("0F0 0B0 0R0", "0B0 on rank 0 stands before 0R0, which rebuilds the graph"),
        ("0F0 0I0 0R0 0W0", "0I0 on rank 0 stands before 0R0"),
        ("0F0 0R0 0R0 0B0", "runs 0R0 2 times"),
        ("0F0 0R0", "needs F and B"),
    ],
)
def test_an_r_in_another_place_is_refused(text, message):
    assert message in refusal(written(text, num_microbatches=1))


def test_an_r_on_another_rank_is_refused():
    program = written("0F0 1R0 0B0\n1F0 1B0", num_microbatches=1)
    assert "1R0 stands on rank 0" in refusal(program)


def test_a_fused_pair_reads_what_was_rebuilt_before_it():
    assert verify(written("0F0 0R0 (0F1;0B0)OVERLAP_F_B 0B1", num_microbatches=2))
    late = written("0F0 (0F1;0B0)OVERLAP_F_B 0R0 0B1", num_microbatches=2)
    assert "0B0 on rank 0 stands before 0R0" in refusal(late)


def test_a_pair_in_flight_may_be_recomputed_without_a_forward_before_it():
    program = written("0R0 0B0 0F0", num_microbatches=1, entry=[(0, 0)], leaving=[(0, 0)])
    assert verify(program)
