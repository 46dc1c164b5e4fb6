"""The benchmark of overheads runs and says what it should; how fast anything is, is no test."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from strategies.compiler import compile_program
from strategies.costs.uniform import UniformCosts
from strategies.simulator.engine import simulate
from tests.benchmarks import pipeline_overhead, plan_ranking, recompute_cost, simulator_speed
from tests.benchmarks.overhead_paths import critical_path
from tests.benchmarks.split_backward_cost import Size

ENGINES = ["ours", "torch", "bare", "autograd"]


@pytest.mark.distributed
def test_the_command_measures_every_engine_and_writes_table_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    arguments = "--ranks 2 --schedules 1f1b zb_v zb_h1 --microbatches 4 --repetitions 1"
    file = tmp_path / "figures.json"
    words = [*arguments.split(), "--forward-ms", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["pipeline_overhead", *words])
    pipeline_overhead.main()

    cells = json.loads(file.read_text())["cells"]
    expected = [("1f1b", e) for e in ENGINES] + [("zb_v", e) for e in ENGINES]
    # torch has no ZB-H1.
    expected += [("zb_h1", e) for e in ENGINES if e != "torch"]
    assert [(cell["schedule"], cell["engine"]) for cell in cells] == expected
    for cell in cells:
        # A rank computes 4 (F + I + W), and sleeps never end early: all was slept.
        assert cell["path_ms"] >= 12.0
        assert cell["step_ms"] >= 12.0
        assert cell["busy"] >= 0.0
        assert cell["steps_ms"] == [cell["step_ms"]]
        assert cell["ratio"] == cell["step_ms"] / cell["path_ms"]

    heading, rule, first, second, third, *rest = capsys.readouterr().out.splitlines()
    assert heading == f"| m = 4 | {' | '.join(ENGINES)} |"
    assert rule == "|---|---|---|---|---|"
    assert [row.split()[1] for row in (first, second, third)] == ["1f1b", "zb_v", "zb_h1"]
    assert first.count(" ms)") == second.count(" ms)") == 4
    assert third.count(" ms)") == 3
    assert rest[-1] == f"python -m tests.benchmarks.pipeline_overhead {' '.join(words)}"


@pytest.mark.parametrize("schedule", pipeline_overhead.SHARED)
def test_the_path_of_our_own_schedule_is_its_simulated_makespan(schedule: str):
    program = compile_program(schedule=schedule, pp=4, num_microbatches=8, buckets=0)
    expected = simulate(program, UniformCosts(forward=10.0, backward=20.0)).makespan
    assert critical_path(schedule, ranks=4, num_microbatches=8, forward=10.0) == expected


def test_the_path_of_torchs_order_has_the_first_stages_whole_backward_in_its_w():
    """Two stages: both F, the last one's I, then its W beside the first one's of twice the time."""
    order = "0F0,,0I0,0W0\n,1F0,1I0,1W0\n"
    assert critical_path("any", ranks=2, num_microbatches=1, forward=1.0, order=order) == 5.0


def test_the_cost_of_recomputing_is_measured_in_time_and_bytes(
    capsys: pytest.CaptureFixture[str],
):
    recompute_cost.measure(Size("tiny", 16, 4, 2))
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    held = {row[1]: int(row[4].removesuffix(" |")) for row in rows}
    assert list(held) == ["plain", "twice", "R", "torch", "selective"]
    assert held["plain"] == held["twice"] == held["R"]
    assert held["torch"] < held["selective"] < held["plain"]


def test_a_ranking_says_how_far_the_chosen_layout_is_off_the_best():
    held = (100,)
    rows = [
        plan_ranking.Row("a", 1.0, 1.1, held, held),
        plan_ranking.Row("b", 2.0, 1.0, (104,), held),
        plan_ranking.Row("c", 3.0, 3.0, held, held),
    ]
    assert plan_ranking.figures(rows) == pytest.approx((1 / 3, 0.1))
    assert "memory within 4.0%" in plan_ranking.table(rows)
    # Layouts are told apart by their words, and none is another's configuration.
    machine = {"name": "here", "measured_on": "here", "gpus_per_node": 2}
    configs = plan_ranking.configurations(machine)
    assert len(configs) >= 12
    assert {config.pp * int(config.dp) * config.tp for config in configs} == {1, 2}


def test_faster_clocks_are_timed_beside_the_general_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(simulator_speed, "REPETITIONS", 1)
    simulator_speed.main()
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("1f1b pp=32 num_microbatches=64: 12096 instructions, compiled in ")
    assert [line.split(",")[0] for line in rest] == [
        "lanes.replay", "ListClock.hoist", "quick_walk",
    ]  # fmt: skip
    assert all(re.search(r": \d+\.\d\d ms instead of \d+\.\d\d$", line) for line in rest)
