"""Checkpoints that somebody has made and sealed: wrong in type, size or structure."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strategies.errors import CheckpointError
from strategies.manifest import read_manifest
from strategies.runtime.lightning.checkpoints import stock_file
from strategies.runtime.lightning.checkpoints.checkpointing_strategy import load_state_dict
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.storage.commit import Saver
from tests.forgery import reseal, rewrite
from tests.strategies.runtime.storage.saving import load, save, step_in


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "step-1.ckpt"
    save(Saver(Exchange(None)), path, 1, size=7)
    return path


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "step-1.ckpt"
    shutil.copytree(whole, copy)
    return copy


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        load(path, size=7)
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) < 700
    return str(raised.value)


def test_what_is_sealed_again_still_loads(path: Path) -> None:
    assert step_in(reseal(path), size=7) == 1


def put(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.__setitem__(name, value)


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "files null": (put("files", None), "must be objects"),
    "files a list": (put("files", []), "must be objects"),
    "no files": (lambda c: c.pop("files"), "must be objects"),
    "none named": (put("files", {}), "does not name tensors.json"),
    "entry null": (lambda c: c["files"].update(x=None), "files.'x' has no SHA-256"),
    "bytes a word": (lambda c: c["files"]["tensors.json"].update(bytes="many"), "bytes='many'"),
    "bytes true": (lambda c: c["files"]["tensors.json"].update(bytes=True), "bytes=True"),
    "bytes below 0": (lambda c: c["files"]["tensors.json"].update(bytes=-1), "bytes=-1"),
    "bytes 10^30": (lambda c: c["files"]["tensors.json"].update(bytes=10**30), "bytes=1000"),
    "hash a number": (lambda c: c["files"]["tensors.json"].update(sha256=3), "has no SHA-256"),
    "above": (lambda c: c["files"].update({"../x": c["files"]["tensors.json"]}), "'../x'"),
    "absolute": (lambda c: c["files"].update({"/etc/passwd": {}}), "no name of a file"),
    "null byte": (lambda c: c["files"].update({"a\0b": {}}), "no name of a file"),
    "itself": (lambda c: c["files"].update({"manifest.json": {}}), "no name of a file"),
    "no index": (lambda c: c["files"].pop("tensors.json"), "does not name tensors.json"),
    "no values": (lambda c: c["files"].pop("values.json"), "does not name values.json"),
    "no tree": (lambda c: c["files"].pop("rank_00000.json"), "does not name rank_00000.json"),
    "no pp": (lambda c: c.pop("pp"), "pp=None must be"),
    "dp 0": (put("dp", 0), "dp=0 must be"),
    "tp a text": (put("tp", "1"), "tp='1' must be"),
    "a world too large": (put("world_size", 10**9), "world_size=1000000000 must be"),
    "more ranks than files": (put("world_size", 3), "does not name rank_00001.json"),
    "metadata a list": (put("metadata", []), "must be objects"),
    "step a text": (lambda c: c["metadata"].update(step="1"), "metadata.step='1'"),
    "parameters": (lambda c: c["metadata"].update(parameters=[1]), "metadata.parameters=[1]"),
    "name a number": (lambda c: c["metadata"].update(experiment_name=1), "experiment_name=1"),
    "begun never": (lambda c: c["metadata"].update(begun=float("nan")), "metadata.begun=nan"),
    "format a list": (put("format", [2]), "has format [2]"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_is_held_against_its_types(case: str, path: Path) -> None:
    change, reason = MANIFESTS[case]
    reseal(path, change)
    assert reason in refusal(path)
    with pytest.raises(CheckpointError):
        read_manifest(path)


def box(index: int, value: object) -> Callable[[dict[str, Any]], None]:
    """Changes [file, key, offsets, sizes] of one tensor's only piece."""
    return lambda content: content["model:a.weight"][2][0].__setitem__(index, value)


INDICES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a list": (lambda c: [1], "must be an object"),
    "a number": (lambda c: c.__setitem__("model:a.weight", 3), "is no [type, shape, pieces]"),
    "no such type": (lambda c: c["model:a.weight"].__setitem__(0, "F31"), "no such type"),
    "type a list": (lambda c: c["model:a.weight"].__setitem__(0, ["F32"]), "model:a.weight"),
    "another type": (lambda c: c["model:a.weight"].__setitem__(0, "I32"), "is F32 there"),
    "shape below 0": (lambda c: c["model:a.weight"].__setitem__(1, [-7, -3]), "no such type"),
    "shape a text": (lambda c: c["model:a.weight"].__setitem__(1, "73"), "no such type"),
    "larger": (lambda c: c["model:a.weight"].__setitem__(1, [70, 30]), "21 of 2,100 elements"),
    "10^16 elements": (
        lambda c: c.__setitem__(
            "model:a.weight",
            ["F32", [10**16], [["rank_00000.safetensors", "model:a.weight", [0], [10**16]]]],
        ),
        "finds 40,000,000,000",
    ),
    "10^40 elements": (lambda c: c["model:a.weight"].__setitem__(1, [10**40]), "no such type"),
    "above": (box(0, "../../outside.safetensors"), "which the manifest does not name"),
    "absolute": (box(0, "/outside.safetensors"), "which the manifest does not name"),
    "not named": (box(0, "other.safetensors"), "which the manifest does not name"),
    "no tensors": (box(0, "values.json"), "which the manifest does not name"),
    "file a number": (box(0, 3), "model:a.weight"),
    "no such key": (box(1, "model:none"), "cannot be read"),
    "another's key": (box(1, "model:a.bias"), "cannot be read"),
    "key a number": (box(1, 3), "outside of its shape"),
    "outside": (box(2, [1, 0]), "outside of its shape"),
    "another dimension": (box(3, [21]), "is no [type, shape, pieces]"),
    "no pieces": (lambda c: c["model:a.weight"].__setitem__(2, []), "0 of 21 elements"),
    "twice": (
        lambda c: c["model:a.weight"][2].append(c["model:a.weight"][2][0]), "42 of 21 elements"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", INDICES)
def test_an_index_is_held_against_the_files_it_names(case: str, path: Path) -> None:
    change, reason = INDICES[case]
    (path.parents[1] / "outside.safetensors").write_bytes(
        (path / "rank_00000.safetensors").read_bytes()
    )
    assert reason in refusal(rewrite(path, "tensors.json", change))
    with pytest.raises(CheckpointError):
        load_state_dict(path)


TREES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "values a list": ("values.json", lambda c: []),
    "tree a list": ("rank_00000.json", lambda c: [1]),
    "tree a number": ("rank_00000.json", lambda c: 1),
    "step a text": ("rank_00000.json", lambda c: c.update(global_step="x")),
    "loops a number": ("rank_00000.json", lambda c: c.update(loops=5)),
    "callbacks a list": ("rank_00000.json", lambda c: c.update(callbacks=[])),
    "no optimizer": ("rank_00000.json", lambda c: c.update(optimizer_states=[])),
    "optimizers a text": ("rank_00000.json", lambda c: c.update(optimizer_states="x")),
    "unknown kind": ("rank_00000.json", lambda c: c.update(a={"__kind__": "os.system"})),
    "kind without value": ("rank_00000.json", lambda c: c.update(a={"__kind__": "tuple"})),
    "bytes of no digits": (
        "rank_00000.json", lambda c: c.update(a={"__kind__": "bytes", "value": "zz"})
    ),
    "a list as key": (
        "rank_00000.json", lambda c: c.update(a={"__kind__": "dict", "value": [[[1], 2]]})
    ),
    "value of no optimizer": ("values.json", lambda c: c.update({"optimizer.x.y:a.bias": 1})),
    "value of the seventh": ("values.json", lambda c: c.update({"optimizer.7.y:a.bias": 1})),
}  # fmt: skip


@pytest.mark.parametrize("case", TREES)
def test_a_state_is_held_against_what_training_writes(case: str, path: Path) -> None:
    name, change = TREES[case]
    refusal(rewrite(path, name, change))


@pytest.mark.parametrize("name", [
    "manifest.json", "tensors.json", "values.json", "rank_00000.json", "rank_00000.safetensors",
])  # fmt: skip
@pytest.mark.parametrize("kind", ["pipe", "device", "outside", "folder", "deep", "endless"])
def test_files_that_are_something_else_are_never_waited_for(
    name: str, kind: str, path: Path
) -> None:
    file = path / name
    data = file.read_bytes()
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "outside":
        (path.parent / "moved").write_bytes(data)
        file.symlink_to(path.parent / "moved")
    elif kind == "folder":
        file.mkdir()
    elif kind == "deep":
        file.write_bytes(b"[" * 100_000)
        if name != "manifest.json":
            reseal(path)
    else:
        with file.open("wb") as stream:
            stream.truncate(1 << 40)
    if kind == "outside" and name == "manifest.json":
        assert step_in(path, size=7) == 1  # nobody has hashed it but itself
    else:
        assert name in refusal(path)


class _Own:
    pass


FILES: dict[str, object] = {
    "a list": [1],
    "no state": {"epoch": 1},
    "state a list": {"state_dict": []},
    "loops a number": {"state_dict": {}, "loops": 5},
    "callbacks a list": {"state_dict": {}, "callbacks": []},
    "an object": {"state_dict": {}, "hyper_parameters": {"a": _Own()}},
    "no zip": b"PK\3\4" + b"x" * 100,
    "nothing": b"",
    "pickled by hand": b"\x80\x02." + b"0" * 100,
    "a reference to nothing": b"\x80\x02h\x07.",
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_as_of_lightning_that_is_none_is_one_message(case: str, tmp_path: Path) -> None:
    path, content = tmp_path / "a.ckpt", FILES[case]
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        stock_file.read(path)
