"""What is said before a run starts."""

import pytest

from launcher.config.decode import from_dict
from launcher.resolve import resolve

EXPERTS = {"experts": 8, "layers": 4}


@pytest.mark.parametrize(
    ("schedule", "said"),
    [("1f1b", "longer in pairs than with its exchange in turn. A pair waits"), ("eager_1f1b", "")],
)
def test_pairs_that_are_slower_than_an_exchange_in_turn_are_told(schedule, said):
    run = resolve(
        from_dict(
            {
                "mode": "simulate", "pp": 4, "dp": 2, "ep": 2, "num_microbatches": 8,
                "model": EXPERTS, "schedule": {"name": schedule}, "overlap": {"exchange": True},
            }
        )
    )  # fmt: skip
    assert len(run.notes) == bool(said)
    assert said in "".join(run.notes)
    assert ("Try schedule=eager_1f1b" in "".join(run.notes)) == bool(said)
