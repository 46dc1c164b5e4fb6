"""Stamps of two clocks brought to one; the device here is a list of times."""

from __future__ import annotations

import time
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from strategies.compiler import compile_plan
from strategies.plan import Plan
from strategies.runtime.step.recorder import Anchor, RankStep, Recorder, joined_stats
from tests.emulated_device import CUDA, Event, emulated_device


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


def test_stamps_wait_for_nothing_and_are_read_when_the_device_has_passed_them():
    program = compile_plan(Plan(schedule="1f1b", pp=1, num_microbatches=2)).train
    with emulated_device() as device:
        recorder = Recorder(0, CUDA)
        begun = time.perf_counter()
        record = recorder.begin(0, program)
        for place in range(len(program.ranks[0])):
            record.start[place] = recorder.stamp()
            device.default.give(lambda: time.sleep(0.002))
            record.end[place] = recorder.stamp()
        recorder.finish()
        assert not any(device.default.done_by.values())
        with (
            mock.patch.object(torch.cuda.Event, "synchronize", lambda _: None),
            pytest.raises(RuntimeError, match="device not ready"),
        ):
            recorder.seconds(record)
        start, end = recorder.seconds(record)
    # The device's clock is a million seconds ahead; a process that waits for its turn while the
    # clocks are compared is late by as much. Sleeps never end early.
    stamps = [stamp for pair in zip(start, end, strict=True) for stamp in pair]
    assert begun - 10 <= stamps[0] and stamps[-1] <= time.perf_counter() + 10
    assert stamps == sorted(stamps)
    assert all(e - s >= 0.002 for s, e in zip(start, end, strict=True))


def test_a_collective_of_the_device_is_stamped_without_waiting_for_it():
    program = compile_plan(Plan(schedule="1f1b", pp=1, num_microbatches=1)).train
    with emulated_device() as device:
        recorder = Recorder(0, CUDA, collectives_on_device=True)
        record = recorder.begin(0, program)
        ended = torch.cuda.Event()
        device.default.give(lambda: time.sleep(0.002))
        ended.record()
        recorder.stamp_end_of(mock.Mock(wait=ended.wait), record, 0)
        assert not any(device.default.done_by.values())
        record.end[0].synchronize()
        assert ended.query()


def test_events_are_recorded_again_when_their_step_has_gone():
    program = compile_plan(Plan(schedule="1f1b", pp=1, num_microbatches=2)).train
    length = len(program.ranks[0])
    made = 0

    class Counted(Event):
        def __init__(self, **options):
            nonlocal made
            made += 1
            super().__init__(**options)

    with emulated_device(), mock.patch.object(torch.cuda, "Event", Counted):
        recorder = Recorder(0, CUDA)

        def step(number):
            record = recorder.begin(number, program)
            for place in range(length):
                # One instruction's end is the next one's start, and shared by both.
                record.start[place] = record.end[place - 1] if place else recorder.stamp()
                record.end[place] = recorder.stamp()
            recorder.finish()
            return record

        looked_at = step(0)
        shown = recorder.seconds(looked_at)
        for number in range(1, 100):
            step(number)
        # As many as the steps have that are kept, the one that runs and the one that is looked at.
        assert made == (recorder.kept.maxlen + 2) * (length + 2)
        assert recorder.seconds(looked_at) == shown


# -------------------------------------------------------------------------------------- step stats
#
# Ranks' stamps of a step, joined.


def said(step=7, begun=0.0, finished=2.0, norm=9.0, busy=1.0, computed=1.5, reduced=None, peak=5):
    return [*RankStep(step, begun, finished, norm, busy, computed, reduced, peak)]


def test_ranks_of_one_step_are_joined():
    stats = joined_stats([said(), said(begun=0.5, norm=16.0, busy=2.0, peak=6)], tp=1)
    assert stats is not None
    assert (stats.step, stats.makespan_s, stats.busy_s) == (7, 2.0, 3.0)
    assert stats.bubble_ratio == 0.25  # 1 of 2 * 2 seconds
    assert stats.gradient_norm == 5.0
    without = joined_stats([said(), said(norm=None)], tp=1)  # whose first update is to come
    assert without is not None and without.gradient_norm is None
    assert stats.exposed_grad_reduce_s is None
    assert stats.peak_memory_bytes == (5, 6)


def test_a_reduction_is_exposed_behind_the_last_compute_of_all_ranks():
    late = joined_stats([said(reduced=1.75), said(computed=1.25, reduced=1.625)], tp=1)
    hidden = joined_stats([said(reduced=1.25), said(reduced=None)], tp=1)
    assert late is not None and late.exposed_grad_reduce_s == 0.25
    assert hidden is not None and hidden.exposed_grad_reduce_s == 0.0


def test_of_the_sharers_of_a_pipeline_rank_the_largest_peak_counts():
    stats = joined_stats([said(peak=1), said(peak=4), said(peak=3), said(peak=2)], tp=2)
    assert stats is not None and stats.peak_memory_bytes == (4, 3)


def test_ranks_that_speak_of_different_steps_or_of_none_give_nothing():
    assert joined_stats([said(), said(step=8)], tp=1) is None
    assert joined_stats([said(), None], tp=1) is None
