import pytest

from strategies.ir.program import v
from strategies.schedules.search.best_order import equal_durations
from strategies.schedules.zb_v import _regular
from tests.strategies.programs import compute_texts, lines
from tests.strategies.schedules.figures import compiled, figures, picture
from tests.strategies.schedules.test_torch_oracle import of_torch
from tests.strategies.schedules.timed_orders import timed


def test_the_papers_order():
    assert picture("zb_v", 2, 4) == lines(
        """
        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2
        rank 1 |  .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1

        rank 0 | 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3  .
        rank 1 | 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
        """
    )


@pytest.mark.parametrize("microbatches", [1, 2, 4, 7, 8, 16])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_it_takes_no_longer_than_the_order_of_torch(pp, microbatches):
    """torch's is the paper's, too; below 2P-1 microbatches it only leaves out what is not there."""
    theirs = of_torch("ZBVZeroBubble", pp, microbatches, 2)
    paper = _regular(pp, microbatches)
    assert [" ".join(map(str, row)) for row in paper] == theirs
    metrics = figures("zb_v", pp, microbatches)
    if microbatches >= 2 * pp - 1:
        assert compute_texts(compiled("zb_v", pp, microbatches)) == theirs
    reference = timed(v(pp), microbatches, paper, equal_durations(v(pp))).figures
    # Two stages of 1 each here, two of 1/2 each in figures().
    assert metrics.makespan <= reference.makespan / 2
    assert metrics.period <= reference.period / 2


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_as_many_microbatches_as_ranks_are_on_the_bound(pp):
    """Where the paper's order takes (P-1)F longer, three times the bubble."""
    metrics = figures("zb_v", pp, pp)
    assert metrics.makespan == 3 * pp + (pp - 1) / 2
    assert metrics.bound_gap == pytest.approx(0, abs=1e-9)
