"""What a trace of somebody's run says: when each instruction ran, and what each wait was for."""

from strategies.referee.trace.blame import Explanation, Wait, explain
from strategies.referee.trace.kineto import RankTrace, read_trace
from strategies.referee.trace.one_clock import Clocks, Measured, put_together

__all__ = [
    "Clocks",
    "Explanation",
    "Measured",
    "RankTrace",
    "Wait",
    "explain",
    "put_together",
    "read_trace",
]
