from __future__ import annotations

from pathlib import Path

import pytest

from strategies.errors import PipelineError
from strategies.referee import examine
from strategies.referee.foreign import Asked, Theirs, read_their_file

TITAN = """\
[training]
local_batch_size = 8

[parallelism]
pipeline_parallel_degree = {pp}
pipeline_parallel_schedule = "{schedule}"
pipeline_parallel_microbatch_size = 2
"""
MODEL = """\
distributed:
  pp_size: 2
  pipeline:
    pp_schedule: interleaved1f1b
    pp_microbatch_size: 1
    pp_batch_size: ${step_scheduler.local_batch_size}
step_scheduler:
  local_batch_size: 4
"""
PYTHON = """\
def debug() -> Trainer.Config:
    config = base()
    config.parallelism.pipeline_parallel_degree = 2
    config.training.local_batch_size = 4
    return config

def large() -> Trainer.Config:
    return Trainer.Config(
        training=TrainingConfig(local_batch_size=16, steps=10 * 100),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=4, pipeline_parallel_schedule="ZBVZeroBubble"
        ),
    )
"""
CSV = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def _read(folder: Path, name: str, text: str, asked: Asked | None = None, more: str = "") -> Theirs:
    (folder / name).write_text(text)
    return read_their_file(str(folder / name) + more, asked or Asked())


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"])
def test_a_configuration_of_torchtitan_is_an_order_that_runs(schedule: str, tmp_path: Path):
    theirs = _read(tmp_path, "t.toml", TITAN.format(pp=2, schedule=schedule))
    opinion = examine(theirs.file.text, grouped=theirs.grouped)
    assert opinion.runs
    assert (len(opinion.program.ranks), opinion.program.num_microbatches) == (2, 4)


def test_a_number_of_microbatches_comes_before_their_size(tmp_path: Path):
    text = TITAN.format(pp=2, schedule="1F1B") + "num_pp_microbatches = 8\n"
    theirs = _read(tmp_path, "t.toml", text)
    assert examine(theirs.file.text, grouped=True).program.num_microbatches == 8


def test_layers_per_stage_need_the_models(tmp_path: Path):
    text = TITAN.format(pp=2, schedule="Interleaved1F1B")
    text += "pipeline_parallel_layers_per_stage = 3\n"
    theirs = _read(tmp_path, "t.toml", text, Asked(layers=16))
    assert examine(theirs.file.text).program.placement.num_stages == 6
    with pytest.raises(PipelineError, match=r"Try check\.layers=32"):
        _read(tmp_path, "t.toml", text)


def test_a_csv_beside_it_gets_the_messages_that_torch_adds(tmp_path: Path):
    (tmp_path / "own.csv").write_text(CSV)
    text = TITAN.format(pp=2, schedule="1F1B").replace("= 2\n", "= 4\n")
    text = text.replace("degree = 4", "degree = 2")
    theirs = _read(tmp_path, "t.toml", text + 'pipeline_parallel_schedule_csv = "own.csv"\n')
    opinion = examine(theirs.file.text)
    assert opinion.program.lowered and opinion.runs
    assert theirs.file.name.endswith("own.csv")


def test_a_recipe_of_automodel_is_read_with_what_it_points_to(tmp_path: Path):
    theirs = _read(tmp_path, "recipe.yaml", MODEL)
    assert theirs.framework == "NeMo AutoModel"
    opinion = examine(theirs.file.text)
    assert (opinion.program.placement.num_stages, opinion.program.num_microbatches) == (4, 4)


def test_a_python_configuration_is_parsed_and_chosen_by_name(tmp_path: Path):
    large = examine(_read(tmp_path, "c.py", PYTHON, more=":large").file.text)
    assert (len(large.program.ranks), large.program.num_microbatches) == (4, 16)
    debug = examine(_read(tmp_path, "c.py", PYTHON, more=":debug").file.text)
    assert len(debug.program.ranks) == 2
    with pytest.raises(PipelineError, match=r"2 configurations with a pipeline \(debug, large\)"):
        _read(tmp_path, "c.py", PYTHON)


def test_parts_of_a_model_are_its_stages(tmp_path: Path):
    text = TITAN.format(pp=2, schedule="Interleaved1F1B")
    parts = (
        "pipeline_parallel_module_fqns_per_model_part = [\n" + '  ["layers.0", "layers.1"],\n' * 6
    )
    with pytest.raises(PipelineError, match="6 stages are no multiple of the pipeline's 4 ranks"):
        _read(tmp_path, "t.toml", TITAN.format(pp=4, schedule="Interleaved1F1B") + parts + "]\n")
    theirs = _read(tmp_path, "t.toml", text + parts + "]\n")
    assert examine(theirs.file.text).program.placement.num_stages == 6


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("t.toml", "[training]\nsteps = 3\n", "says nothing of a pipeline"),
        ("t.toml", "pipeline_parallel_degree = 'two'\n", "a whole number"),
        ("t.toml", "pipeline_parallel_degree = 2\nlocal_batch_size = 9\n"
         "pipeline_parallel_microbatch_size = 2\n", "Try local_batch_size=10"),
        ("t.toml", "pipeline_parallel_degree = 2\npipeline_parallel_schedule = 'Magic'\n",
         "no schedule of torch"),
        ("t.toml", "pipeline_parallel_degree = 1000000\nlocal_batch_size = 1000000\n",
         "at most 2,000,000"),
        ("t.toml", "a." * 4_000_000 + "b = 1", "says nothing of a pipeline"),
        ("t.yaml", "[" * 1_000_000 + "pp: 2", "says nothing of a pipeline"),
        ("t.yaml", "pp_size: ${nowhere.at.all}\n", "'\\${nowhere.at.all}', and must be a whole"),
        ("t.yaml", "model: x\n", "says nothing of a pipeline"),
        ("c.py", "x = 1\n", "says nothing of a pipeline"),
        ("c.py", "class C:\n  def a(self):\n    f(pipeline_parallel_degree=2)\n"
         "  def b(self):\n    f(pipeline_parallel_degree=4)\n", r"2 configurations .*Try .*py:a"),
        ("c.py", "A = f(pipeline_parallel_degree=2)\nB = f(pipeline_parallel_degree=4)\n",
         "sets pipeline_parallel_degree to '2' and to '4'"),
        ("t.yaml", "a:\n  pp_size: 2\nb:\n  pp_size: 4\n", "sets pp_size to '2' and to '4'"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_message(name: str, text: str, told: str, tmp_path: Path):
    with pytest.raises(PipelineError, match=told):
        _read(tmp_path, name, text)


def test_torchtitans_flags_are_read_from_a_script(tmp_path: Path):
    script = (
        "torchrun train.py --parallelism.pipeline_parallel_degree=2 \\\n"
        "  --parallelism.pipeline_parallel_schedule Interleaved1F1B --training.local_batch_size 4\n"
    )
    theirs = _read(tmp_path, "run.sh", script)
    opinion = examine(theirs.file.text)
    assert (opinion.program.placement.num_stages, opinion.program.num_microbatches) == (4, 4)
    with pytest.raises(PipelineError, match="a whole number"):
        _read(tmp_path, "run.sh", script.replace("degree=2", "degree=$PP"))


def test_100_megabytes_are_refused_at_once(tmp_path: Path):
    with (tmp_path / "t.toml").open("wb") as stream:
        stream.truncate(100_000_000)
    with pytest.raises(PipelineError, match="more than 16,777,216 bytes"):
        read_their_file(str(tmp_path / "t.toml"), Asked())
