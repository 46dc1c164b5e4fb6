"""The schema, the YAML files of conf/, and the typed door between them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.compose.option_groups import conf_dir, find_groups
from launcher.compose.session import compose_checked, hydra_session
from launcher.config import LaunchConfig, ModelConfig, TrainerConfig, check, dump, from_dict
from launcher.config.decode import nearest_keys
from launcher.config.key import describe, keys_of, nodes_of
from launcher.workloads.data.source import SourceKind
from strategies.errors import CostError, PlanError
from strategies.schedules import SCHEDULES

GROUPS = find_groups(None)
OPTIONS = [(group, option) for group in GROUPS.names() for option in GROUPS.options(group)]


def _compose(*overrides: str) -> LaunchConfig:
    with hydra_session():
        return compose_checked(overrides)[0]


# What an option cannot do without.
NEEDS = {
    "text": ["data.path=/corpus"],
    "tokens": ["data.path=/corpus"],
    "chimera": ["pp=2"],
    "dualpipe": ["pp=2"],
    "custom": ["schedule.file=my.csv"],
}


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes(group, option, tmp_path, monkeypatch):
    (tmp_path / "my.csv").write_text("0F0,0B0\n")
    monkeypatch.chdir(tmp_path)
    needs = [f"{group}.path=my:Own"] if option == "class" else NEEDS.get(option, [])
    config = _compose(f"{group}={option}", *needs)
    if group == "experiment":
        assert config.experiment_name == option
    elif group != "trainer":
        assert getattr(config, group).name == option


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_is_explained_and_sets_only_keys_that_exist(group, option):
    text = (conf_dir() / group / f"{option}.yaml").read_text(encoding="ascii")
    assert text.startswith("# ")
    values = yaml.safe_load(text)
    if group != "experiment":
        assert _paths(values, f"{group}.") <= {entry.path for entry in keys_of(LaunchConfig)}


def _paths(values: Mapping[str, object], prefix: str) -> set[str]:
    found = set()
    for name, value in values.items():
        nested = _paths(value, f"{prefix}{name}.") if isinstance(value, Mapping) else None
        found |= {f"{prefix}{name}"} if nested is None else nested
    return found


def test_groups_are_the_nodes_of_the_schema():
    no_groups = {"check", "generate", "export", "output", "planner", "profile", "sweep"}
    groups = {*nodes_of(LaunchConfig), "experiment", "callbacks"} - no_groups
    assert set(GROUPS.names()) == groups


def test_options_are_the_keys_of_the_registries():
    assert set(GROUPS.options("schedule")) == {*SCHEDULES, "custom"}
    assert set(GROUPS.options("data")) == {*get_args(SourceKind), "class"}
    for group in ("overlap", "costs", "optimizer", "tracking", "cluster"):
        allowed = next(k.hint for k in keys_of(LaunchConfig) if k.path == f"{group}.name")
        words = describe(allowed).partition(" or a list")[0].split(" or ")
        assert sorted(GROUPS.options(group)) == sorted(words)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_schedule_file_repeats_the_registry(name):
    config = _compose(f"schedule={name}", *NEEDS.get(name, []))
    assert config.schedule.stages_per_rank == SCHEDULES[name].stages_per_rank


def test_the_trainer_file_repeats_the_defaults_of_the_schema():
    assert _compose().trainer == TrainerConfig()


def test_the_defaults_are_those_that_the_documentation_promises():
    config = _compose()
    assert (config.mode, config.pp, config.tp, config.dp) == ("train", 1, 1, 1)
    assert (config.num_microbatches, config.seed) == ("auto", 0)
    assert (config.experiment_name, config.checkpoint) == ("default", "auto")
    assert config.schedule.name == "1f1b"
    assert (config.overlap.name, config.costs.name) == ("grad_reduce", "analytic")
    assert config.hardware.name == "auto"
    assert (config.data.name, config.data.microbatch_size) == ("stdlib", 1)


def test_every_key_is_explained_and_has_an_example_that_its_type_allows():
    for entry in keys_of(LaunchConfig):
        assert len(entry.help_text) > 8
        assert entry.help_text.isascii()
        for value in (entry.default, entry.example):
            nested: object = value
            for name in reversed(entry.path.split(".")):
                nested = {name: nested}
            from_dict(nested)


def test_a_configuration_survives_json():
    config = _compose(
        "schedule=interleaved_1f1b",
        "pp=2",
        "schedule.layers_per_stage=[2,1,2,1]",
        "trainer.limit_val_batches=1.0",
        "trainer.limit_train_batches=1",
        "tracking=wandb",
        "tracking.tags=[a,b]",
        "seed=4294967295",
        "optimizer.eps=1e-9",
    )
    again = from_dict(json.loads(json.dumps(dump(config), allow_nan=False)))
    assert again == config
    assert isinstance(again.trainer.limit_val_batches, float)  # all of them
    assert isinstance(again.trainer.limit_train_batches, int)  # one of them
    assert again.schedule.layers_per_stage == (2, 1, 2, 1)


@given(
    lr=st.floats(1e-12, 1e6),
    seed=st.integers(0, 2**32 - 1),
    prompt=st.text(max_size=20),
    limit=st.one_of(st.none(), st.integers(0, 9), st.floats(0, 1)),
    dp=st.one_of(st.just("auto"), st.integers(1, 9)),
    tags=st.lists(st.text(max_size=5), max_size=3).map(tuple),
)
def test_dump_and_from_dict_are_inverse(lr, seed, prompt, limit, dp, tags):
    base = LaunchConfig()
    config = replace(
        base,
        seed=seed,
        dp=dp,
        optimizer=replace(base.optimizer, lr=lr),
        generate=replace(base.generate, prompt=prompt),
        trainer=replace(base.trainer, limit_val_batches=limit),
        tracking=replace(base.tracking, tags=tags),
    )
    again = from_dict(json.loads(json.dumps(dump(config))))
    assert again == config
    assert type(again.trainer.limit_val_batches) is type(limit)


def test_the_number_that_nothing_is_lost_in_changes_its_type():
    assert from_dict({"trainer": {"max_steps": 1e3}}).trainer.max_steps == 1000
    assert from_dict({"optimizer": {"lr": 1}}).optimizer.lr == 1.0
    assert from_dict({"experiment_name": 2024}).experiment_name == "2024"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pp": True}, "pp=true: expected a whole number. Try pp=4."),
        ({"pp": "4"}, "pp='4': expected a whole number. Try pp=4."),
        ({"model": {"tie_embeddings": 1}}, "expected true or false"),
        ({"model": {"norm": "layer"}}, "Try model.norm=layernorm."),
        ({"model": None}, "model=null: model holds keys"),
        ({"modle": {"hidden": 3}}, "modle is not a key. Did you mean model?"),
        ({"optimizer": {"betas": [0.9, 0.9, 0.9]}}, "a list of two numbers"),
        ({"optimizer": {"lr": float("nan")}}, "expected a number"),
        ({"optimizer": {"lr": 10**400}}, "expected a number"),
    ],
)
def test_from_dict_refuses(values, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        from_dict(values)


def test_the_configuration_cannot_be_changed():
    with pytest.raises(AttributeError):
        LaunchConfig().pp = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("word", "best"),
    [
        ("model.hiden", "model.hidden"),
        ("modle.hidden", "model.hidden"),
        ("hidden", "model.hidden"),
        ("microbatches", "num_microbatches"),
        ("num_microbatch", "num_microbatches"),
        ("trainer.max_step", "trainer.max_steps"),
        ("max_steps", "trainer.max_steps"),
        ("optimiser.lr", "optimizer.lr"),
        ("stages_per_rank", "schedule.stages_per_rank"),
    ],
)
def test_the_nearest_key_comes_first(word, best):
    assert nearest_keys(word, [entry.path for entry in keys_of(LaunchConfig)])[0] == best


def test_nothing_is_suggested_for_gibberish():
    assert nearest_keys("zzqxw", [entry.path for entry in keys_of(LaunchConfig)]) == ()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tp=3", "pp=2"], "tp=3 does not divide model.heads=4 and model.kv_heads="),
        (["tp=4", "model.kv_heads=2"], "tp=4 does not divide model.kv_heads=2. Try tp=2."),
        (
            ["tp=6", "model.hidden=192", "model.heads=24", "model.kv_heads=8", "model.ffn=512"],
            "tp=6 does not divide model.kv_heads=8 and model.ffn=512. Try tp=4 or tp=8.",
        ),
        (
            ["tp=2", "sequence_parallel=true", "model.sequence=65"],
            "tp=2 does not divide model.sequence=65. Try tp=1.",
        ),
        (["sequence_parallel=true"], "and tp=1. Try tp=2, or sequence_parallel=false."),
        (["pp=0"], "pp=0: expected a whole number, at least 1."),
        (["schedule.group=3"], "1f1b has no groups"),
        (["schedule=gpipe", "schedule.stages_per_rank=2"], "gpipe runs 1 per rank"),
        (["schedule=interleaved_1f1b", "pp=4", "schedule.group=2"], "Try schedule.group=4"),
        (
            ["pp=2", "schedule.layers_per_stage=[1,2,3]"],
            "has 3 counts, but there are 2 stages (1f1b on pp=2). "
            "Try schedule.layers_per_stage=[3,3].",
        ),
        (
            ["data.global_batch_size=7", "num_microbatches=2"],
            "= 2 * 1 * 1 = 2. Try data.global_batch_size=2, or num_microbatches=auto.",
        ),
        (["data.global_batch_size=7", "dp=2"], "by dp=2. Try data.global_batch_size=8."),
        (["model.hidden=130"], "not divisible by model.heads=4"),
        (["model.kv_heads=3"], "Try model.kv_heads=2"),
        (["costs.forward=3"], "Try costs=uniform costs.forward=3.0."),
        (["optimizer=sgd", "optimizer.eps=1e-8"], "no meaning with optimizer=sgd"),
        (["optimizer.momentum=0.9"], "no meaning with optimizer=adamw"),
        (["optimizer.betas=[0.9,1.0]"], "at least 0 and below 1"),
        (["data=text"], "Try data=text data.path=/path/to/file."),
        (["data.path=/corpus"], "no meaning with data=stdlib. Try data=text."),
        (["data=tokens", "data.path=/x", "data.tokenizer=/y"], "no meaning with data=tokens"),
        (["tracking.entity=team"], "no meaning with tracking=csv"),
        (["checkpoint=/x"], "Try trainer.resume=/x, or mode=eval."),
        (["trainer.max_time=5m"], "Try trainer.max_time='00:01:00:00'."),
        (["trainer.max_steps=-1"], "never ends. Try trainer.max_epochs=1."),
        (["trainer.max_steps=0"], "trains nothing"),
        (["trainer.limit_val_batches=2.0"], "Try trainer.limit_val_batches=2."),
        (["trainer.val_check_interval=0.5"], "Try trainer.check_val_every_n_epoch=1."),
        (["experiment_name=../up"], "Try experiment_name=my_run."),
        (["model.dropout=1.5"], "at most 0.999"),
        (["schedule=zb_v", "schedule.split_backward=true"], "Remove schedule.split_backward."),
        (["trainer.gradient_clip_val=0"], "For none at all, try trainer.gradient_clip_val=null."),
        (["costs=uniform", "costs.forward=1e300"], "at most 1e+12"),
        (["costs=uniform", "costs.forward=[1,0]", "pp=2"], "a list of numbers, more than 0."),
        (["costs=uniform", "costs.p2p=[1]", "pp=4"], "Try costs.p2p=[1,1,1]."),
        (
            ["costs=uniform", "costs.forward=[1,1,2]", "pp=4"],
            "has 3 numbers, but pp=4: 4 are needed, one per rank. Try costs.forward=[1,1,2,2].",
        ),
    ],
)
def test_a_rule_between_keys_is_told_with_its_numbers_and_a_fix(overrides, message):
    with pytest.raises((PlanError, CostError), match=re.escape(message)) as error:
        _compose(*overrides)
    assert error.value.fix


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.global_batch_size=16", "dp=2", "num_microbatches=4", "data.microbatch_size=2"],
        ["data.global_batch_size=7", "dp=auto"],
        ["schedule=interleaved_1f1b", "pp=4", "schedule.group=6", "num_microbatches=8"],
        ["schedule=interleaved_1f1b", "pp=4", "schedule.group=8", "data.global_batch_size=8"],
        ["trainer.check_val_every_n_epoch=1", "trainer.val_check_interval=0.5"],
        ["mode=simulate", "costs=uniform", "costs.grad_reduce=8", "costs.num_buckets=4"],
        ["mode=eval", "checkpoint=/x"],
        ["tp=2", "sequence_parallel=true"],
        ["mode=simulate", "costs=uniform", "costs.forward=[1,2]", "costs.p2p=[3]", "pp=2"],
        ["mode=simulate", "costs=uniform", "tp=3"],
        ["experiment=fold_laptop", "experiment_name=mine"],
    ],
)
def test_what_fits_together_is_accepted(overrides):
    check(_compose(*overrides))


def test_a_chosen_experiment_names_the_run_unless_it_is_named():
    assert _compose("experiment=fold_laptop").experiment_name == "fold_laptop"
    assert _compose("experiment=fold_laptop", "experiment_name=a").experiment_name == "a"
    config = _compose("experiment=fold_laptop", "pp=2")
    assert (config.schedule.name, config.pp) == ("foldx_fifo", 2)


def test_the_schema_documents_its_model_as_a_partial_file_would_see_it(tmp_path: Path):
    assert from_dict({"model": {"name": "mine"}}).model == replace(ModelConfig(), name="mine")
