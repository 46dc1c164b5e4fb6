"""Plans for a model of somebody else's package: traced once, cut as its ranks can cut it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.config import LaunchConfig
from launcher.config.launch import HardwareConfig
from launcher.config.pipeline import PlannerConfig, RecomputeConfig, ScheduleConfig
from launcher.config.workload import ModelConfig
from launcher.planning.question import question
from launcher.planning.report import candidate_config
from launcher.processes.local import our_path
from launcher.rank import trace_job
from launcher.resolve import resolve
from launcher.workloads.traced_shape import TracedShape
from strategies.analysis.memory import peak_memory_bytes
from strategies.costs.trace_file import (
    Line,
    TracedAgain,
    TracedExperts,
    TracedModel,
    TracedTensor,
    TracedUnit,
)
from strategies.errors import PlanError
from strategies.planner.cut import skips
from strategies.planner.layout_search import search
from strategies.planner.space import layouts
from strategies.simulator.engine import simulate
from tests.launcher.command_line import launch_here
from tests.tiny_models import write_model

PACKAGE = """
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 16


def block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.SiLU())


class Net(pl.LightningModule):
    '''A U-Net: what an encoder block makes is used by the decoder block that mirrors it, too.'''

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.down = nn.ModuleList([block(3, WIDTH), *(block(WIDTH, WIDTH) for _ in range(2))])
        self.up = nn.ModuleList([*(block(2 * WIDTH, WIDTH) for _ in range(2)), block(WIDTH, 3)])

    def forward(self, x):
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        for layer in self.up[:2]:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = layer(torch.cat([x, kept.pop()], 1))
        return self.up[2](nn.functional.interpolate(x, scale_factor=2.0))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self(batch[0]), batch[0])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Branching(Net):
    def training_step(self, batch, batch_idx):
        if self(batch[0]).sum().item() > 0:
            return self.up[2](batch[0])
        return self(batch[0]).mean()


class Data(pl.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        x = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x), batch_size=self.batch_size)


def build_model(config):
    return Net(config.seed)


def build_branching(config):
    return Branching(config.seed)


def build_data(config, batch_size):
    return Data(batch_size)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "my_unet.py").write_text(PACKAGE)
    info = folder / "my_unet-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-unet\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[foldpipe.models]\nmy_unet = my_unet:build_model\nmy_branching = my_unet:build_branching\n"
        "[foldpipe.data]\nmy_images = my_unet:build_data\n"
    )
    return folder


def launch(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([our_path(os.environ), str(site)]),
        "XDG_CACHE_HOME": str(site / "cache"),
    }
    return subprocess.run(
        [sys.executable, "-m", "launcher", *words, f"hydra.run.dir={folder}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.mark.distributed
@pytest.mark.full
def test_a_u_net_of_ones_own_is_planned_once_traced_and_trains_as_it_is_printed(
    site: Path, tmp_path: Path
):
    words = ["model=my_unet", "data=my_images", "pp=2", "planner.global_batch_size=8"]
    words += ["planner.num_gpus=2"]
    first = launch(site, tmp_path / "plan", *words, "mode=plan")
    assert first.returncode == 0, first.stderr
    assert "tracing model=my_unet" in first.stdout
    assert "8 samples per step" in first.stdout
    assert "samples/s" in first.stdout and "tokens/s" not in first.stdout
    again = launch(site, tmp_path / "again", *words, "mode=plan", "planner.balance_ratio=1.2")
    assert again.returncode == 0, again.stderr
    assert "tracing" not in again.stdout  # the cache has it
    plan = json.loads((tmp_path / "plan" / "result.json").read_text())["plans"][0]
    assert sum(plan["units_per_stage"]) == 6
    (printed,) = (line for line in first.stdout.splitlines() if line.startswith("plan 1: "))
    command = printed.partition("python -m launcher ")[2].replace("'", "").split()
    trained = launch(site, tmp_path / "train", *command, "trainer.max_steps=2")
    assert trained.returncode == 0, trained.stderr
    result = json.loads((tmp_path / "train" / "result.json").read_text())
    assert (result["status"], result["steps"], result["pp"]) == ("done", 2, 2)


@pytest.mark.full
def test_a_step_that_cannot_be_traced_is_refused_with_the_users_line(site: Path, tmp_path: Path):
    words = ["mode=plan", "model=my_branching", "data=my_images", "planner.num_gpus=2"]
    done = launch(site, tmp_path, *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "my_unet.py:" in done.stderr
    assert "item" in done.stderr


def unit(name: str, flops: float, parameters: int = 1000) -> TracedUnit:
    line = Line(0.0, flops)
    return TracedUnit(name, parameters, (), line, line, line, Line(0.0, 4096.0))


def u_net(half: int = 4) -> TracedShape:
    """Deeper units work more and hand on less."""
    count = 2 * half
    sizes = [4096.0 / 2 ** min(i, count - 1 - i) for i in range(count)]
    tensors = tuple(
        TracedTensor(
            i, (i + 1, count - 1 - i) if i + 1 < count - 1 - i else (i + 1,), Line(0.0, sizes[i])
        )
        for i in range(count - 1)
    )
    units = tuple(unit(f"u{i}", 1e9 * (1 + min(i, count - 1 - i) / 4)) for i in range(count))
    return TracedShape(TracedModel("Net", 1000 * count, units, tensors), "my_net", 1, 4)


def config_of(**planner: object) -> LaunchConfig:
    return LaunchConfig(
        mode="plan",
        model=ModelConfig(name="my_net"),
        planner=PlannerConfig(num_gpus=4, global_batch_size=16, **planner),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("ratio", [None, 1.4])
def test_what_is_listed_for_a_graph_is_what_its_program_takes(ratio, monkeypatch):
    monkeypatch.setattr("launcher.resolve.brings_own", lambda option, name: name == "my_net")
    config, traced = config_of(balance_ratio=ratio), u_net()
    asked = question(config, (), traced)
    answer = search(asked.problem, asked.space, top_k=4)
    assert answer.plans
    for plan in answer.plans:
        run = resolve(candidate_config(config, plan.candidate, traced, 16), traced=traced)
        program = run.programs.train
        assert simulate(program, run.costs).period == pytest.approx(plan.step_time_s, rel=1e-9)
        assert peak_memory_bytes(program, run.costs.table(program)) == plan.rank_bytes
        assert plan.candidate.layout.tp == 1
        assert run.layers_per_stage == tuple(map(float, plan.candidate.units))
        assert run.plan.skips == skips(run.costs.handed)  # type: ignore[union-attr]
    deep = question(replace(config, pp=4, planner=PlannerConfig(num_gpus=4)), ("pp",), traced)
    assert search(deep.problem, deep.space, top_k=1).plans[0].plan.skips


def test_a_trace_on_one_rank_is_without_what_ranks_share():
    config = LaunchConfig(
        tp=2, sequence_parallel=True, expert_tp=True,
        schedule=ScheduleConfig(name="pipedream_2bw", error_feedback=0.5),
    )  # fmt: skip
    alone = resolve(trace_job._alone(config))
    assert (alone.world_size, alone.plan.schedule) == (1, "1f1b")


def test_what_a_trace_cannot_tell_is_refused():
    config = replace(config_of(), recompute=RecomputeConfig(name="selective"))
    with pytest.raises(PlanError, match=r"Try recompute=full"):
        question(config, ("recompute",), u_net())
    shape = u_net()
    again = TracedAgain(*(Line(0.0, 8.0) for _ in range(3)))
    units = tuple(replace(unit, again=again) for unit in shape.trace.units)
    knows = replace(shape, trace=replace(shape.trace, units=units))
    assert question(config, ("recompute",), knows).space.selective
    for other in ({"name": "layer"}, {"name": "selective", "layers": ("Mlp:norm",)}):
        with pytest.raises(PlanError, match="Try recompute"):
            asked = replace(config, recompute=RecomputeConfig(**other))
            question(asked, ("recompute",), knows)
    asked = question(replace(config_of(), tp=2), ("tp",), u_net())
    refused = asked.problem.refuse_tp(2)
    assert refused is not None
    assert "Try tp=1" in refused
    measured = replace(config_of(), hardware=HardwareConfig(measured_on="here", fit_error=0.02))
    assert question(measured, (), u_net()).config.hardware.fit_error == 0.02


def mixture() -> TracedShape:
    """A chain whose middle has experts, most of its weights and half of its work."""
    experts = TracedExperts(1, 6, 600_000, Line(0.0, 5e8), Line(0.0, 2048.0), Line(0.0, 8192.0))
    units = [unit(f"u{i}", 1e9) for i in range(6)]
    units[2:4] = [replace(u, parameters=601_000, experts=experts) for u in units[2:4]]
    tensors = tuple(TracedTensor(i, (i + 1,), Line(0.0, 4096.0)) for i in range(5))
    model = TracedModel("Net", 1_206_000, tuple(units), tensors, declared=True)
    return TracedShape(model, "my_net", 1, 4)


def test_experts_of_a_traced_model_are_spread_and_their_exchange_is_priced(monkeypatch):
    monkeypatch.setattr("launcher.resolve.brings_own", lambda option, name: name == "my_net")
    config, traced = config_of(), mixture()
    free = question(config, (), traced)
    assert {layout.ep for layout in layouts(free.space, free.problem, 1, 1, 4)} == {1, 2}
    found = {}
    for ep in (1, 2):
        pinned = replace(config, ep=ep)
        asked = question(pinned, ("ep",), traced)
        best = search(asked.problem, asked.space, top_k=1).plans[0]
        run = resolve(candidate_config(pinned, best.candidate, traced, 16), traced=traced)
        program = run.programs.train
        assert simulate(program, run.costs).period == pytest.approx(best.step_time_s, rel=1e-9)
        assert peak_memory_bytes(program, run.costs.table(program)) == best.rank_bytes
        assert any(program.exchanges) == (ep == 2)
        found[ep] = best
    assert found[2].peak_bytes < found[1].peak_bytes - 4_000_000
    for ep, shape, fix in ((4, traced, "num_experts=6 of model=my_net. Try ep=3"),
                           (2, u_net(), "in a unit of pipeline_units). Try ep=1.")):  # fmt: skip
        with pytest.raises(PlanError, match=re.escape(fix)):
            question(replace(config, ep=ep), ("ep",), shape)
    with pytest.raises(PlanError, match="Try tp=1"):
        question(replace(config, ep=2, tp=2), ("ep", "tp"), traced)


@pytest.mark.full
def test_a_model_whose_matrices_cannot_be_shared_is_planned_without(tmp_path):
    """A tiny one with experts: the search finds nothing to gain, and other layouts are left."""
    write_model(tmp_path / "model", "mixtral")
    words = [
        "mode=plan", "model=hf", f"model.path={tmp_path / 'model'}", "model.sequence=12",
        "hardware=h100", "planner.num_gpus=2", "planner.global_batch_size=8",
    ]  # fmt: skip
    done = launch_here(words, tmp_path)
    assert done.code == 0, done.errors
    assert "nothing is worth cutting over 2 ranks" in done.output
    assert all("tp=1" in plan["overrides"] for plan in done.result["plans"])
