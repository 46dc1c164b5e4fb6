"""Which peak a run is planned with: that of its precision, as the hardware file names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.compose.option_groups import conf_dir
from launcher.compose.session import compose_checked, hydra_session, search_path
from launcher.config import LaunchConfig, TrainerConfig, from_dict
from launcher.rank import jobs
from launcher.report.predicted import ideal_step_s, run_peak
from launcher.resolve import resolve
from strategies.costs.analytic import AnalyticCosts
from strategies.errors import PlanError
from strategies.simulator.engine import simulate
from tests.launcher.command_line import launch_here

CARDS = ("a100_40g", "a100_80g", "h100", "h200", "v100_32g")
TF32 = "trainer.float32_matmul_precision=high"
BF16 = "trainer.precision=bf16-mixed"
MODEL = ("mode=simulate", "model=llama2_7b", "pp=2")


def composed(*words: str, folder: Path | None = None) -> LaunchConfig:
    with hydra_session():
        return compose_checked([*search_path(folder), *words])[0]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder for --config-dir with files of each style."""
    folder = tmp_path / "cfg"
    (folder / "hardware").mkdir(parents=True)
    (folder / "experiment").mkdir()
    files = {
        "old": "peak_flops: 2.0e13\n",
        "mixed": "peak_flops: 2.0e13\npeak_bf16_flops: 3.0e14\n",
        "named": "peak_bf16_flops: 3.0e14\n",
        "none": "efficiency: 0.5\n",
    }
    for name, text in files.items():
        (folder / "hardware" / f"{name}.yaml").write_text(f"name: {name}\n{text}")
    over = "# @package _global_\nhardware:\n  peak_flops: 5.0e+14\n"
    (folder / "experiment" / "over.yaml").write_text(over)
    return folder


def test_a_precision_computes_in_its_number_format():
    formats = {
        "64-true": "fp64", "32-true": "fp32", "bf16-mixed": "bf16", "bf16-true": "bf16",
        "16-mixed": "fp16",
    }  # fmt: skip
    for precision, expected in formats.items():
        config = from_dict({"trainer": {"precision": precision}})
        assert config.trainer.number_format == expected
    for given in ("high", "medium"):
        assert TrainerConfig(float32_matmul_precision=given).number_format == "tf32"
    mixed = TrainerConfig(precision="bf16-mixed", float32_matmul_precision="high")
    assert mixed.number_format == "bf16"


def test_compute_on_an_a100_takes_as_much_longer_as_its_peak_is_lower():
    runs = {
        name: resolve(composed(*MODEL, "hardware=a100_80g", *words))
        for name, words in {"fp32": (), "tf32": (TF32,), "bf16": (BF16,)}.items()
    }
    longest = {}
    for name, run in runs.items():
        assert isinstance(run.costs, AnalyticCosts)
        table = run.costs.table(run.programs.train)
        longest[name] = max(table.forward)
        assert simulate(run.programs.train, run.costs).makespan > 0
    # Products take as much longer as the peak is lower; what moves in memory takes as long, or in
    # 16 bits half as long.
    assert 0.9 * 156 / 19.5 < longest["fp32"] / longest["tf32"] < 156 / 19.5
    assert 1.8 < longest["tf32"] / longest["bf16"] < 2  # weights are cast
    ideal = {name: ideal_step_s(run) for name, run in runs.items()}
    assert ideal["fp32"] / ideal["bf16"] == pytest.approx(16)


@pytest.mark.parametrize("card", CARDS)
def test_each_card_names_its_peaks_and_a_narrower_format_is_no_slower(card):
    known = composed(f"hardware={card}").hardware.named_peaks()
    in_order = [known[name] for name in ("fp32", "tf32", "bf16", "fp8") if name in known]
    assert in_order == sorted(in_order)
    assert {"fp64", "fp32", "fp16"} <= set(known)
    assert ("fp8" in known) == card.startswith("h")
    assert composed(f"hardware={card}").hardware.peak_flops is None
    assert "Datasheet" in (conf_dir() / "hardware" / f"{card}.yaml").read_text()


def test_a_card_has_the_memory_that_it_reports():
    reported_mib = {
        "a100_40g": 40960, "a100_80g": 81920, "h100": 81559, "h200": 143771, "v100_32g": 32768,
    }  # fmt: skip
    assert set(reported_mib) == set(CARDS)
    for card, mib in reported_mib.items():
        given = composed(f"hardware={card}").hardware.memory_gb
        assert given * 1e9 == pytest.approx(mib * 2**20, rel=2e-4)


def test_one_peak_stands_for_what_a_file_does_not_name(own):
    for words, expected in {
        ("hardware=old",): 2e13,
        ("hardware=old", BF16): 2e13,
        ("hardware=mixed",): 2e13,
        ("hardware=mixed", BF16): 3e14,
        ("hardware=named", BF16): 3e14,
        ("hardware=none",): 9.6e10,
        (BF16,): 9.6e10,
    }.items():
        assert run_peak(composed(*words, folder=own)) == expected, words


def test_one_peak_set_over_a_file_is_meant_for_all(own):
    one = "hardware.peak_flops=6e14"
    for words, expected in {
        ("hardware=a100_80g", one): 6e14,
        ("hardware=v100_32g", one, BF16): 6e14,
        ("hardware=mixed", one, BF16): 6e14,
        ("hardware=old", one): 6e14,
        ("hardware=named", "hardware.peak_flops=1e13"): 1e13,
        ("hardware=a100_80g", "experiment=over"): 5e14,
        ("hardware=a100_80g", one, "hardware.peak_fp32_flops=2e13"): 2e13,
        ("hardware=a100_80g", "hardware.peak_fp32_flops=2e13"): 2e13,
        (one,): 6e14,
    }.items():
        assert run_peak(composed(*words, folder=own)) == expected, words


def test_a_run_goes_by_what_was_set_over_the_file(tmp_path):
    words = (*MODEL, "hardware=a100_80g", "hardware.peak_flops=6.24e14")
    fast = launch_here(words, tmp_path / "a").assert_done().result
    slow = launch_here((*MODEL, "hardware=a100_80g", BF16), tmp_path / "b").assert_done().result
    assert fast["makespan"] < 0.7 * slow["makespan"]


def test_a_plan_says_of_which_peak(tmp_path):
    words = ("mode=plan", "hardware=a100_80g", BF16, "planner.num_gpus=2", "planner.top_k=1")
    done = launch_here(words, tmp_path).assert_done()
    assert "datasheet figures, large products at 86% of 312 TFLOPS bf16\n" in done.output
    assert (done.result["peak_flops"], done.result["peak_format"]) == (3.12e14, "bf16")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("hardware=v100_32g", BF16),
         "trainer.precision=bf16-mixed computes in bf16, and hardware=v100_32g has no peak for "
         "bf16, only for fp64, fp32, fp16. Try trainer.precision=16-mixed, or give the peak of "
         "one rank in FLOP/s (hardware.peak_bf16_flops)."),
        (("hardware=v100_32g", TF32),
         "trainer.float32_matmul_precision=high computes in tf32, and hardware=v100_32g has no "
         "peak for tf32, only for fp64, fp32, fp16. Try trainer.float32_matmul_precision=highest, "
         "or give the peak of one rank in FLOP/s (hardware.peak_tf32_flops)."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["simulate", "plan", "train"])
def test_a_precision_that_a_card_has_no_peak_for_is_refused(words, message, mode, tmp_path):
    done = launch_here((f"mode={mode}", *words), tmp_path)
    assert (done.code, done.errors) == (2, f"error: {message}\n")


def test_a_file_that_names_other_precisions_alone_is_refused_with_the_key_to_give(own):
    told = r"only for bf16\. Try trainer\.precision=bf16-mixed, or .*hardware\.peak_fp32_flops"
    with pytest.raises(PlanError, match=told):
        composed("hardware=named", folder=own)
    composed("hardware=named", "trainer.precision=bf16-mixed", folder=own)
    composed("hardware=named", "mode=simulate", "costs=uniform", folder=own)  # It reads no peak.


def test_ranks_multiply_as_they_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []

    def train(*_: Any) -> dict[str, Any]:
        seen.append(torch.get_float32_matmul_precision())
        return {}

    monkeypatch.setattr(jobs, "train", train)
    monkeypatch.setenv("RANK", "0")
    before = torch.get_float32_matmul_precision()
    try:
        for given in ("medium", "highest"):
            run = resolve(from_dict({"trainer": {"float32_matmul_precision": given}}))
            monkeypatch.setattr(jobs, "resolve_task", lambda task, run=run: run)
            jobs.run({"checkpoint": None}, tmp_path)
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == ["medium", "highest"]
