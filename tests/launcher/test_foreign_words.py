"""What others call a thing leads to what it is called here; what is near leads nowhere else."""

from __future__ import annotations

import pytest

from launcher.compose.option_groups import find_groups
from launcher.config import LaunchConfig, from_dict
from launcher.config.decode import nearest, nearest_keys, unknown_key
from launcher.config.foreign_words import _MEANT_OPTIONS, MEANT_KEYS, meant_key
from launcher.config.key import keys_of
from strategies.errors import PlanError

KEYS = {
    "pipeline_parallel_degree": "Try pp=4.",
    "virtual_pipeline_model_parallel_size": "schedule.stages_per_rank=2.",
    "n_microbatches": "Try num_microbatches=8.",
    "zero_optimization.stage": "Try overlap=zero1.",
    "lr_scheduler_type": "Try optimizer.schedule=cosine.",
    "trainer.save_every": "Try trainer.checkpoint_every_n_steps=100.",
    "trainer.save_top_k": "Try trainer.keep_best=1.",
    "save_steps": "Try trainer.checkpoint_every_n_steps=100.",
    "model.num-heads": "Try model.heads=8.",
    "model.top_k": "Try model.experts_per_token=2.",
    "model.class": "Try model=class model.path=my_pkg.nets:LitNet.",
    "foldx-mode": "Try schedule=foldx_fifo or schedule=foldx_aiao.",
    "memory_per_device": "Try planner.memory_gb=40.",
    "num_device": "Try pp=, dp= and tp=",
    "data.dataset": "Try data=text data.path=/path/to/file.",
    "master_port": "Try cluster=torchrun",
    "wandb": "wandb is not a key. Try tracking=wandb.",
    "tensorboard": "tensorboard is not a key. Try tracking=tensorboard.",
    "prompt": "Try mode=generate generate.prompt=TEXT.",
    "name": "Try experiment_name=my_run.",
    "PP": "Did you mean pp?",
    "Trainer.Max_Steps": "Did you mean trainer.max_steps",
    "trainer.seed": "Did you mean seed?",
    "trainer.lr": "Did you mean optimizer.lr?",
    "modle.hidden": "Did you mean model.hidden?",
    "model.hiden": "Did you mean model.hidden?",
    "trainer.foo": "trainer.foo is not a key. Try --help.",
}
VALUES = {
    ("trainer", "max_steps", "10k"): "trainer.max_steps=10000.",
    ("trainer", "max_steps", "1.5M"): "trainer.max_steps=1500000.",
    ("hardware", "peak_flops", "312 TFLOPS"): "hardware.peak_flops=3.12e14.",
    ("hardware", "memory_gb", "512MB"): "hardware.memory_gb=0.512.",
    ("overlap", "bucket_mb", "25 MiB"): "overlap.bucket_mb=25.",
    ("cluster", "timeout_s", "2min"): "cluster.timeout_s=120.",
    ("trainer", "checkpoint_every_minutes", "1h"): "trainer.checkpoint_every_minutes=60.",
    ("data", "max_bytes", "1MB"): "data.max_bytes=1000000.",
    ("data", "val_fraction", "10%"): "data.val_fraction=0.1.",
    ("data", "num_workers", "auto"): "data.num_workers=0.",
    ("trainer", "deterministic", "on"): "trainer.deterministic=true.",
    ("trainer", "deterministic", 0): "trainer.deterministic=false.",
    ("trainer", "precision", "half"): "trainer.precision=16-mixed.",
    ("trainer", "accelerator", "cuda"): "trainer.accelerator=gpu.",
}


@pytest.mark.parametrize(("key", "told"), KEYS.items())
def test_a_key_of_others(key, told):
    assert told in str(unknown_key(key))


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("num_layers", "4", "Try model.layers=4."),
        ("model.num_layers", "1e1", "Try model.layers=1e1."),
        ("memory_per_device", "40G", "Try planner.memory_gb=40."),
        ("learning_rate", "1e-5", "Try optimizer.lr=1e-5."),
        ("tie", "yes", "Try model.tie_embeddings=true."),
        ("name", "my run", "Try \"experiment_name='my run'\"."),
        ("output_dir", "/x", "Try hydra.run.dir=/x."),
        ("wandb", "true", "Try tracking=wandb."),
        ("foldx-mode", "fifo", "Try schedule=foldx_fifo."),
        # Not where it is out of range, of another kind or scale.
        ("num_layers", "0", "Try model.layers=8."),
        ("num_layers", "4,8", "Try -m model.layers=4,8."),
        ("fp16", "true", "Try trainer.precision=16-mixed."),
        ("lr_scheduler_type", "linear", "Try optimizer.schedule=cosine."),
        ("warmup_ratio", "0.1", "Try optimizer.warmup_steps=100."),
        ("min_lr", "1e-5", "Try optimizer.min_lr_ratio=0.1."),
        ("schedule.num_stages", "8", "Try schedule.stages_per_rank=2."),
    ],
)
def test_a_key_of_others_gets_the_users_own_value_where_it_takes_it(key, value, told):
    assert str(unknown_key(key, value=value)).endswith(told)


@pytest.mark.parametrize(("typed", "told"), VALUES.items(), ids=str)
def test_a_value_with_a_unit_or_in_words(typed, told):
    group, name, value = typed
    with pytest.raises(PlanError) as refused:
        from_dict({group: {name: value}})
    assert str(refused.value).endswith(f"Try {told}")


def test_no_name_stands_in_the_table_twice_or_hides_a_key_of_ours():
    names = [name for line in MEANT_KEYS for name in line.split()]
    assert len(names) == len({*names})
    ours = {entry.path for entry in keys_of(LaunchConfig)}
    assert ours & {*names} == {"callbacks"}  # for trainer.callbacks
    assert meant_key("nothing.like_it") == ""


def test_options_that_others_have_lead_to_options_that_are_there():
    groups = find_groups(None)
    for group, options in _MEANT_OPTIONS.items():
        assert {name.split()[0] for name in options.values()} <= {*groups.options(group)}
        assert not {*options} & {*groups.options(group)}


def test_what_is_near_goes_by_the_beginning_and_by_no_case():
    assert nearest("A100", ["h100", "a100_40g", "a100_80g"]) == ("a100_40g", "a100_80g")
    assert nearest("litnt", ["LitNet", "Other"]) == ("LitNet",)
    assert nearest_keys("model.zzz", ["model", "model.hidden", "model.heads"]) == ()
