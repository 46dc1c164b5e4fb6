from __future__ import annotations

from pathlib import Path

import pytest

from strategies.costs.uniform import UniformCosts
from strategies.errors import DataError
from strategies.referee.trace import put_together, read_trace
from tests.strategies.referee.trace.made_trace import known, write

EVEN = UniformCosts(forward=1.0, backward=2.0, p2p=0.02)


@pytest.mark.parametrize("offsets", [{1: 3.5}, {0: -0.2, 2: 1e3}, {1: -0.011}])
@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_clocks_of_other_hosts_are_brought_together(name: str, offsets, tmp_path: Path):
    timeline = known(name, 3, 6, EVEN)
    paths = write(tmp_path, timeline, offsets=offsets)
    measured = put_together([read_trace(path) for path in paths])
    for rank, shift in enumerate(measured.clocks.shift_s):
        right = offsets.get(0, 0.0) - offsets.get(rank, 0.0)
        doubt = measured.clocks.uncertain_s[rank]
        assert shift == pytest.approx(right, abs=max(doubt, 1e-3))
        assert doubt < 0.002
    assert measured.clocks.early_s < 1e-5
    assert measured.timeline.makespan == pytest.approx(timeline.makespan * 0.01, rel=0.02)


def test_clocks_that_nothing_contradicts_stay(tmp_path: Path):
    paths = write(tmp_path, known("1f1b", 3, 6, EVEN))
    clocks = put_together([read_trace(path) for path in paths]).clocks
    assert not clocks.moved and clocks.messages == 24 and clocks.early_s == 0


def test_a_slow_first_rank_says_its_clock_by_what_others_waited_for(tmp_path: Path):
    costs = UniformCosts(forward=(4.0, 1.0, 1.0), backward=(8.0, 2.0, 2.0), p2p=0.02)
    timeline = known("1f1b", 3, 8, costs)
    paths = write(tmp_path, timeline, offsets={1: 0.7, 2: -0.3})
    measured = put_together([read_trace(path) for path in paths])
    assert measured.clocks.shift_s[1] == pytest.approx(-0.7, abs=0.002)
    assert measured.clocks.shift_s[2] == pytest.approx(0.3, abs=0.002)
    assert measured.timeline.bubble_ratio == pytest.approx(timeline.bubble_ratio, abs=0.02)


def test_a_clock_that_drifts_is_told(tmp_path: Path):
    paths = write(tmp_path, known("1f1b", 2, 8, EVEN))
    import json

    tree = json.loads(paths[1].read_text())
    for event in tree["traceEvents"]:
        event["ts"] *= 1.2
    tree["host_name"] = "other"
    paths[1].write_text(json.dumps(tree))
    clocks = put_together([read_trace(path) for path in paths]).clocks
    assert clocks.early_s > 0.005


@pytest.mark.parametrize(
    ("name", "style", "left"),
    [
        ("zb_v", "marks", 0), ("zb_v", "marks", 1), ("1f1b", "marks", 0), ("1f1b", "marks", 2),
        ("interleaved_1f1b", "kernels", 2),
    ],
)  # fmt: skip
def test_a_rank_that_is_missing_is_told(name, style, left: int, tmp_path: Path):
    paths = write(tmp_path, known(name, 3, 6, EVEN), style=style)
    del paths[left]
    with pytest.raises(DataError, match=r"a rank is missing; the job has 3 ranks, and 2 files"):
        put_together([read_trace(path) for path in paths])


def test_a_second_replica_is_left_out_and_told(tmp_path: Path):
    paths = write(tmp_path, known("zb_v", 2, 4, EVEN))
    traces = [read_trace(path) for path in paths]
    measured = put_together([*traces, *traces])
    assert len(measured.replicas) == 2 and len(measured.timeline.program.ranks) == 2
