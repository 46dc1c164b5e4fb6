from dataclasses import replace

import pytest

from launcher.config import LaunchConfig
from launcher.config.launch import HardwareConfig
from launcher.config.pipeline import CostsConfig, ScheduleConfig
from launcher.config.workload import ModelConfig
from launcher.resolve import resolve
from strategies.errors import PlanError


def test_tied_embeddings_are_refused_before_ranks_start():
    config = LaunchConfig(
        mode="validate", pp=2, schedule=ScheduleConfig(name="pipedream"),
        model=ModelConfig(tie_embeddings=True),
    )  # fmt: skip
    with pytest.raises(PlanError, match=r"share a matrix.*Try schedule.vertical_sync=true"):
        resolve(config)
    resolve(replace(config, schedule=ScheduleConfig(name="pipedream", vertical_sync=True)))


def test_versions_that_do_not_fit_are_refused_with_their_bytes():
    config = LaunchConfig(
        mode="validate", pp=2, num_microbatches=2, schedule=ScheduleConfig(name="pipedream_2bw"),
        costs=CostsConfig(name="analytic"), hardware=HardwareConfig(memory_gb=0.003),
    )  # fmt: skip
    with pytest.raises(PlanError, match=r"for 2 versions of its weights, and hardware.memory_gb="):
        resolve(config)
