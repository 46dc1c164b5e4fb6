"""When reductions and gathers begin and end, as a measured timeline has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from strategies.runtime.step.executor import Executor


class Recorder:
    """Stamps count up from 1; the ends of work are noted, as a backend's thread would."""

    def __init__(self, *, records: bool = True) -> None:
        self.current: Any = SimpleNamespace(start=[0, 0, 0], end=[0, 0, 0]) if records else None
        self.ends: list[tuple[object, object, int]] = []
        self._count = 0

    def stamp(self) -> int:
        self._count += 1
        return self._count

    def stamp_end_of(self, work: object, record: object, place: int) -> None:
        self.ends.append((work, record, place))


def executor(recorder: Recorder) -> Any:
    found = object.__new__(Executor)
    found._parts = SimpleNamespace(recorder=recorder)
    found._places = {(3, 0): 1, (3, None): 2}
    return found


def test_what_runs_on_stamps_its_own_end() -> None:
    recorder = Recorder()
    executor(recorder).reduction_started(3, 0, "work")
    assert (recorder.current.start, recorder.current.end) == ([0, 1, 0], [0, 1, 0])
    assert recorder.ends == [("work", recorder.current, 1)]


def test_what_has_ended_already_ends_where_it_begins() -> None:
    recorder = Recorder()
    executor(recorder).gather_started(3, None)
    assert (recorder.current.start, recorder.current.end) == ([0, 0, 1], [0, 0, 1])
    assert recorder.ends == []


@pytest.mark.parametrize(("stage", "records"), [(4, True), (3, False)])
def test_nothing_is_stamped_outside_of_a_list_or_of_a_recorded_step(
    stage: int, records: bool
) -> None:
    recorder = Recorder(records=records)
    executor(recorder).reduction_started(stage, 0, "work")
    assert recorder.ends == []
    assert recorder.stamp() == 1
