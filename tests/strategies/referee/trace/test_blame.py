from __future__ import annotations

from pathlib import Path

import pytest

from strategies.costs.uniform import UniformCosts
from strategies.ir.kinds import Kind
from strategies.referee.trace import Explanation, explain, put_together, read_trace
from tests.strategies.referee.trace.made_trace import known, write

EVEN = UniformCosts(forward=1.0, backward=2.0)


def _explained(name: str, pp: int, count: int, costs: UniformCosts, folder: Path) -> Explanation:
    paths = write(folder, known(name, pp, count, costs))
    return explain(put_together([read_trace(path) for path in paths]))


def test_all_idle_time_is_blamed_and_adds_up_to_the_bubble(tmp_path: Path):
    found = _explained("1f1b", 3, 6, EVEN, tmp_path)
    timeline = found.measured.timeline
    idle = 3 * timeline.makespan - sum(found.busy)
    assert sum(wait.seconds for wait in found.waits) == pytest.approx(idle, rel=0.01)
    told = sum(wait.message + wait.own for wait in found.waits) + sum(found.blame.values())
    assert told == pytest.approx(idle, rel=0.05)
    assert found.slow_rank is None and found.without_slow is None
    assert found.same.makespan == pytest.approx(timeline.makespan, rel=0.01)


def test_a_slow_rank_is_named_and_what_is_left_without_it(tmp_path: Path):
    slow = UniformCosts(forward=(1.0, 1.0, 1.6, 1.0), backward=(2.0, 2.0, 3.2, 2.0))
    found = _explained("1f1b", 4, 8, slow, tmp_path)
    assert found.slow_rank == (2, pytest.approx(1.6, rel=0.01))
    assert found.slow_stage == (2, pytest.approx(1.6, rel=0.01))
    even = known("1f1b", 4, 8, EVEN)
    assert found.without_slow is not None
    assert found.without_slow.bubble_ratio == pytest.approx(even.bubble_ratio, abs=0.002)
    rank, stage, _ = next(iter(found.blame))
    assert (rank, stage) == (2, 2)
    assert found.ours[0].makespan <= found.same.makespan


def test_one_slow_stage_of_two_is_named(tmp_path: Path):
    forward = (1.0, 1.0, 1.0, 1.0, 2.0, 1.0)
    slow = UniformCosts(forward=forward, backward=tuple(2 * each for each in forward))
    found = _explained("interleaved_1f1b", 3, 6, slow, tmp_path)
    assert found.slow_rank is not None and found.slow_rank[0] == 1
    assert found.slow_stage == (4, pytest.approx(2.0, rel=0.01))


def test_a_wait_for_a_rank_that_waits_is_blamed_on_the_third(tmp_path: Path):
    slow = UniformCosts(forward=(1.0, 1.0, 5.0), backward=(2.0, 2.0, 10.0))
    found = _explained("1f1b", 3, 4, slow, tmp_path)
    wait = next(wait for wait in found.waits if wait.rank == 0 and wait.before is not None)
    assert wait.source == 1
    assert max(wait.blamed, key=lambda entry: entry[2])[0] == 2
    assert next(iter(found.blame))[2] is Kind.B


def test_messages_that_show_are_measured(tmp_path: Path):
    found = _explained("1f1b", 2, 4, UniformCosts(forward=1.0, backward=2.0, p2p=0.3), tmp_path)
    assert found.costs.message == pytest.approx(0.003, rel=0.05)
    assert found.exposed > 0.005


def test_halves_of_backwards_keep_their_share(tmp_path: Path):
    costs = UniformCosts(forward=1.0, backward=3.0, backward_input=2.0)
    found = _explained("zb_h1", 3, 6, costs, tmp_path)
    assert found.costs.backward_input[0] == pytest.approx(0.02, rel=0.01)
    assert found.costs.backward[0] == pytest.approx(0.03, rel=0.01)
