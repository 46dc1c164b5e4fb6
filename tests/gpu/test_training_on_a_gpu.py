"""What only a GPU can show: speed, memory, and short types on its own kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from launcher.workloads.transformer import Attention
from tests.gpu.measure import GPU, SMALL, flops_per_s, matmul_peak, train
from tests.ranks.training import small_shape

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]

TARGET = 0.5  # of the measured matmul peak


def test_a_compiled_llama_of_a_billion_weights_uses_half_of_the_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peak = matmul_peak(torch.device("cuda"), torch.bfloat16, size=8192, seconds=3)
    result = train(
        GPU, tmp_path, "compile=true", "trainer.precision=bf16-true", "num_microbatches=2",
        "data.microbatch_size=8", "trainer.max_steps=20",
    )  # fmt: skip
    reached = flops_per_s(result)
    with capsys.disabled():
        print(  # noqa: T201 -- the figure is what the test is for
            f"\n{torch.cuda.get_device_name()}: {reached / 1e12:.0f} TFLOP/s of the model, matrix "
            f"products reach {peak / 1e12:.0f}: {reached / peak:.2f}, target {TARGET}; "
            f"MFU {result['mfu']:.2f} of hardware={GPU.hardware}, "
            f"{result['tokens_per_s']:,.0f} tokens/s, "
            f"{max(result['peak_memory_bytes']) / 2**30:.0f} GiB"
        )
    assert result["num_parameters"] > 1e9
    assert result["loss_last"] < result["loss_first"]
    assert reached > TARGET * peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_never_writes_its_scores_down(dtype: torch.dtype) -> None:
    shape = small_shape(layers=1, hidden=256, heads=8, kv_heads=2, ffn=512)
    with torch.device("cuda"):
        attention = Attention(shape).to(dtype)
    stream = torch.randn(2, 512, 256, device="cuda", dtype=dtype, requires_grad=True)
    # All that keep scores to themselves; what none of them takes is refused.
    kinds = ("FLASH", "CUDNN", "EFFICIENT")
    with sdpa_kernel([getattr(SDPBackend, f"{kind}_ATTENTION") for kind in kinds]):
        attention(stream).sum().backward()
    assert stream.grad is not None


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
@pytest.mark.parametrize("layout", [("pp=1",), ("pp=2", "cluster.backend=staged")], ids=str)
def test_short_types_learn_as_32_bits_do(
    precision: str, layout: tuple[str, ...], tmp_path: Path
) -> None:
    words = ("num_microbatches=4", "trainer.max_steps=30", "trainer.gradient_clip_val=1.0")
    whole = train(SMALL, tmp_path / "whole", *words)
    short = train(SMALL, tmp_path / "short", *words, *layout, f"trainer.precision={precision}")
    assert short["loss_first"] == pytest.approx(whole["loss_first"], rel=0.01)
    assert short["loss_last"] == pytest.approx(whole["loss_last"], rel=0.1)
    assert short["loss_last"] < 0.8 * short["loss_first"]


def test_ranks_that_share_a_gpu_report_reductions_and_memory(tmp_path: Path) -> None:
    result = train(
        SMALL, tmp_path, "pp=2", "dp=2", "cluster.backend=staged", "num_microbatches=4",
        "trainer.max_steps=5",
    )  # fmt: skip
    assert result["measured_exposed_grad_reduce_s"] > 0
    assert len(result["peak_memory_bytes"]) == 2
    assert all(peak > 0 for peak in result["peak_memory_bytes"])
