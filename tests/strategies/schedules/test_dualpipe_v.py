import pytest

from strategies.compiler import compile_compute
from strategies.ir.program import v
from strategies.plan import Plan
from tests.strategies.programs import texts
from tests.strategies.schedules.dual import PAIRED, torchs_lists


def test_two_ranks_and_four_microbatches():
    assert texts(compile_compute(Plan("dualpipe_v", 2, 4))) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B 3B2 "
        "(3F3;0B1)OVERLAP_F_B 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0)OVERLAP_F_B (1F3;2B1)OVERLAP_F_B "
        "(2F3;1B1)OVERLAP_F_B 2B2 1B2 2I3 1I3 2W3 1W3",
    ]


@pytest.mark.parametrize(("pp", "microbatches"), PAIRED["dualpipe_v"].shapes)
def test_the_order_is_that_of_torch(pp, microbatches):
    program = compile_compute(Plan("dualpipe_v", pp, microbatches))
    assert program.placement == v(pp)
    assert [row.split() for row in texts(program)] == torchs_lists(pp, microbatches)
