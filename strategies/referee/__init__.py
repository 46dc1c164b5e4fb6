"""Whether an order that somebody else has written can run, and what would be better."""

from strategies.referee.opinion import Opinion, Ours, alternatives, examine
from strategies.referee.repair import Move, Repair, notation, repair
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
    "Move",
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
