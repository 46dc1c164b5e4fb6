"""``python -m launcher`` on a GPU: one rank, two that share it, forked and started afresh."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.measure import GPU
from tests.gpu.started import check_pipeline, check_start

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]


def test_two_stages_lose_what_one_does(tmp_path: Path) -> None:
    check_pipeline(tmp_path, GPU.accelerator, GPU.hardware, "cluster.backend=staged")


def test_forked_ranks_lose_what_fresh_ones_do(tmp_path: Path) -> None:
    check_start(tmp_path, GPU.accelerator, GPU.hardware, "cluster.backend=staged")
