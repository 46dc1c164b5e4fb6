"""The worked example of CONTRIBUTING: one more kind of instruction, made and used in a copy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).resolve().parents[2]

COMPILED = """
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.compiler import compile_plan
from strategies.ir import verify
from strategies.ir.kinds import Kind
from strategies.ir.text import format_rows, parse_rows
from strategies.plan import Plan, Recompute

costs = UniformCosts(forward=1, backward=2)
for plan in (
    Plan("1f1b", 2, 4), Plan("zb_h1", 4, 8), Plan("interleaved_1f1b", 2, 4), Plan("dualpipe", 2, 4),
    Plan("1f1b", 2, 4, recompute=Recompute("full")), Plan("1f1b", 2, 4, overlap="zero1"),
    Plan("pipedream_2bw", 2, 2), Plan("pipedream", 3, 1, recompute=Recompute("full")),
):
    programs = compile_plan(plan)
    program = programs.train
    verify(program)
    assert parse_rows(format_rows(program.ranks)) == program.ranks
    probes = [item for row in program.ranks for item in row if item.kind is Kind.PROBE]
    stages, count = program.placement.num_stages, program.num_microbatches
    assert len(probes) == stages * count
    if programs.stream is not None:
        row = programs.stream.step(programs.stream.first_steady).ranks[0]
        assert sum(item.kind is Kind.PROBE for item in row) == plan.num_microbatches
    assert not any(i.kind is Kind.PROBE for row in programs.forward.ranks for i in row)
    timeline = simulate(program, costs)
    for rank in range(len(program.ranks)):
        for event in timeline.events(rank):
            if event.instruction.kind is Kind.PROBE:
                took = costs.table(program).forward[event.instruction.stage]
                assert event.end - event.start == took
# On one rank three units of time become four.
assert simulate(compile_program(pp=1, num_microbatches=5), costs).makespan == 5 * 4
assert peak_activations(compile_program(pp=1), costs.table(compile_program(pp=1))) == (2.0,)
"""

TRAINED = """
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from strategies import PipelineStrategy
from strategies.ir.kinds import Kind


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


strategy = PipelineStrategy(pp=1, schedule="1f1b", num_microbatches=2)
trainer = pl.Trainer(
    strategy=strategy, accelerator="cpu", devices=1, max_steps=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4))
assert trainer.global_step == 2
record = strategy.engine.recorder.kept[-1]
row = record.program.ranks[0]
stamps = zip(row, record.start, record.end)
probed = [end - start for item, start, end in stamps if item.kind is Kind.PROBE]
assert len(probed) == 2
assert min(probed) > 0
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with the edits of the page."""
    folder = tmp_path_factory.mktemp("new_kind")
    shutil.copytree(
        ROOT / "strategies", folder / "strategies", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, hunks in _edits().items():
        file = folder / name
        text = file.read_text()
        for hunk in hunks:
            old, new = (
                "".join(f"{line[1:]}\n" for line in hunk if line[0] in signs)
                for signs in (" -", " +")
            )
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        file.write_text(text)
    return folder


def _edits() -> dict[str, list[list[str]]]:
    """By file, the groups of lines of its block: those there, those that go and those that come."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page[page.index("## A new kind of instruction") :].partition("\n## ")[0]
    found: dict[str, list[list[str]]] = {}
    for step in re.split(r"^\d\. ", section, flags=re.MULTILINE)[1:]:
        name = re.findall(r"`(strategies/[\w/]+\.py)`", step)[0]
        lines = re.findall(r"^ {7}([ +-].*|\+)$|^()$", step, re.MULTILINE)
        groups: list[list[str]] = [[]]
        for line, _ in lines:
            if line:
                groups[-1].append(line)
            else:
                groups.append([])
        found[name] = [group for group in groups if any(line[0] == "+" for line in group)]
    return found


def _runs(folder: Path, script: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", dedent(script)], cwd=folder, env=environment, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_three_files_have_what_a_kind_needs() -> None:
    edits = _edits()
    assert len(edits) == 3
    lines = [line for hunks in edits.values() for hunk in hunks for line in hunk]
    assert sum(line[0] == "+" and len(line) > 1 for line in lines) == 17


def test_programs_with_one_more_kind_compile_verify_and_simulate(copy: Path) -> None:
    _runs(copy, COMPILED)


def test_a_training_runs_one_more_kind(copy: Path) -> None:
    _runs(copy, TRAINED)
