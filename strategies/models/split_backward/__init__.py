"""Backward in two steps: input gradients now, weight gradients later."""
