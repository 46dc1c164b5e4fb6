"""``mode=profile`` and ``costs=profiled`` from outside: a profile is made, used and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launcher.command_line import launch_here
from tests.launcher.runs import MODEL, Finished, launch

SIZES = "profile.microbatch_sizes=[1,3]"
MORE = ("profile.iterations=3", "data=stdlib", "data.max_bytes=20000")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    folder = tmp_path_factory.mktemp("profile")
    option = f"profile.hardware={folder}/conf/hardware/mine.yaml"
    done = launch(["mode=profile", "pp=2", SIZES, *MODEL, *MORE, option], folder).assert_done()
    return done, done.folder / "profile.json"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the profile was made with


def use(made: tuple[Finished, Path], folder: Path, *words: str) -> Finished:
    asked = ["mode=validate", "pp=2", "costs=profiled", f"costs.file={made[1]}", *MODEL, *words]
    return launch_here(asked, folder)


@pytest.mark.distributed
def test_a_profile_has_every_class_of_units_and_both_links(made):
    done, path = made
    profile = json.loads(path.read_text())
    assert profile["classes"] == [
        "net.embedding", "net.layers.*.attention", "net.layers.*.mlp", "net.head",
    ]  # fmt: skip
    assert list(profile["sizes"]) == ["1", "3"]
    for figures in profile["sizes"].values():
        attention = figures["units"][1]
        assert attention["saved_bytes"] > 0
        assert attention["output_bytes"] > 0
        assert figures["fixed"]["forward"] + attention["seconds"]["forward"] > 0
        assert figures["fixed"]["recompute"] + attention["seconds"]["recompute"] > 0
    saved = [figures["units"][1]["saved_bytes"] for figures in profile["sizes"].values()]
    assert 2.5 * saved[0] < saved[1] <= 3 * saved[0]
    assert profile["links"]["messages"]["bandwidth"] > 1e6
    assert profile["links"]["reductions"]["latency_s"] >= 0
    assert profile["machine"]["threads"] == 1
    assert done.result["status"] == "done"
    assert done.result["profile"] == str(path)
    assert f"use it: costs=profiled costs.file={path}" in done.output


@pytest.mark.distributed
def test_a_plan_for_the_measured_hardware_is_calibrated(made, tmp_path):
    (option,) = made[0].cwd.rglob("hardware/mine.yaml")
    assert f"--config-dir {option.parents[1]} hardware=mine" in made[0].output
    words = ["--config-dir", str(option.parents[1]), "hardware=mine", "mode=plan", *MODEL]
    done = launch_here([*words, "planner.num_gpus=2"], tmp_path).assert_done()
    assert done.result["calibrated"] is True
    assert done.result["calibration_error"] >= 0
    assert "\ncalibrated, +-" in done.output
    assert "uncalibrated" not in done.output


@pytest.mark.distributed
@pytest.mark.parametrize(
    "words",
    [
        ("schedule=zb_v", "model.layers=4"),  # another cut of a deeper model
        ("recompute=full", "data.microbatch_size=2"),  # between two sizes
        ("schedule=interleaved_1f1b", "overlap=zero1", "dp=2"),
    ],
    ids=["zb_v", "recompute", "zero1"],
)
def test_a_profile_serves_other_programs_cuts_and_sizes(made, tmp_path, words):
    done = use(made, tmp_path, *words).assert_done()
    result = done.result
    assert result["costs"] == "profiled"
    assert result["time_unit"] == "s"
    assert 0 < result["makespan"] < 10
    for rank in result["memory_breakdown"]:
        assert rank["total"] == sum(value for name, value in rank.items() if name != "total")
        assert rank["parameters"] > 0
    assert result["peak_memory_bytes"] == [rank["total"] for rank in result["memory_breakdown"]]


@pytest.mark.distributed
def test_training_predicts_with_a_profile(made, tmp_path):
    words = ["pp=2", "costs=profiled", f"costs.file={made[1]}", *MODEL, "trainer.max_steps=3"]
    better = tmp_path / "better.json"
    words += ["trainer.limit_val_batches=0", f"costs.refine={better}"]
    done = launch(words, tmp_path / "run").assert_done()
    assert done.result["costs"] == "profiled"
    assert done.result["predicted_step_time_s"] > 0
    # The run's own kinds of instructions are corrected, the others are what they were.
    before, after = (json.loads(path.read_text()) for path in (made[1], better))
    first, second = (content["sizes"]["1"]["units"][1]["seconds"] for content in (before, after))
    assert first["forward"] != second["forward"]
    assert first["backward"] != second["backward"]
    assert first["backward_input"] == second["backward_input"]
    use((made[0], better), tmp_path / "again").assert_done()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.hidden=32"], "is a profile of another model"),
        (["model.hidden=32"], "(hidden=16), but this one is"),
        (["trainer.precision=bf16-mixed"], "(precision=32-true), but this one is"),
        (["data.microbatch_size=4"], "profile.microbatch_sizes=[1,3,4]"),
        (["costs.file=none.json"], "cannot be read (No such file or directory)"),
    ],
)
def test_what_a_profile_does_not_cover_is_refused(made, tmp_path, words, message):
    done = use(made, tmp_path, *words)
    assert done.code == 2
    assert message in done.errors
    assert done.errors.startswith("error: ")
    assert len(done.errors.splitlines()) == 1


@pytest.mark.distributed
def test_a_profile_of_another_machine_is_refused_with_both_fingerprints(made, tmp_path):
    content = json.loads(made[1].read_text())
    content["machine"]["processor"] = "Other CPU"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    done = use(made, tmp_path / "refused", f"costs.file={other}")
    assert done.code == 2
    assert "is a profile of another machine: " in done.errors
    assert "(processor=Other CPU, " in done.errors
    assert "but this one is " in done.errors
    assert "costs.any_machine=true" in done.errors
    use(made, tmp_path / "taken", f"costs.file={other}", "costs.any_machine=true").assert_done()


@pytest.mark.distributed
def test_another_number_of_threads_is_named(made, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    done = use(made, tmp_path)
    assert done.code == 2
    assert "Try OMP_NUM_THREADS=1 in front of the command" in done.errors


def test_costs_without_a_profile_say_how_to_make_one(tmp_path):
    done = launch_here(["mode=simulate", "costs=profiled", *MODEL], tmp_path)
    assert done.code == 2
    assert "costs=profiled needs costs.file" in done.errors
    assert "mode=profile pp=1 dp=1 profile.file=profile.json" in done.errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["costs.file=p.json"], "costs.file=p.json belongs to costs=profiled"),
        (["costs.refine=p.json"], "costs.refine=p.json belongs to costs=profiled"),
        (
            ["mode=simulate", "costs=profiled", "costs.file=p.json", "costs.refine=q.json"],
            "Try mode=train",
        ),
        (["costs.any_machine=true"], "costs.any_machine=true belongs to costs=profiled"),
        (["mode=profile", "costs=profiled"], "mode=profile measures costs, it reads none"),
        (["profile.file=p.json"], "Try mode=profile"),
        (["mode=profile", "profile.file=no/where.json"], "cannot be written"),
        (["mode=profile", "profile.iterations=1"], "at least 3"),
        (["mode=profile", "cluster=slurm"], "Try cluster=local, on one of them"),
        (["mode=profile", "profile.microbatch_sizes=[1000000000]"], "holds one or two layers"),
        (["hardware.cores=0"], "at least 1"),
    ],
)
def test_keys_that_mean_nothing_together_are_refused(tmp_path, words, message):
    done = launch_here([*words, *MODEL], tmp_path)
    assert done.code == 2
    assert message in done.errors


def test_ranks_share_cores_in_predictions_if_told_so(tmp_path):
    words = ["mode=simulate", "costs=uniform", "pp=4", "num_microbatches=8"]
    alone = launch_here(words, tmp_path / "alone").assert_done().result
    shared = launch_here([*words, "hardware.cores=1"], tmp_path / "shared").assert_done().result
    words += ["hardware.cores=2", "dp=2"]
    spread = launch_here(words, tmp_path / "spread").assert_done().result
    assert alone["makespan"] == 33
    assert shared["makespan"] == 96  # all there is to compute, one after the other
    assert spread["makespan"] == 96  # of two replicas on two cores
