"""Whether an order that somebody else has written can run, and what would be better."""

from strategies.referee.opinion import (
    Opinion,
    Ours,
    Repair,
    alternatives,
    examine,
    notation,
    repair,
)
from strategies.referee.semantics import (
    SEMANTICS,
    Crossing,
    Grouped,
    Semantics,
    Verdict,
    judge,
    time_messages,
)

__all__ = [
    "SEMANTICS",
    "Crossing",
    "Grouped",
    "Opinion",
    "Ours",
    "Repair",
    "Semantics",
    "Verdict",
    "alternatives",
    "examine",
    "judge",
    "notation",
    "repair",
    "time_messages",
]
