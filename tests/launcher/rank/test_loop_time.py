"""Tests of what a step takes beside its instructions, as calibration measures it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from launcher.rank import loop_time


class _Clocks:
    """Stands for ``time``: both clocks are where a test puts them."""

    wall = cpu = 0.0

    def perf_counter(self) -> float:
        return self.wall

    def process_time(self) -> float:
        return self.cpu

    def thread_time(self) -> float:
        return self.cpu


@pytest.fixture
def step(monkeypatch):
    """One step of a training: seconds of its instructions, its update, and of what is beside."""
    clocks, watch = _Clocks(), None
    monkeypatch.setattr(loop_time, "time", clocks)
    busy = SimpleNamespace(busy=0.0)
    recorder = SimpleNamespace(kept=[None], spans=lambda _: busy)
    engine = SimpleNamespace(engine=SimpleNamespace(recorder=recorder))
    monkeypatch.setattr(loop_time, "pipeline", lambda _: engine)
    watch = loop_time._Watch()
    none: Any = None

    def run(instructions: float, update: float, beside: float, core: float = 1.0) -> Any:
        """``core``: the share of a core that this rank gets; it waits for the rest."""
        busy.busy = instructions / core
        for seconds, hook in (
            (instructions, lambda: watch.on_before_optimizer_step(none, none, none)),
            (update, watch._end_update),
            (beside, lambda: watch.on_train_batch_end(none, none, none)),
        ):
            clocks.cpu += seconds
            clocks.wall += seconds / core
            hook()
        return watch

    return run


@pytest.mark.parametrize("core", [1.0, 0.25], ids=["a core", "a quarter of a core"])
def test_what_is_no_instruction_and_no_update_is_counted_in_cpu_seconds(step, core):
    for _ in range(6):
        watch = step(0.1, 0.02, 0.03, core)
    assert watch.median_s == pytest.approx(0.03)


def test_the_first_steps_do_not_count(step):
    for beside in (0.0, 9.0, 9.0, 0.03, 0.04, 0.05):  # The first one has no step before it.
        watch = step(0.1, 0.02, beside)
    assert watch.median_s == pytest.approx(0.04)
