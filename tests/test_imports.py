"""Torch stays out of what plans and simulates, also through a package's `__init__.py`.

import-linter cannot see that importing `strategies.ir` runs `strategies/__init__.py`, so each case
here starts a fresh process and looks at `sys.modules`.
"""

import json
import subprocess
import sys

import pytest

SLOW = ("torch", "lightning", "pytorch_lightning", "transformers", "wandb")
HYDRA = ("hydra", "omegaconf")


def modules_loaded_by(statement: str, names: tuple[str, ...]) -> list[str]:
    """Those of `names` that a fresh process has loaded after `statement`."""
    probe = f"""
{statement}
import json, sys
print(json.dumps([name for name in {names!r} if name in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", probe], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    loaded: list[str] = json.loads(done.stdout)
    return loaded


def test_the_probe_sees_a_module_that_is_loaded():
    assert modules_loaded_by("import omegaconf", SLOW + HYDRA) == ["omegaconf"]


@pytest.mark.parametrize(
    "module",
    [
        "strategies",
        "strategies.compiler",
        "strategies.ir",
        "strategies.planner.cut",
        "strategies.schedules",
        "strategies.simulator",
    ],
)
def test_planning_and_simulating_need_neither_torch_nor_hydra(module):
    assert modules_loaded_by(f"import {module}", SLOW + HYDRA) == []


def test_the_lazy_exports_that_simulate_leave_torch_out():
    statement = "from strategies import compile_program, simulate"
    assert modules_loaded_by(statement, SLOW + HYDRA) == []


def test_the_lazy_export_of_the_strategy_is_the_one_that_loads_torch():
    loaded = modules_loaded_by("from strategies import PipelineStrategy", SLOW + HYDRA)
    assert "torch" in loaded
    assert not set(loaded) & {"hydra", "omegaconf", "wandb"}


@pytest.mark.parametrize(
    "module",
    [
        "launcher.__main__",
        "launcher.config",
        "launcher.resolve",
        "launcher.commands.layouts",
        "launcher.commands.validate",
        "launcher.commands.collect",
        "launcher.commands.evaluate",
        "launcher.commands.submit",
        "launcher.processes.slurm_job",
        "launcher.rank.slurm_rank",
        "launcher.workloads.hf.hf_shape",
        "launcher.workloads.hf.hf_shape",
        "launcher.workloads.registry",
        "launcher.workloads.transformer_shape",
    ],
)
def test_the_command_line_starts_without_torch(module):
    assert modules_loaded_by(f"import {module}", SLOW) == []
