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


# One after the other in one process, which says which of them was the first to load something.
PLANNING = (
    "strategies", "strategies.compiler", "strategies.ir", "strategies.planner.cut",
    "strategies.schedules", "strategies.simulator",
)  # fmt: skip
COMMAND_LINE = (
    "launcher.__main__", "launcher.config", "launcher.resolve", "launcher.commands.layouts",
    "launcher.commands.validate", "launcher.commands.collect", "launcher.commands.evaluate",
    "launcher.commands.submit", "launcher.processes.slurm_job", "launcher.rank.slurm_rank",
    "launcher.workloads.hf.hf_shape", "launcher.workloads.registry",
    "launcher.workloads.transformer_shape",
)  # fmt: skip


@pytest.mark.parametrize(
    ("modules", "names"), [(PLANNING, SLOW + HYDRA), (COMMAND_LINE, SLOW)], ids=["plan", "launch"]
)
def test_what_plans_and_simulates_needs_no_torch_and_the_command_line_starts_without(
    modules: tuple[str, ...], names: tuple[str, ...]
):
    lines = ["import importlib, sys", f"for module in {modules!r}:"]
    lines += ["    importlib.import_module(module)"]
    lines += [f"    found = [name for name in {names!r} if name in sys.modules]"]
    lines += ["    assert not found, (module, found)"]
    assert modules_loaded_by("\n".join(lines), names) == []


def test_the_lazy_exports_that_simulate_leave_torch_out():
    statement = "from strategies import compile_program, simulate"
    assert modules_loaded_by(statement, SLOW + HYDRA) == []


@pytest.mark.full  # Layers of imports are checked without starting anything: import-linter.
def test_the_lazy_export_of_the_strategy_is_the_one_that_loads_torch():
    loaded = modules_loaded_by("from strategies import PipelineStrategy", SLOW + HYDRA)
    assert "torch" in loaded
    assert not set(loaded) & {"hydra", "omegaconf", "wandb"}
