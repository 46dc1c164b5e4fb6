"""mode=plan and plan=auto: what is printed runs, what is pinned stays, what cannot be says why."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.config import LaunchConfig
from launcher.config.decode import from_dict
from launcher.planning.no_plan import refuse
from launcher.planning.question import Question, question
from launcher.planning.report import candidate_config, candidate_words, pinned_space
from launcher.resolve import resolve
from strategies.analysis.metrics import measure
from strategies.errors import PlanError
from strategies.planner.layout_search import search
from strategies.planner.problem import Layout
from strategies.planner.space import Space, leaves_made_out, orders
from strategies.simulator.engine import simulate
from tests.launcher.command_line import launch_here, run_here
from tests.launcher.runs import MODEL, launch

LLAMA = {
    "name": "llama2_13b", "layers": 40, "hidden": 5120, "heads": 40, "kv_heads": None,
    "ffn": 13824, "vocab": 32000, "sequence": 4096,
}  # fmt: skip
A100 = {
    "name": "a100_40g", "peak_flops": 3.12e14, "efficiency": 0.5, "memory_gb": 40.0,
    "memory_bandwidth": 1.555e12, "intra_bandwidth": 3e11, "intra_latency_s": 5e-6,
    "inter_bandwidth": 2.5e10, "inter_latency_s": 1e-5, "gpus_per_node": 8,
}  # fmt: skip


def config_of(**values: object) -> LaunchConfig:
    return from_dict({"mode": "plan", **values})


def llama_config(num_gpus: int, batch: int = 128, **planner: object) -> LaunchConfig:
    return config_of(
        model=LLAMA,
        hardware=A100,
        trainer={"precision": "bf16-true"},
        planner={"num_gpus": num_gpus, "global_batch_size": batch, **planner},
    )


def llama(num_gpus: int, batch: int = 128, **planner: object) -> Question:
    return question(llama_config(num_gpus, batch, **planner), ())


def small(pinned: tuple[str, ...] = (), **values: object) -> tuple[LaunchConfig, Question]:
    config = config_of(
        **{"planner": {"num_gpus": 8, "global_batch_size": 32}, "model": {"vocab": 512}} | values
    )
    return config, question(config, pinned)


def test_a_13b_model_on_64_gpus_is_planned_from_a_few_simulations():
    answer = search(llama(64).problem, llama(64).space)
    assert len(answer.plans) == 5
    assert answer.num_simulated < answer.num_candidates / 20
    assert max(plan.peak_bytes for plan in answer.plans) <= 40e9


@pytest.mark.full
def test_4096_gpus_simulate_a_fraction_of_the_candidates():
    asked = llama(4096, 4096)
    answer = search(asked.problem, asked.space)
    assert len(answer.plans) == 5
    assert answer.num_simulated < answer.num_candidates / 10


@pytest.mark.parametrize("pinned", [(), ("pp",), ("schedule",)])
def test_a_listed_plan_is_what_its_run_predicts(pinned):
    values: dict[str, object] = {"pp": 4} if pinned == ("pp",) else {}
    if pinned == ("schedule",):
        # Its steady step is shorter than its makespan where no rank waits at the flush.
        values = {"schedule": {"name": "zb_v"}, "trainer": {"on_nan": "ignore"}}
    config, asked = small(pinned, **values)
    answer = search(asked.problem, asked.space)
    assert answer.plans
    for plan in answer.plans:
        run = resolve(candidate_config(config, plan.candidate, asked.shape, 32))
        metrics = measure(simulate(run.programs.train, run.costs), run.costs)
        step = metrics.makespan if asked.problem.machine.waits_at_flush else metrics.period
        assert step == pytest.approx(plan.step_time_s, rel=1e-9)
        assert metrics.peak_memory_bytes == plan.rank_bytes
        assert max(plan.rank_bytes) <= asked.problem.room(plan.candidate.layout)
        assert step >= plan.group.bound * (1 - 1e-9)
        assert run.world_size == 8
        if pinned:
            words = candidate_words(plan.candidate, asked)
            assert "pp=4" in words or values.get("schedule")


def test_keys_to_explain_may_be_spelt_as_a_plan_prints_them():
    space = pinned_space(
        Space(8, 32), ["data.microbatch_size=16", "schedule.stages_per_rank=2", "tp:4"]
    )
    assert (space.microbatch_size, space.stages_per_rank, space.tp) == (16, 2, 4)


def test_a_layout_without_an_exchange_of_tokens_is_planned_without_it():
    config, asked = small(overlap={"exchange": True})
    for plan in search(asked.problem, asked.space, top_k=2).plans:
        assert "overlap.exchange=false" in candidate_words(plan.candidate, asked)
        assert not resolve(candidate_config(config, plan.candidate, asked.shape, 32)).plan.pairs


def test_little_memory_brings_selective_recomputation_as_its_run_predicts_it():
    config = llama_config(16, 32, memory_gb=24.0)
    asked = question(config, ())
    best = search(asked.problem, asked.space, top_k=1).plans[0]
    assert best.candidate.recompute.policy == "selective"
    assert best.peak_bytes <= 24e9
    run = resolve(candidate_config(config, best.candidate, asked.shape, 32))
    metrics = measure(simulate(run.programs.train, run.costs), run.costs)
    assert metrics.period == pytest.approx(best.step_time_s, rel=1e-9)
    assert metrics.peak_memory_bytes == best.rank_bytes


@pytest.mark.parametrize(
    ("values", "pinned", "expected"),
    [
        ({"planner": {"num_gpus": 8, "global_batch_size": 7}, "pp": 1, "tp": 1}, ("pp", "tp"),
         "Try data.global_batch_size=8."),
        ({"pp": 3}, ("pp",), "Try planner.num_gpus=6."),
        ({"tp": 8}, ("tp",), "tp=8 does not divide"),
        ({"schedule": {"name": "chimera"}, "pp": 1}, ("schedule", "pp"),
         "schedule=chimera runs on none"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_says_what_would_work(values, pinned, expected):
    _, asked = small(pinned, **values)
    answer = search(asked.problem, asked.space)
    assert answer.plans == ()
    assert expected in str(refuse(asked, answer))


@pytest.mark.full
def test_too_little_memory_names_changes_after_which_a_plan_fits():
    asked = llama(4)
    answer = search(asked.problem, asked.space, top_k=1)
    assert answer.plans == ()
    message = str(refuse(asked, answer))
    assert "None of" in message
    assert "Try planner.num_gpus=8, or planner.memory_gb=" in message
    enough = float(message.rpartition("planner.memory_gb=")[2].rstrip("."))
    assert search(llama(8).problem, llama(8).space, top_k=1).plans
    roomy = llama(4, memory_gb=enough)
    tighter = llama(4, memory_gb=0.97 * enough)
    assert search(roomy.problem, roomy.space, top_k=1).plans
    assert not search(tighter.problem, tighter.space, top_k=1).plans


def test_uniform_costs_cannot_be_planned_with():
    with pytest.raises(PlanError, match="Try costs=analytic"):
        question(config_of(costs={"name": "uniform"}), ())


def test_batches_that_contradict_each_other_are_refused():
    with pytest.raises(PlanError, match=r"data.global_batch_size=16"):
        small(data={"global_batch_size": 16})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["planner.num_gpus=4"], "Try plan=auto, or mode=plan."),
        (["plan=auto", "mode=generate"], "mode=generate runs a checkpoint"),
        (["mode=plan", "planner.explain=[widht=3]"], "widht=3 fixes nothing that is planned"),
        (["mode=plan", "planner.explain=[model.tp=3]"], "model.tp=3 fixes nothing"),
        (["plan=auto", "planner.explain=[tp=2]"], "is an answer of mode=plan"),
        (
            ["schedule.units_per_stage=[14]", "schedule.layers_per_stage=[6]"],
            "both cut the model",
        ),
    ],
)
def test_keys_that_would_be_ignored_are_refused(words, expected, tmp_path, monkeypatch):
    done = run_here(words, tmp_path, monkeypatch)
    done.assert_refused()
    assert expected in done.errors


def test_mode_plan_lists_plans_that_run_as_they_are_printed(tmp_path: Path):
    words = [
        *MODEL, "mode=plan", "planner.num_gpus=4", "planner.global_batch_size=16", "pp=2",
        "planner.explain=[schedule=1f1b]", "planner.top_k=3",
    ]  # fmt: skip
    done = launch(words, tmp_path / "plan").assert_done()
    result = done.result
    assert result["mode"] == "plan"
    assert result["calibrated"] is True
    assert "on 4 x auto (quick calibration) (the default" in done.output
    assert "\nquick calibration: times are computed from figures measured on a mach" in done.output
    plans = result["plans"]
    assert 1 <= len(plans) <= 3
    assert [p["predicted_step_time_s"] for p in plans] == sorted(
        p["predicted_step_time_s"] for p in plans
    )
    assert {p["schedule"] for p in plans} == {"1f1b"}
    assert (done.folder / "timeline.html").is_file()
    (printed,) = (line for line in done.output.splitlines() if line.startswith("plan 1: "))
    again = printed.partition("python -m launcher ")[2].replace("'", "").split()
    assert set(plans[0]["overrides"]) <= set(again)
    checked = launch_here([*again, "mode=simulate"], tmp_path / "again").assert_done().result
    assert checked["period"] == pytest.approx(plans[0]["predicted_step_time_s"])
    assert checked["peak_memory_bytes"] == plans[0]["peak_memory_bytes"]


@pytest.mark.distributed
def test_plan_auto_trains_and_says_what_it_chose(tmp_path: Path):
    words = [
        *MODEL, "model.layers=3", "plan=auto", "planner.num_gpus=2", "pp=2", "tp=1",
        "planner.global_batch_size=8", "schedule=zb_v", "trainer.max_steps=2",
        "trainer.limit_val_batches=0",
    ]  # fmt: skip
    done = launch(words, tmp_path).assert_done()
    assert "plan=auto: pp=2 tp=1 dp=1" in done.output
    result = done.result
    assert (result["status"], result["steps"]) == ("done", 2)
    assert (result["pp"], result["dp"], result["schedule"]) == (2, 1, "zb_v")


def test_the_questions_of_the_guide_can_be_asked(tmp_path, monkeypatch):
    page = Path(__file__).resolve().parents[2] / "docs" / "guides" / "planning.md"
    commands = re.findall(r"^    python -m launcher (mode=plan .*)$", page.read_text(), re.M)
    assert len(commands) == 3
    for number, command in enumerate(commands):
        done = run_here(command.split(), tmp_path / str(number), monkeypatch)
        assert done.code == 0, done.errors
        assert done.calls[0].config.mode == "plan"


@pytest.mark.parametrize(
    ("degrees", "pinned", "expected"),
    [
        ({"pp": 4, "dp": 2, "tp": 1}, ("pp", "dp", "tp"), 8),
        ({"pp": 8}, ("pp",), 8),  # more than two cores hold
        ({"pp": 4, "dp": 3}, ("pp", "dp"), 12),
        ({"pp": 2}, ("pp",), 2),
        ({"pp": 1, "tp": 1}, ("pp", "tp"), 2),
        ({}, (), 2),
    ],
)
def test_without_a_number_pinned_degrees_or_this_machine_give_it(
    degrees, pinned, expected, monkeypatch
):
    monkeypatch.setattr("launcher.planning.question.num_places", lambda _: 2)
    config = config_of(**degrees, planner={"global_batch_size": 24}, model={"vocab": 512})
    assert question(config, pinned).space.num_gpus == expected


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "mode=plan model.experts=4 tp=1 expert_tp=true",
            "and tp=1. Try tp=2, or expert_tp=false.",
        ),
        (
            "mode=plan planner.num_gpus=4 model.experts=6 ep=3",
            "of 4 GPUs. Try ep=2, or without ep=.",
        ),
        ("mode=validate model=tiny_moe pp=2 dp=2 ep=2 schedule=pipedream_2bw", "or ep=1 and tp=1."),
        (
            "mode=plan pp=2 schedule=pipedream_2bw planner.asynchronous=true recompute=optimal",
            "Try recompute=full, or leave recompute= out.",
        ),
        ("mode=generate model=tiny_moe dp=2 ep=2 checkpoint=a.ckpt", "pp=1 dp=1 tp=1 ep=1 (any"),
    ],
)
def test_what_no_layout_schedule_or_mode_takes_is_refused(words, told, tmp_path):
    done = launch_here(words.split(), tmp_path)
    assert (done.code, done.output) == (2, "")
    assert done.errors.count("error: ") == 1
    assert told in done.errors


def test_a_plan_says_that_zero_bubble_was_too_long_to_be_tried():
    short, long = Layout(1, 8, 1, 1, 64), Layout(1, 16, 1, 1, 64)
    assert leaves_made_out(Space(16, 64), short) is None
    said = leaves_made_out(Space(16, 64), long)
    assert said == (
        "not tried for plan 1: zb_v, made for their costs, of more than 1,024 forwards "
        "(pp x microbatches x stages per rank). Try planner.level=O3, or schedule=zb_v"
    )
    assert leaves_made_out(Space(16, 64, level="O3"), long) is None
    assert leaves_made_out(Space(16, 64, schedule="1f1b"), long) is None
    tried = {order.schedule for order in orders(Space(16, 64), llama(16).problem, long)}
    assert {"zb_h1", "zb_h2"} <= tried
    assert "zb_v" not in tried
    # Of one stage per rank there are half as many.
    assert "zb_h1" in leaves_made_out(Space(16, 128), replace(long, num_microbatches=128))
