"""The typed schema of ``conf/``: one frozen dataclass per group, and the checks between keys.

Free of Hydra, OmegaConf and torch: a worker process reads its configuration with ``from_dict``.
"""

from __future__ import annotations

from launcher.config.check import check
from launcher.config.decode import dump, from_dict
from launcher.config.launch import LaunchConfig, Mode
from launcher.config.pipeline import (
    CostsConfig,
    HardwareConfig,
    OverlapConfig,
    PlannerConfig,
    RecomputeConfig,
    ScheduleConfig,
)
from launcher.config.running import ClusterConfig, SweepConfig, TrackingConfig, TrainerConfig
from launcher.config.workload import (
    DataConfig,
    ExportConfig,
    GenerateConfig,
    ModelConfig,
    OptimizerConfig,
)

__all__ = [
    "ClusterConfig",
    "CostsConfig",
    "DataConfig",
    "ExportConfig",
    "GenerateConfig",
    "HardwareConfig",
    "LaunchConfig",
    "Mode",
    "ModelConfig",
    "OptimizerConfig",
    "OverlapConfig",
    "PlannerConfig",
    "RecomputeConfig",
    "ScheduleConfig",
    "SweepConfig",
    "TrackingConfig",
    "TrainerConfig",
    "check",
    "dump",
    "from_dict",
]
