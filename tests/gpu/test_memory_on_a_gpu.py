"""Memory that was predicted, and what the allocator of a GPU says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.measure import SMALL, train

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_peak_memory_is_near_the_prediction(precision: str, tmp_path: Path) -> None:
    result = train(
        SMALL, tmp_path, f"trainer.precision={precision}", "num_microbatches=4",
        "data.microbatch_size=8", "trainer.max_steps=5",
    )  # fmt: skip
    (measured,), (predicted,) = result["peak_memory_bytes"], result["predicted_peak_memory_bytes"]
    assert 0.6 * predicted < measured < 1.6 * predicted
