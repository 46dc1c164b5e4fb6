"""The GPU tests' own functions, on a CPU and with a tiny model."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from tests.gpu.measure import CPU, flops_per_s, gpu_option, matmul_peak, train

pytestmark = pytest.mark.distributed
HARDWARE = Path(__file__).resolve().parents[2] / "conf" / "hardware"


@pytest.mark.full
def test_a_training_reports_what_the_gpu_tests_read(tmp_path: Path) -> None:
    result = train(
        CPU, tmp_path, "trainer.precision=bf16-true", "dp=2", "pp=2", "num_microbatches=2",
        "data.microbatch_size=2", "trainer.max_steps=4",
    )  # fmt: skip
    peak = matmul_peak(torch.device("cpu"), torch.float32, size=128, seconds=0.05)
    assert 0 < flops_per_s(result) < peak
    # Matrices of 3,936 weights outside of the embedding, and half of 16 x 16 scores per layer.
    layer = 16 * (2 * 16 * (16 + 8) + 3 * 16 * 24) + 16 * 16 * 16
    forward = 2 * (2 * layer + 16 * 16 * 256)
    assert result["model_flops_per_step"] == 3 * forward * 2 * 2 * 2
    expected = flops_per_s(result) / 9.6e10  # hardware=cpu_laptop
    assert result["mfu"] == pytest.approx(expected)
    assert len(result["peak_memory_bytes"]) == 2
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 4
    for row in rows:
        took = float(row["step_time_s"])
        assert float(row["mfu"]) == pytest.approx(expected * result["step_time_s"] / took)
        assert float(row["exposed_grad_reduce_s"]) >= 0
        assert float(row["peak_memory_bytes_max"]) > 0
    assert any(float(row["exposed_grad_reduce_s"]) > 0 for row in rows)
    # Of the process: it may only grow.
    peaks = [float(row["peak_memory_bytes_max"]) for row in rows]
    assert peaks == sorted(peaks)


@pytest.mark.full
def test_a_compiled_training_in_short_types_runs_from_the_command_line(tmp_path: Path) -> None:
    words = ("pp=2", "num_microbatches=2", "trainer.max_steps=3", "trainer.precision=bf16-true")
    plain = train(CPU, tmp_path / "plain", *words)
    compiled = train(CPU, tmp_path / "compiled", *words, "compile=true")
    assert compiled["loss_last"] == pytest.approx(plain["loss_last"], rel=0.01)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100_40g"),
        ("NVIDIA A100 80GB PCIe", "a100_80g"),
        ("Tesla V100-SXM2-32GB", "v100_32g"),
    ],
)
def test_figures_are_those_of_the_gpu_that_is_there(name: str, option: str) -> None:
    assert gpu_option(name) == option
    assert (HARDWARE / f"{option}.yaml").is_file()


def test_a_gpu_without_figures_skips_what_needs_them() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"conf/hardware has no NVIDIA L4"):
        gpu_option("NVIDIA L4")
