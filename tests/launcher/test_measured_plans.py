"""Plans from a profile: measured times, what it does not know, and whose profile it is."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from launcher.config import LaunchConfig
from launcher.config.decode import from_dict
from launcher.planning.largest_model import largest_model
from launcher.planning.plan_auto import tune_layout
from launcher.planning.profile_check import classes_of, fingerprint, model_facts, this_machine
from launcher.planning.question import Question, calibration, question
from launcher.planning.report import answer_mapping, candidate_config, list_plans
from launcher.resolve import model_shape, resolve
from strategies.analysis.metrics import measure
from strategies.costs.profile_file import (
    Link,
    Profile,
    Seconds,
    SizeProfile,
    UnitProfile,
    dump_profile,
)
from strategies.errors import CostError, PlanError
from strategies.planner.layout_search import search
from strategies.simulator.engine import simulate

LAYOUT = ("pp", "dp", "tp", "schedule")
ERRORS = {1: 0.02, 4: 0.03}


def config_of(path: Path, **values: object) -> LaunchConfig:
    return from_dict(
        {
            "mode": "plan", "model": {"vocab": 64, "layers": 4, "hidden": 16, "sequence": 32},
            "planner": {"num_gpus": 2, "global_batch_size": 16},
            "costs": {"name": "profiled", "file": str(path)},
        }
        | values
    )  # fmt: skip


def unit(work: float, size: int) -> UnitProfile:
    """What the second of a class takes; a microbatch of four costs less than four of one."""
    took = work * (1 + 0.6 * (size - 1))
    return UnitProfile(
        Seconds(took, 2 * took, took, took, took, work / 10), 1000 * size, 500 * size, 400 * size,
        100 * size, 200 * size,
    )  # fmt: skip


@pytest.fixture
def profile(tmp_path: Path) -> tuple[Path, Profile]:
    path = tmp_path / "p.json"
    config = config_of(path)
    shape = model_shape(config)
    made = Profile(
        machine=this_machine(ranks=2, gpu=False),
        model=model_facts(config, shape),
        classes=tuple(dict.fromkeys(classes_of(shape))),
        sizes=tuple(
            (size, SizeProfile(
                Seconds(1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-4),
                tuple(unit(work, size) for work in (1e-4, 4e-3, 6e-3, 2e-3)),
                error,
            ))
            for size, error in ERRORS.items()
        ),
        rest_s=2e-3,
        messages=Link(1e-4, 1e9),
        reductions=Link(2e-4, 1e9),
    )  # fmt: skip
    path.write_text(dump_profile(made))
    return path, made


def asked_of(path: Path, pinned: tuple[str, ...] = (), **values: object) -> tuple[
    LaunchConfig, Question,
]:  # fmt: skip
    config = config_of(path, **values)
    return config, question(config, pinned)


def test_a_listed_plan_is_what_its_run_predicts_from_the_same_profile(profile):
    config, what = asked_of(profile[0], pp=2)
    answer = search(what.problem, what.space)
    assert len(answer.plans) == 5
    for plan in answer.plans:
        run = resolve(candidate_config(config, plan.candidate, what.shape, 16))
        assert run.costs.table(run.programs.train).name == "profiled"
        metrics = measure(simulate(run.programs.train, run.costs), run.costs)
        step = metrics.makespan if what.problem.machine.waits_at_flush else metrics.period
        assert step == pytest.approx(plan.step_time_s, rel=1e-9)
        assert metrics.peak_memory_bytes == plan.rank_bytes
        assert step >= plan.group.bound * (1 - 1e-9)


def test_what_was_measured_decides(profile):
    _, what = asked_of(profile[0], LAYOUT, pp=2)
    best = search(what.problem, what.space, top_k=1).plans[0]
    # A microbatch of four takes 2.8 times as long as one, and what stages take by themselves is
    # taken less often.
    assert best.candidate.layout.microbatch_size == 4
    assert best.candidate.layout.tp == 1


def test_it_is_calibrated_and_says_how_well(profile):
    config, what = asked_of(profile[0], LAYOUT, pp=2)
    found = tune_layout(config, what, top_k=2)
    mapping = answer_mapping(what, found.answer, found.listed)
    assert (mapping["calibrated"], mapping["calibration_error"]) == (True, max(ERRORS.values()))
    assert "calibrated, +-3.0 %: layers and links were measured" in calibration(what)
    assert list_plans(config, what, found.answer)[0].step_time_s == found.listed[0].step_time_s
    sizes = {p.config.data.microbatch_size for p in found.listed} | {
        r.layout.microbatch_size for r in found.answer.refusals
    }  # fmt: skip
    assert sizes == {1, 2, 4}
    # Layers that recompute inside were not measured.
    policies = {p.config.recompute.name for p in found.listed} | {
        r.recompute.policy for r in found.answer.refusals
    }  # fmt: skip
    assert policies == {"none", "optimal", "mario", "full"}


def test_a_profile_serves_a_deeper_model_but_one_sequence_length(profile):
    planner = {"global_batch_size": 16, "memory_gb": 0.00025, "maximize": "model_size"}
    config, what = asked_of(profile[0], LAYOUT, pp=2, planner=planner)
    found = tune_layout(config, what, top_k=1)
    assert found.listed[0].config.model.layers > 4
    longer = replace(config, planner=replace(config.planner, maximize="sequence_length"))
    with pytest.raises(PlanError, match=r"one sequence length\. Try costs=analytic"):
        largest_model(longer, what)


@pytest.mark.parametrize(
    ("values", "pinned", "expected"),
    [
        ({"model": {"vocab": 64, "layers": 4, "hidden": 32, "ffn": 64, "sequence": 32}}, (),
         r"another model: {model} \(hidden=16\), but this one is [0-9a-f]{{8}} \(hidden=32\)"),
        ({"tp": 2}, ("tp",), r"another model: {model} \(tp=1\), but this one is .* \(tp=2\)"),
        ({"recompute": {"name": "selective"}}, ("recompute",), r"another model: {model} \(selec"),
        ({"data": {"microbatch_size": 8}}, ("data.microbatch_size",),
         r"has microbatch sizes \[1,4\]"),
    ],
)  # fmt: skip
def test_a_profile_of_another_model_is_refused_with_both_fingerprints(
    profile, values, pinned, expected
):
    path, made = profile
    own = fingerprint(dict(made.model))
    with pytest.raises(CostError, match=expected.format(model=own)):
        asked_of(path, pinned, **values)


def test_a_profile_of_another_machine_is_refused_with_both_fingerprints(profile):
    path, made = profile
    other = replace(made, machine=replace(made.machine, processor="Other CPU"))
    path.write_text(dump_profile(other))
    theirs, ours = (fingerprint(asdict(each.machine)) for each in (other, made))
    with pytest.raises(CostError, match=rf"another machine: {theirs} .* but this one is {ours} "):
        asked_of(path)
    costs = {"name": "profiled", "file": str(path), "any_machine": True}
    assert asked_of(path, costs=costs)[1].problem.measured is not None


def test_tensor_parallelism_is_as_it_was_measured(profile):
    _, what = asked_of(profile[0])
    answer = search(what.problem, what.space)
    assert set(answer.rejected.tp) == {2}
    assert "was measured with tp=1" in answer.rejected.tp[2]


def test_a_profile_of_selective_layers_plans_selective_runs(profile):
    path, made = profile
    facts = tuple((n, "[]" if n == "selective" else v) for n, v in made.model)
    path.write_text(dump_profile(replace(made, model=facts)))
    _, what = asked_of(path)
    plans = search(what.problem, what.space).plans
    assert {plan.candidate.recompute.policy for plan in plans} == {"selective"}
