"""Backward in two steps: input gradients now, weight gradients later."""

from strategies.runtime.split_backward.input_step import input_backward
from strategies.runtime.split_backward.meanwhile import Meanwhile
from strategies.runtime.split_backward.pending import PendingWeights

__all__ = ["Meanwhile", "PendingWeights", "input_backward"]
