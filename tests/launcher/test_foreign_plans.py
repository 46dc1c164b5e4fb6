"""planner.export: a plan in another framework's words is the plan, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.planning.foreign_files import layout_string
from strategies.referee import examine
from strategies.referee.foreign import Asked, layout_stages, read_their_file
from strategies.schedules.csv_file import parse_cells
from tests.launcher.command_line import launch_here, refused_here

WORDS = [
    "mode=plan", "model=gpt2_124m", "hardware=a100_80g", "planner.num_gpus=4",
    "planner.global_batch_size=16", "pp=2", "tp=1", "data.microbatch_size=1",
    "overlap=grad_reduce", "hydra.run.dir=run",
]  # fmt: skip


def _computations(text: str) -> list[list[str]]:
    cells = parse_cells(text, name="x.csv")
    return [[cell.text for cell in row if cell.compute] for row in cells]


@pytest.mark.parametrize(
    ("target", "schedule", "file"),
    [
        ("torchtitan", "1f1b", "torchtitan.toml"),
        ("torchtitan", "zb_h1", "torchtitan.toml"),
        ("torchtitan", "zb_v", "torchtitan.toml"),
        ("automodel", "interleaved_1f1b", "automodel.yaml"),
        ("automodel", "zb_h1", "automodel.yaml"),
        ("megatron", "1f1b", "megatron.sh"),
        ("megatron", "interleaved_1f1b", "megatron.sh"),
    ],
)
def test_a_plan_is_read_back_as_its_own_order(target, schedule, file, tmp_path):
    done = launch_here([*WORDS, f"schedule={schedule}", f"planner.export={target}"], tmp_path)
    assert done.code == 0, done.errors
    assert f"plan 1 for {target}: " in done.output
    run = tmp_path / "run"
    theirs = read_their_file(str(run / file), Asked())
    opinion = examine(theirs.file.text, semantics=theirs.semantics, grouped=theirs.grouped)
    assert opinion.runs
    assert _computations(theirs.file.text) == _computations((run / "schedule.csv").read_text())
    result = json.loads((run / "result.json").read_text())
    assert result["export"]["target"] == target
    assert file in result["export"]["files"]
    text = (run / file).read_text()
    assert ("csv" in text) == (schedule == "zb_h1")
    if target == "megatron":
        assert theirs.layers is not None and sum(theirs.layers) == 12
    else:
        assert all(text.count(f'layers.{layer}"') == 1 for layer in range(12))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["schedule=zb_h1", "planner.export=megatron"], "Megatron-LM has 1F1B and interleaved"),
        (["schedule=dualpipe", "planner.export=torchtitan"], "keeps every stage on two ranks"),
        (["schedule=hanayo", "schedule.stages_per_rank=4", "planner.export=torchtitan"],
         "loops and a V of two"),
        (["schedule=1f1b", "recompute=mario", "planner.export=automodel"], "Try recompute=full"),
        (["mode=simulate", "planner.export=megatron"], "planner"),
        (["planner.export=deepspeed"], "planner.export"),
    ],
)  # fmt: skip
def test_what_a_framework_cannot_say_is_refused_with_the_reason(words, told, tmp_path, monkeypatch):
    if words[0] == "mode=simulate":
        assert told in refused_here(words, tmp_path, monkeypatch)
        return
    done = launch_here([*WORDS, *words], tmp_path)
    assert done.code == 2 and told in done.errors, done.errors


@pytest.mark.parametrize("layers", [(1, 1), (3, 3, 3, 2), (10, 10, 10, 9), (0, 4, 4, 0), (2,) * 9])
def test_a_layout_string_says_the_layers_and_nothing_else(layers: tuple[int, ...]):
    stages = layout_stages(layout_string(layers), where="x")
    assert tuple(stage.count("t") for stage in stages) == layers


def test_a_file_beside_the_plan_is_not_the_runs_own(tmp_path: Path):
    launch_here([*WORDS, "schedule=zb_h1", "planner.export=torchtitan"], tmp_path)
    assert (tmp_path / "run" / "torchtitan.csv").is_file()
    assert (tmp_path / "run" / "schedule.csv").is_file()
