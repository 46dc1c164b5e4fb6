"""mode=plan over one layout: recompute policy and microbatch size, and what freed memory buys."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from launcher.config import LaunchConfig
from launcher.config.decode import from_dict
from launcher.planning.plan_auto import LayoutAnswer, is_one_layout, tune_layout
from launcher.planning.question import Question, question
from launcher.planning.report import answer_mapping, candidate_config, command_line
from launcher.report.plan_table import reaches_text, refusal_mapping, refusals_text
from launcher.resolve import resolve
from strategies.analysis.metrics import measure
from strategies.errors import PlanError
from strategies.schedules import SCHEDULES
from strategies.simulator.engine import simulate
from tests.launcher.command_line import launch_here
from tests.launcher.runs import MODEL

LAYOUT = ("pp", "dp", "tp", "schedule")


def asked(
    pinned: tuple[str, ...] = LAYOUT, *, maximize: str = "throughput", gb: float = 0.012,
    **values: object,
) -> tuple[LaunchConfig, Question]:  # fmt: skip
    config = from_dict(
        {
            "mode": "plan", "pp": 4, "dp": 2, "model": {"vocab": 512},
            "planner": {"global_batch_size": 32, "maximize": maximize, "memory_gb": gb},
        }
        | values
    )  # fmt: skip
    return config, question(config, pinned)


@cache
def found_with(*, top_k: int, maximize: str = "throughput", gb: float = 0.012) -> LayoutAnswer:
    return tune_layout(*asked(maximize=maximize, gb=gb), top_k=top_k)


def test_policy_and_microbatch_size_are_chosen_and_all_others_have_a_reason():
    config, what = asked()
    assert is_one_layout(config, what)
    found = found_with(top_k=3)
    assert len(found.listed) == 3
    times = [plan.step_time_s for plan in found.listed]
    assert times == sorted(times)
    settings = {(p.config.recompute.name, p.config.data.microbatch_size)
                for p in found.listed}  # fmt: skip
    others = {(r.recompute.policy, r.layout.microbatch_size) for r in found.answer.refusals}
    everything = {(p, n) for p in ("none", "selective", "optimal", "mario", "full")
                  for n in (1, 2, 4, 8, 16)}  # fmt: skip
    assert settings | others == everything
    assert not settings & others
    assert {r.reason for r in found.answer.refusals} >= {"memory", "slower"}
    for refusal in found.answer.refusals:
        if refusal.reason == "memory" and refusal.needed_bytes is not None:
            assert refusal.needed_bytes > 12_000_000
        if refusal.reason == "slower":
            assert refusal.step_time_s >= times[-1] * (1 - 1e-9)


def test_a_listed_setting_is_what_its_run_predicts():
    config, what = asked()
    for plan in found_with(top_k=3).listed:
        run = resolve(candidate_config(config, plan.outcome.candidate, what.shape, 32))
        metrics = measure(simulate(run.programs.train, run.costs), run.costs)
        step = metrics.makespan if what.problem.machine.waits_at_flush else metrics.period
        assert step == pytest.approx(plan.outcome.step_time_s, rel=1e-9)
        assert metrics.peak_memory_bytes == plan.outcome.rank_bytes
        assert max(plan.outcome.rank_bytes) <= 12_000_000
        assert (run.config.pp, run.dp, run.config.schedule.name) == (4, 2, "1f1b")


def test_with_room_for_everything_nothing_is_recomputed():
    found = found_with(gb=4.0, top_k=1)
    assert found.listed[0].config.recompute.name == "none"
    assert {r.reason for r in found.answer.refusals if r.recompute.policy == "optimal"} <= {
        "same", "slower",
    }  # fmt: skip


def test_what_is_pinned_stays():
    data = {"global_batch_size": 32, "microbatch_size": 2}
    config, what = asked(
        (*LAYOUT, "recompute", "data.microbatch_size"), recompute={"name": "mario"}, data=data,
        gb=0.0155,
    )  # fmt: skip
    found = tune_layout(config, what, top_k=5)
    (plan,) = found.listed
    assert "recompute=mario" in plan.words
    assert "data.microbatch_size=2" in plan.words
    assert found.answer.num_candidates == 2  # gradients overlapped, weights sharded or not


@pytest.mark.parametrize(
    "maximize", [pytest.param("sequence_length", marks=pytest.mark.full), "model_size"]
)
def test_freed_memory_goes_into_a_longer_sequence_or_a_deeper_model(maximize):
    config, _ = asked(maximize=maximize)
    found = found_with(maximize=maximize, top_k=5)
    key = {"sequence_length": "model.sequence", "model_size": "model.layers"}[maximize]
    reaches = {reach.recompute.policy: reach for reach in found.reaches}
    assert reaches["full"].value > reaches["none"].value
    # No order of fewer activations stores less than the schedule's own with full recomputation.
    assert reaches["optimal"].value >= reaches["full"].value
    best = found.listed[0]
    assert best.words[-1] == f"{key}={max(reach.value for reach in reaches.values())}"
    for reach in found.reaches:
        assert reach.outcome.peak_bytes <= 12_000_000
        assert reach.beyond_bytes is None or reach.beyond_bytes > 12_000_000
    full = reaches["full"]
    name = key.partition(".")[2]
    for value, fits in ((full.value, True), (full.value + full.step, False)):
        model = replace(full.config.model, **{name: value})
        run = resolve(
            replace(
                candidate_config(full.config, full.outcome.candidate, full.asked.shape, 32),
                model=model,
                schedule=replace(config.schedule, units_per_stage=None),
            )
        )
        held = measure(simulate(run.programs.train, run.costs), run.costs).peak_memory_bytes
        assert (max(held) <= 12_000_000) == fits
    text = reaches_text(found.reaches, key, 12_000_000)
    assert f"recompute=full       {key}={reaches['full'].value}" in text


def test_a_cap_that_no_policy_meets_says_the_smallest_that_can_and_what_it_costs():
    config, what = asked(gb=0.005)
    with pytest.raises(PlanError) as refused:
        tune_layout(config, what, top_k=1)
    message = str(refused.value)
    assert "planner.memory_gb=0.005" in message
    assert "per step (" in message and "without recomputation" in message
    enough = float(message.rpartition("Try planner.memory_gb=")[2].partition(",")[0])
    assert tune_layout(*asked(gb=enough), top_k=1).listed
    with pytest.raises(PlanError):
        tune_layout(*asked(gb=0.97 * enough), top_k=1)


def test_a_size_that_never_fits_says_what_is_needed():
    config, what = asked(maximize="model_size", gb=0.0005)
    with pytest.raises(PlanError, match=r"no room for the smallest model.layers .* Try planner.m"):
        tune_layout(config, what, top_k=1)


def test_a_size_grows_in_a_pinned_layout_only():
    config, what = asked(("pp",), maximize="model_size")
    with pytest.raises(PlanError, match=r"dp, tp, schedule are not set\. Try dp=2 tp=1 schedule"):
        is_one_layout(config, what)
    config, what = asked(("pp",))
    assert not is_one_layout(config, what)


def test_layers_cannot_grow_where_they_are_cut_by_hand():
    config, what = asked(maximize="model_size", schedule={"layers_per_stage": [1, 2, 2, 1]})
    with pytest.raises(PlanError, match=r"Try without schedule\.layers_per_stage"):
        tune_layout(config, what, top_k=1)


def test_a_schedule_without_a_flush_says_what_lets_it_be_planned(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "1f1b", SCHEDULES["pipedream_2bw"])
    config, what = asked()
    with pytest.raises(
        PlanError, match=r"late gradients.*planner.asynchronous=true, or schedule=1f1b"
    ):
        is_one_layout(config, what)


def test_reasons_are_a_line_each_and_in_the_result():
    _, what = asked()
    found = found_with(top_k=3)
    text = refusals_text(found.answer.refusals, found.answer.plans[0].step_time_s, 12_000_000)
    assert len(text.splitlines()) == 1 + len(found.answer.refusals)
    assert "slower than plan 1" in text
    assert "GB of 0.012" in text
    mapping = answer_mapping(what, found.answer, found.listed)
    assert mapping["num_candidates"] == 50
    assert mapping["rejected"]["memory"] + mapping["rejected"]["slower"] + mapping["rejected"][
        "dominated"
    ] == len(found.answer.refusals)
    assert refusal_mapping(found.answer.refusals[0])["reason"] == found.answer.refusals[0].reason


def test_what_was_typed_for_the_planner_is_not_in_the_run(tmp_path: Path):
    plan = found_with(maximize="model_size", top_k=5).listed[0]
    typed = ["mode=plan", "pp=4", "planner.memory_gb=0.012", "planner.maximize=model_size",
             "model.layers=2", "model.vocab=512"]  # fmt: skip
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("".join(f"- {word}\n" for word in typed))
    line = command_line(tmp_path, plan)
    assert line.count("model.layers=") == 1 and "model.layers=2 " not in line
    assert "planner." not in line
    assert "model.vocab=512" in line


def test_the_printed_command_runs_as_it_is_printed(tmp_path: Path):
    words = [
        *MODEL, "mode=plan", "pp=2", "dp=1", "tp=1", "schedule=1f1b", "planner.memory_gb=0.0005",
        "planner.global_batch_size=8", "planner.maximize=sequence_length", "model.layers=4",
    ]  # fmt: skip
    done = launch_here(words, tmp_path / "plan").assert_done()
    result = done.result
    assert result["maximize"] == "sequence_length"
    assert {reach["recompute"] for reach in result["reaches"]} == {
        "none", "selective", "optimal", "mario", "full",
    }  # fmt: skip
    (printed,) = (line for line in done.output.splitlines() if line.startswith("plan 1: "))
    again = printed.partition("python -m launcher ")[2].replace("'", "").split()
    checked = launch_here([*again, "mode=validate"], tmp_path / "again").assert_done().result
    assert checked["period"] == pytest.approx(result["plans"][0]["predicted_step_time_s"])
    assert checked["peak_memory_bytes"] == result["plans"][0]["peak_memory_bytes"]


# A cut that seems to fit until its buffers are counted is made again with what is left of memory.
TIGHT = (
    "mode=plan", "model=gpt3_1_6b", "hardware=a100_40g", "hardware.gpus_per_node=4",
    "planner.global_batch_size=64", "trainer.precision=16-mixed", "costs.attention=unfused",
    "schedule=1f1b", "recompute=none", "data.microbatch_size=1", "pp=8", "dp=1", "tp=2",
    "planner.num_gpus=16",
)  # fmt: skip


@pytest.mark.parametrize(
    "start",
    [
        2048,
        pytest.param(9984, marks=pytest.mark.full),
        pytest.param(777_777, marks=pytest.mark.full),
    ],
)
def test_the_longest_sequence_does_not_depend_on_where_the_search_begins(start, tmp_path):
    words = [*TIGHT, "planner.maximize=sequence_length", f"model.sequence={start}"]
    done = launch_here(words, tmp_path).assert_done()
    (longest,) = re.findall(r"recompute=none +model\.sequence=(\d+) ", done.output)
    assert longest == "10752"  # to 1/32 of it


def test_a_sequence_shorter_than_the_longest_has_a_plan(tmp_path):
    done = launch_here([*TIGHT, "model.sequence=7616"], tmp_path).assert_done()
    assert re.search(r"^1 +2 +8 +1 +64 x 1 +1f1b ", done.output, re.MULTILINE)
