"""Stamps of two clocks brought to one; the device here is a list of times."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from strategies.compiler import compile_plan
from strategies.plan import Plan
from strategies.runtime.recorder import Anchor, Recorder


@dataclass
class Stamp:
    """A CUDA event: milliseconds on a clock of its own."""

    at_ms: float
    waited: bool = False

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, other: Stamp) -> float:
        return other.at_ms - self.at_ms


def test_events_and_stamps_of_the_host_are_told_on_the_hosts_clock():
    recorder = Recorder(0, torch.device("cpu"))
    program = compile_plan(Plan(schedule="1f1b", pp=1, num_microbatches=1)).train
    record = recorder.begin(0, program)
    length = len(program.ranks[0])
    record.begun, record.finished = 99.0, 99.5
    record.anchor = Anchor(Stamp(5000.0), seen_s=100.0)
    record.start = [Stamp(5000.0 + 10 * place) for place in range(length)]
    record.end = [Stamp(5005.0 + 10 * place) for place in range(length)]
    record.end[-1] = 101.0  # A thread of the host's has seen it.
    start, end = recorder.seconds(record)
    assert start == pytest.approx([100.0 + 0.01 * place for place in range(length)])
    assert end[:-1] == pytest.approx([100.005 + 0.01 * place for place in range(length - 1)])
    assert end[-1] == 101.0
    assert all(stamp.waited for stamp in record.start)
    # The step is the device's, which began later than the host.
    spans = recorder.spans(record)
    assert (spans.begun, spans.finished) == (pytest.approx(100.0), 101.0)


def test_without_a_device_the_steps_own_times_count():
    recorder = Recorder(0, torch.device("cpu"))
    program = compile_plan(Plan(schedule="1f1b", pp=1, num_microbatches=1)).train
    record = recorder.begin(0, program)
    recorder.finish()
    spans = recorder.spans(record)
    assert (spans.begun, spans.finished) == (record.begun, record.finished)
    assert record.begun <= record.finished
