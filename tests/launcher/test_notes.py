"""What is said before a run starts."""

from pathlib import Path

import pytest

from launcher.commands import layouts, ranks
from launcher.commands.train import _announce
from launcher.commands.validate import _plan
from launcher.config.decode import from_dict
from launcher.report.predicted import memory_note
from launcher.resolve import resolve
from tests.launcher.runs import MODEL, launch

EXPERTS = {"experts": 8, "layers": 4}
OWN_DATA = {
    "model": {"name": "class", "path": "nets:Net"}, "data": {"name": "class", "path": "nets:Data"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "said"),
    [("1f1b", "longer in pairs than with its exchange in turn. A pair waits"), ("eager_1f1b", "")],
)
def test_pairs_that_are_slower_than_an_exchange_in_turn_are_told(schedule, said):
    run = resolve(
        from_dict(
            {
                "mode": "simulate", "pp": 4, "dp": 2, "ep": 2, "num_microbatches": 8,
                "model": EXPERTS, "schedule": {"name": schedule}, "overlap": {"exchange": True},
            }
        )
    )  # fmt: skip
    assert len(run.notes) == bool(said)
    assert said in "".join(run.notes)
    assert ("Try schedule=eager_1f1b" in "".join(run.notes)) == bool(said)


@pytest.mark.parametrize("mode", ["simulate", "validate"])
def test_a_run_that_is_predicted_not_to_fit_is_told_so(mode, tmp_path):
    words = (f"mode={mode}", *MODEL, "data.max_bytes=200000")
    fits = launch(words, tmp_path / "fits").assert_done().output
    tight = launch((*words, "hardware.memory_gb=1e-5"), tmp_path / "tight").assert_done().output
    assert "does not fit" not in fits
    assert "it does not fit: rank 0 is predicted to need 0.000" in tight
    assert (
        "hardware.memory_gb=1e-05 (hardware=auto (quick calibration)). Try recompute=full" in tight
    )
    assert ("valid: nothing was started" in fits) == (mode == "validate")
    assert "valid: nothing was started" not in tight


def test_what_the_process_and_its_allocator_take_counts_where_memory_is_short():
    asked = {"mode": "simulate", "hardware": {"memory_gb": 0.1}}
    assert memory_note(resolve(from_dict(asked))) is None
    asked["hardware"]["context_gb"] = 0.1
    assert "does not fit" in memory_note(resolve(from_dict(asked)))
    assert memory_note(resolve(from_dict(asked | {"costs": {"name": "uniform"}}))) is None


@pytest.mark.parametrize(
    ("warmup", "steps", "said"),
    [
        (100, 60, ["to 60% of optimizer.lr. Try optimizer.warmup_steps=6."]),
        (60, 60, []),
        (10, 5, []),
    ],
)
def test_a_warm_up_longer_than_the_run_is_told(warmup, steps, said):
    asked = {"optimizer": {"warmup_steps": warmup}, "trainer": {"max_steps": steps}}
    notes = resolve(from_dict(asked)).notes
    assert len(notes) == len(said)
    assert "".join(said) in "".join(notes)


def test_what_takes_long_to_compile_is_told_before(capsys):
    ranks.tell_size(from_dict({"mode": "simulate", "pp": 4, "num_microbatches": 2000}))
    assert capsys.readouterr().out == ""
    ranks.tell_size(from_dict({"mode": "simulate", "pp": 4, "num_microbatches": 20000}))
    assert "20,000 microbatches on 4 stages, 80,000 forwards: about 53 s" in capsys.readouterr().out


@pytest.mark.parametrize(("hardware", "told"), [("cpu_laptop", True), ("mine", False)])
def test_a_large_plan_for_the_default_hardware_is_told_before_the_search(
    hardware, told, monkeypatch, tmp_path, capsys
):
    def searched(*given, **words):
        raise KeyboardInterrupt

    monkeypatch.setattr(layouts, "search", searched)
    large = {"layers": 40, "hidden": 5120, "heads": 40, "kv_heads": 40, "ffn": 13824}
    asked = {"mode": "plan", "planner": {"num_gpus": 8}, "model": large}
    with pytest.raises(KeyboardInterrupt):
        layouts.run(from_dict(asked | {"hardware": {"name": hardware}}), tmp_path)
    said = capsys.readouterr().out
    assert ("billion parameters for hardware=cpu_laptop (the default;" in said) == told


@pytest.mark.parametrize(
    ("data", "wanted"), [({}, "4 microbatches of 1 x 128 tokens"), (OWN_DATA, "4 microbatches\n")]
)
def test_a_start_says_the_size_of_microbatches_only_where_it_is_known(data, wanted, capsys):
    """The loaders of a module of the user's decide it: 4 of 16 rows were called 4 of 1."""
    run = resolve(from_dict({"pp": 2, "trainer": {"accelerator": "cpu"}, **data}))
    _announce(run, None, Path("x"))
    assert wanted in "".join(capsys.readouterr())
    assert f", {wanted.partition(' x')[0].strip()} per step and replica" in _plan(run, None)
