"""Bytes that one forward or backward needs for a while, beyond what is there before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def transient(device: torch.device, call: Callable[[], Any]) -> tuple[Any, int, int]:
    """Runs a function and watches the memory of its device.

    Returns:
        (its result, bytes that stayed, most bytes at once), both beyond what was there before.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = call()
        torch.cuda.synchronize(device)
        stayed = torch.cuda.memory_allocated(device) - before
        return result, stayed, torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as watched:
        result = call()
    held = most = 0
    for change in _changes(watched):
        held += change
        most = max(most, held)
    return result, held, most


def _changes(watched: torch.profiler.profile) -> list[int]:
    """Allocations and releases in the order of time."""
    inner: Any = watched.profiler
    events = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return [int(event.nbytes()) for event in events]
