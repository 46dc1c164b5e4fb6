"""mode=eval and its like take model and data from the checkpoint; what is typed wins."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from launcher.compose.session import compose_checked, hydra_session
from launcher.config import LaunchConfig, from_dict
from launcher.config.checkpoint_keys import compared, kept_keys
from launcher.config.key import Args
from tests.forgery import write_bare
from tests.launcher.command_line import launch_here, run_here

MODEL: dict[str, Any] = {
    "name": "llama2_7b", "layers": 4, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 32,
    "sequence": 48,
}  # fmt: skip
DATA: dict[str, Any] = {"name": "text", "path": "/data/corpus.txt", "max_bytes": 200_000}
OWN: dict[str, Any] = {"name": "class", "path": "nets.py:Net", "args": {"width": 8, "deep": True}}


def written(model: dict[str, Any] = MODEL, data: dict[str, Any] = DATA) -> dict[str, Any]:
    return {"model": model, "data": data}


def checkpoint_of(folder: Path, config: dict[str, Any] | None, **more: Any) -> Path:
    """``config``: what it says of model and data; None of an earlier version's."""
    known = {} if config is None else {"config": kept_keys(from_dict(config))}
    return write_bare(folder, {"experiment_name": "default", **known, **more})


@pytest.fixture
def used(tmp_path, monkeypatch):
    """`used(config, *words)`: the configuration of a run that uses a checkpoint with that."""

    def run(config: dict[str, Any] | None, *words: str) -> LaunchConfig:
        path = tmp_path / "outputs" / "r" / "checkpoints" / "step-00000001.ckpt"
        checkpoint_of(path, config)
        monkeypatch.chdir(tmp_path)
        with hydra_session():
            return compose_checked(words)[0]

    return run


@pytest.mark.parametrize("mode", ["predict", "generate", "export"])
def test_all_of_model_and_data_is_the_checkpoints(used, mode):
    asked = from_dict(written())
    assert used(written(), f"mode={mode}").model == asked.model


def test_the_newest_of_an_experiment_serves_too(used):
    found, asked = used(written(), "mode=eval", "checkpoint=auto", "pp=4"), from_dict(written())
    assert (found.model, found.data) == (asked.model, asked.data)


def test_how_batches_are_made_is_each_runs_own(used):
    data = {**DATA, "microbatch_size": 3, "global_batch_size": 12, "num_workers": 2}
    found = used(written(data=data), "mode=eval").data
    default = LaunchConfig().data
    for name in ("microbatch_size", "global_batch_size", "num_workers"):
        assert getattr(found, name) == getattr(default, name)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["model.sequence=128"], "model.sequence", 128),  # the default, and typed
        (["++model.sequence=128"], "model.sequence", 128),
        (["model=tiny"], "model.sequence", 128),
        (["model=small"], "model.layers", 12),
        (["data=stdlib"], "data.name", "stdlib"),
        (["data.max_bytes=5000"], "data.path", "/data/corpus.txt"),
        (["model=tiny", "data.max_bytes=5000"], "data.max_bytes", 5000),
    ],
    ids=lambda value: str(value),
)
def test_what_is_typed_wins(used, words, key, value):
    group, name = key.split(".")
    found = getattr(getattr(used(written(), "mode=eval", *words), group), name)
    assert found == value


def test_a_file_of_the_users_wins(used, tmp_path):
    (tmp_path / "cfg" / "experiment").mkdir(parents=True)
    file = tmp_path / "cfg" / "experiment" / "mine.yaml"
    file.write_text("# @package _global_\nexperiment_name: default\nmodel: {sequence: 64}\n")
    place = f"hydra.searchpath=[file://{tmp_path / 'cfg'}]"
    words = (place, "experiment=mine", "mode=eval")
    found = used(written(), *words).model
    assert (found.sequence, found.layers) == (64, 4)


def test_a_class_is_named_by_the_checkpoint_and_not_run(used):
    found = used(written(OWN, OWN), "mode=eval")
    assert (found.model.name, found.model.path, found.model.args) == ("class", None, Args())
    assert (found.data.name, found.data.path) == ("class", None)


def test_arguments_of_a_class_that_is_typed_are_the_checkpoints(used):
    words = ("mode=eval", "model.path=nets.py:Net", "model.args.width=16", "data.path=other:Net")
    found = used(written(OWN, OWN), *words)
    assert found.model.args.plain() == {"width": 16, "deep": True}
    assert found.data.args.plain() == {}  # of another class


def test_a_folder_of_transformers_is_the_checkpoints(used, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # as the training had it: relative
    found = used(written({"name": "hf", "path": "my_llama", "sequence": 32}), "mode=export").model
    assert (found.name, found.path, found.sequence) == ("hf", str(tmp_path / "my_llama"), 32)


def test_a_training_takes_nothing_from_a_checkpoint(used):
    found = used(written(), "trainer.resume=auto").model
    assert (found.name, found.layers, found.sequence) == ("tiny", 6, 128)


def test_each_job_of_a_sweep_takes_its_own(tmp_path, monkeypatch):
    other = {**MODEL, "layers": 8}
    one = checkpoint_of(tmp_path / "a.ckpt", written(data={}))
    two = checkpoint_of(tmp_path / "b.ckpt", written(other, data={}))
    done = run_here(("-m", "mode=eval", f"checkpoint={one},{two}", "pp=3"), tmp_path, monkeypatch)
    assert done.code == 0, done.errors
    assert [call.config.model.layers for call in done.calls] == [4, 8]


def lines(words: dict[str, Any], path: Path, mode: str = "eval") -> list[str]:
    return list(compared(from_dict({"mode": mode, **words}), path))


def test_what_differs_is_told_key_by_key(tmp_path):
    path = checkpoint_of(tmp_path / "a.ckpt", written(data={"name": "stdlib"}))
    same = "as in the checkpoint: model.name=llama2_7b model.layers=4 model.hidden=16 "
    same += "model.heads=2 model.kv_heads=2 model.ffn=32"
    other = {"model": {**MODEL, "sequence": 16}, "data": {"name": "stdlib", "tokenizer": "/t"}}
    assert lines(other, path) == [
        same,
        "note: model.sequence=16 here, 48 in the checkpoint",
        "note: data.tokenizer=/t here, null in the checkpoint",
    ]
    assert lines(other, path, "train") == lines(other, path)[1:]
    assert lines(written(data={"name": "stdlib"}), path) == [f"{same} model.sequence=48"]


def test_arguments_that_differ_are_told_one_by_one(tmp_path):
    path = checkpoint_of(tmp_path / "a.ckpt", written(OWN))
    args = {"width": 16, "new": 1}
    assert sorted(lines(written({**OWN, "args": args}), path)[1:]) == [
        "note: model.args.deep=the default here, true in the checkpoint",
        "note: model.args.new=1 here, the default in the checkpoint",
        "note: model.args.width=16 here, 8 in the checkpoint",
    ]


def test_a_file_of_ours_says_it_and_others_are_told(tmp_path):
    ours, theirs = tmp_path / "ours.ckpt", tmp_path / "theirs.ckpt"
    record = json.dumps(kept_keys(from_dict(written())))
    for path, name in ((ours, "foldpipe.json"), (theirs, "data.pkl")):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"archive/{name}", record)
    assert lines(written(), ours)[0].startswith("as in the checkpoint: model.name=llama2_7b ")
    assert lines({}, theirs) == [
        "note: theirs.ckpt does not say its model and data. Used are model=tiny data=stdlib with "
        "the keys of this command"
    ]
    assert lines({}, theirs, "train") == []


@pytest.mark.parametrize(
    "config", [{"model": {"layers": "many"}}, {"model": {"warp": 9}}, {"x": 1}]
)
def test_what_no_key_can_be_is_refused(config, tmp_path, monkeypatch):
    path = write_bare(tmp_path / "a.ckpt", {"config": config})
    done = launch_here(("mode=eval", f"checkpoint={path}"), tmp_path)
    assert (done.code, done.output) == (2, "")
    assert done.errors.startswith(f"error: {path}: what it says of its model and data is not for")


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path):
    done = launch_here(("mode=eval", "checkpoint=typo.ckpt"), tmp_path)
    assert done.code == 2
    assert done.errors.startswith(f"error: {tmp_path}/typo.ckpt is no checkpoint: nothing is there")
