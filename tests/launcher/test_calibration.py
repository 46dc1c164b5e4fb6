"""hardware=auto: what is measured, kept, taken and said."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from launcher.commands import calibration
from launcher.commands.calibration import with_figures
from launcher.config import LaunchConfig, from_dict
from launcher.config.pipeline import ASSUMED, QUICK, HardwareConfig
from strategies.errors import PlanError, RunError
from tests.launcher.runs import MODEL, launch

FOUND = HardwareConfig(name=QUICK, peak_flops=5e10, cores=2, measured_on="here")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache of its own, and a machine that is measured in no time."""
    monkeypatch.setenv("FOLDPIPE_CALIBRATION", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []

    def _measured(config, ranks):
        measured.append(ranks)
        return FOUND

    monkeypatch.setattr(calibration, "_measured", _measured)
    return measured


def asked(mode="train", **more):
    return from_dict({"mode": mode, "pp": 2, **more})


def kept(tmp_path):
    (file,) = (tmp_path / "foldpipe" / "hardware").glob("*.json")
    return file


def test_a_training_measures_once_and_what_predicts_takes_the_same(cache, tmp_path, capsys):
    for mode in ("train", "train", "simulate", "validate"):
        assert with_figures(asked(mode), tmp_path).hardware == FOUND
    plan = asked("plan", planner={"num_gpus": 2})
    assert with_figures(plan, tmp_path).hardware == FOUND
    assert cache == [2]
    assert capsys.readouterr().out == "hardware=auto: measuring this machine, once for 2 ranks\n"


@pytest.mark.parametrize("mode", ["simulate", "validate", "plan"])
def test_what_starts_nothing_never_measures_and_says_what_it_takes(mode, cache, tmp_path, capsys):
    config = asked(mode, planner={"num_gpus": 2})
    assert with_figures(config, tmp_path).hardware == HardwareConfig(name=ASSUMED)
    assert cache == []
    assert capsys.readouterr().out == (
        "hardware=auto: no training with 2 ranks has measured this machine yet; predicted for "
        "hardware=cpu_laptop\n"
    )


def test_figures_are_those_of_one_number_of_ranks_and_one_precision(cache, tmp_path):
    with_figures(asked(), tmp_path)
    with_figures(asked(dp=2), tmp_path)
    with_figures(asked(trainer={"precision": "bf16-mixed"}), tmp_path)
    assert cache == [2, 4, 2]


def test_keys_that_are_set_stay(cache, tmp_path):
    found = with_figures(asked(hardware={"memory_gb": 9.0}), tmp_path).hardware
    assert found == replace(FOUND, memory_gb=9.0)
    named = asked(hardware={"name": "mine"})
    assert with_figures(named, tmp_path) == named


@pytest.mark.parametrize(
    "config",
    [
        asked("eval"),
        asked(costs={"name": "uniform"}),
        asked(model={"name": "class", "path": "nets:Lit"}),
    ],
    ids=["eval", "uniform costs", "a class that only ranks know"],
)
def test_nothing_is_measured_where_nothing_is_predicted_in_seconds(config, cache, tmp_path, capsys):
    assert with_figures(config, tmp_path).hardware.name == ASSUMED
    assert cache == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [("peak_flops", -1.0), ("peak_flops", float("nan")), ("intra_latency_s", 1e9), ("cores", "x")],
)
def test_a_broken_figure_in_the_cache_is_measured_again(name, value, cache, tmp_path):
    with_figures(asked(), tmp_path)
    file = kept(tmp_path)
    content = json.loads(file.read_text())
    content["hardware"][name] = value
    file.write_text(json.dumps(content))
    assert with_figures(asked(), tmp_path).hardware == FOUND
    assert cache == [2, 2]
    assert json.loads(file.read_text())["hardware"] == asdict(FOUND)


def test_figures_of_another_machine_are_not_taken(cache, tmp_path):
    with_figures(asked(), tmp_path)
    file = kept(tmp_path)
    content = json.loads(file.read_text())
    content["machine"]["torch"] = "1.0"
    file.write_text(json.dumps(content))
    assert with_figures(asked("simulate"), tmp_path).hardware.name == ASSUMED


def test_a_cache_that_cannot_be_written_falls_back_to_what_is_assumed(
    cache, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert with_figures(asked(), tmp_path).hardware == HardwareConfig(name=ASSUMED)
    assert cache == []
    said = f"hardware=auto: {tmp_path}/file/foldpipe cannot be written; predicted for "
    assert capsys.readouterr().out == f"{said}hardware=cpu_laptop\n"


def test_a_folder_of_the_cache_that_takes_no_file_is_told_and_not_fatal(cache, tmp_path, capsys):
    with_figures(asked(), tmp_path)
    lock = kept(tmp_path).with_suffix(".lock")
    kept(tmp_path).unlink()
    lock.unlink()
    lock.mkdir()
    assert with_figures(asked(), tmp_path).hardware == HardwareConfig(name=ASSUMED)
    assert f"{lock.parent} cannot be written (Is a directory)" in capsys.readouterr().out


class _NoRanks:
    def __init__(self, *given, **words):
        pass

    def run(self):
        raise RunError("rank 0 was ended by SIGALRM\nwith a log")


def test_ranks_that_fail_or_take_too_long_are_not_believed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FOLDPIPE_CALIBRATION", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "LocalRanks", _NoRanks)
    monkeypatch.setattr(calibration, "fork_server", lambda *given: None)
    found = with_figures(asked(), tmp_path).hardware
    assert found == HardwareConfig(name=ASSUMED)
    assert capsys.readouterr().out == (
        "hardware=auto: measuring this machine, once for 2 ranks\n"
        "hardware=auto: this machine could not be measured (rank 0 was ended by SIGALRM); "
        "predicted for hardware=cpu_laptop\n"
    )


@pytest.mark.parametrize(
    "wrong", [{"schedule": {"layers_per_stage": [1, 2]}}, {"pp": 100_000}, {"compile": True}]
)
def test_a_request_that_is_refused_measures_nothing(wrong, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no compiler
    with pytest.raises(PlanError):
        with_figures(asked(**wrong), tmp_path)
    assert cache == []


def test_ranks_elsewhere_are_not_this_machine(cache, tmp_path, capsys):
    config = asked(cluster={"name": "torchrun"})
    assert with_figures(config, tmp_path).hardware.name == ASSUMED
    assert "ranks run on other machines, or are started elsewhere" in capsys.readouterr().out


def test_it_is_the_default():
    assert LaunchConfig().hardware.name == "auto"


@pytest.mark.distributed
def test_a_sweep_measures_once_and_its_predictions_can_be_repeated(tmp_path):
    free = {"FOLDPIPE_CALIBRATION": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    common = (*MODEL, "pp=2", "data.max_bytes=200000")
    sweep = ("-m", *common, "schedule=1f1b,zb_h1", "trainer.max_steps=2", "trainer.save_last=false")
    done = launch(sweep, tmp_path / "sweep", **free).assert_done()
    told = "".join(file.read_text() for file in done.cwd.rglob("output.txt")) + done.output
    assert told.count("hardware=auto: measuring this machine, once for 2 ranks") == 1
    content = json.loads(kept(tmp_path / "cache").read_text())
    figures = content["hardware"]
    assert figures["name"] == QUICK
    assert figures["cores"] == content["machine"]["usable"]
    own = {"peak_flops", "efficiency", "memory_gb", "memory_bandwidth", "intra_bandwidth"}
    datasheet = asdict(HardwareConfig())
    assert all(figures[name] != datasheet[name] for name in own)
    assert all(figures[f"{name}_overhead_s"] > 0 for name in ("unit", "stage", "step"))
    results = [json.loads(file.read_text()) for file in done.cwd.rglob("result.json")]
    trained = next(each for each in results if each["schedule"] == "1f1b")
    assert trained["hardware"] == QUICK
    simulated = launch(("mode=simulate", *common), tmp_path / "one", **free).assert_done()
    assert simulated.result["makespan"] == trained["makespan"]
    assert f"hardware {QUICK}" in " ".join(simulated.output.split())
