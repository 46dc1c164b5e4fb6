"""Whatever byte of a checkpoint changes: it is named, with both hashes, and nothing is loaded."""

from __future__ import annotations

import doctest
import json
import random
import shutil
from pathlib import Path

import pytest

from strategies import manifest
from strategies.errors import CheckpointError
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.storage.commit import Saver
from tests.strategies.runtime.storage.saving import load, save, step_in


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "step-1.ckpt"
    save(Saver(Exchange(None)), path, 1, size=7)
    assert step_in(path, size=7) == 1
    return path


def damage(data: bytearray, chance: random.Random) -> None:
    """One of: a flipped bit, a zeroed stretch, a cut end."""
    place = chance.randrange(len(data))
    kind = chance.randrange(3)
    if kind == 0:
        data[place] ^= 1 << chance.randrange(8)
    elif kind == 1:
        end = min(len(data), place + chance.randint(1, 64))
        data[place:end] = bytes(end - place)
    else:
        del data[place:]


def damaged(whole: Path, folder: Path, times: int) -> None:
    chance = random.Random(1)
    names = sorted(file.name for file in whole.iterdir())
    found = 0
    while found < times:
        name = names[found % len(names)]
        path = folder / "step-1.ckpt"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole, path)
        before = (path / name).read_bytes()
        data = bytearray(before)
        damage(data, chance)
        if data == before:
            continue  # zeroes written over zeroes
        (path / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=f"{name} is damaged") as raised:
            load(path, size=7)
        if name != "manifest.json":
            expected = json.loads((path / "manifest.json").read_text())["files"][name]["sha256"]
            assert f"expected SHA-256 {expected}" in str(raised.value)
            assert f"found {manifest.file_hash(path / name)}" in str(raised.value)
        found += 1


def test_it_is_found(whole: Path, tmp_path: Path) -> None:
    damaged(whole, tmp_path, 100)


@pytest.mark.faults
def test_it_is_always_found(whole: Path, tmp_path: Path) -> None:
    damaged(whole, tmp_path, 3000)


def test_a_missing_file_is_named(whole: Path, tmp_path: Path) -> None:
    for file in sorted(whole.iterdir()):
        path = tmp_path / file.name
        shutil.copytree(whole, path)
        (path / file.name).unlink()
        with pytest.raises(CheckpointError, match=file.name) as raised:
            load(path, size=7)
        if file.name != "manifest.json":
            assert "found no file of 0 bytes" in str(raised.value)
            assert manifest.find_misfit(path, manifest.read_manifest(path)) is not None


def test_another_format_is_refused_with_both_numbers(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    shutil.copytree(whole, path)
    (path / "manifest.json").write_text(json.dumps({"format": 1, "metadata": {}, "files": {}}))
    with pytest.raises(CheckpointError, match="has format 1, and this version reads 2"):
        load(path, size=7)


def test_every_shape_that_differs_is_named(whole: Path) -> None:
    with pytest.raises(CheckpointError, match="of another model") as raised:
        load(whole, size=8)
    assert "a.weight is [7, 3] there and [8, 3] here" in str(raised.value)
    assert "a.bias is [7] there and [8] here" in str(raised.value)


def test_the_example_holds() -> None:
    assert doctest.testmod(manifest) == (0, 1)
