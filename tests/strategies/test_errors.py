"""What an error says, and that it stays whole on its way to another process."""

from __future__ import annotations

import pickle

import pytest

from strategies.errors import PlanError, ProgramError


@pytest.mark.parametrize(
    ("error", "reason", "fix"),
    [
        (PlanError("pp=3 is odd.", fix="Use pp=2."), "pp=3 is odd.", "Use pp=2."),
        (PlanError("pp=3 is odd. Try pp=2, or pp=4."), "pp=3 is odd.", "Try pp=2, or pp=4."),
        (ProgramError("0F0 stands twice."), "0F0 stands twice.", ""),
    ],
)
def test_a_message_is_its_reason_and_then_its_fix(error, reason, fix):
    assert (error.reason, error.fix) == (reason, fix)
    assert str(error) == f"{reason} {fix}".strip()
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.reason, again.fix) == (str(error), error.reason, error.fix)
