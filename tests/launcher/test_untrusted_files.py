"""Files named on the command line that are pipes, devices, endless or nested without end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forgery import reseal, write_bare
from tests.launcher.command_line import refused_here
from tests.launcher.runs import MODEL


def pipe(file: Path) -> None:
    os.mkfifo(file)


def device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def folder(file: Path) -> None:
    file.mkdir()


def deep(file: Path) -> None:
    file.write_bytes(b"[" * 200_000)


def deep_objects(file: Path) -> None:
    file.write_bytes(b'{"a":' * 40_000)


def endless(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(1 << 40)


def binary(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\0\1")


def gone(file: Path) -> None:
    file.symlink_to("nowhere")


def looped(file: Path) -> None:
    file.symlink_to(file)


LIES = (
    pipe, device, deep, looped,
    *(pytest.param(lie, marks=pytest.mark.full)
      for lie in (folder, deep_objects, endless, binary, gone)),
)  # fmt: skip


def words_for(kind: str, folder: Path) -> tuple[list[str], Path]:
    """A request that reads one file, and which."""
    if kind == "option":
        (folder / "cfg/model").mkdir(parents=True)
        return ["--config-dir", str(folder / "cfg"), "model=mine"], folder / "cfg/model/mine.yaml"
    if kind == "hardware":
        (folder / "cfg/hardware").mkdir(parents=True)
        words = ["--config-dir", str(folder / "cfg"), "hardware=mine"]
        return words, folder / "cfg/hardware/mine.yaml"
    if kind == "costs":
        return [
            *MODEL,
            "costs=profiled",
            "costs.file=p.json",
            "costs.name=profiled",
        ], folder / "p.json"
    if kind == "hf":
        (folder / "hf").mkdir()
        return ["model=hf", f"model.path={folder / 'hf'}"], folder / "hf/config.json"
    if kind == "schedule":
        return [*MODEL, "schedule=custom", "schedule.file=s.csv", "pp=2"], folder / "s.csv"
    if kind == "tokenizer":
        (folder / "t.txt").write_text("abc" * 1000)
        words = ["data=text", "data.path=t.txt", "data.tokenizer=t.json", "model.vocab=null"]
        return [*MODEL, *words], folder / "t.json"
    if kind == "tokens":
        return [
            *MODEL,
            "data=tokens",
            "data.path=ids.bin",
            "data.max_bytes=null",
        ], folder / "ids.bin"
    path = write_bare(folder / "a.ckpt", {"experiment_name": "default"})
    return [*MODEL, f"trainer.resume={path}"], path / kind


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], str]:
    return lambda words: refused_here([*words, "mode=validate"], tmp_path, monkeypatch, limit_s=6)


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("kind", [
    "option", "hardware", "costs", "hf", "schedule", "tokenizer", "manifest.json", "tensors.json",
    "values.json", "rank_00000.json",
])  # fmt: skip
def test_a_file_that_lies_is_one_message_and_at_once(
    kind: str, lie: Callable[[Path], None], tmp_path: Path, refused: Callable[[list[str]], str]
) -> None:
    words, file = words_for(kind, tmp_path)
    file.unlink(missing_ok=True)
    lie(file)
    assert len(refused(words)) < 1000


@pytest.mark.parametrize("lie", [pipe, device, folder, gone, looped])
def test_a_file_of_ids_that_lies(
    lie: Callable[[Path], None], tmp_path: Path, refused: Callable[[list[str]], str]
) -> None:
    words, file = words_for("tokens", tmp_path)
    lie(file)
    assert f"data.path={file}" in refused(words)


@pytest.mark.parametrize("value", [0, "1", None, 10**9])
def test_a_sealed_manifest_with_wrong_degrees(
    value: object, tmp_path: Path, refused: Callable[[list[str]], str]
) -> None:
    path = write_bare(tmp_path / "a.ckpt", {"experiment_name": "default"})
    reseal(path, lambda content: content.update(dp=value))
    assert f"dp={value!r} must be a whole number from 1" in refused(
        [*MODEL, f"trainer.resume={path}"]
    )


@pytest.mark.parametrize("name", ["x" * 300, "d/" * 3000, "'~nobody-of-this-name/a'"])
@pytest.mark.parametrize("words", [
    ["trainer.resume={}"], ["data=text", "data.path={}"],
    ["data=text", "data.path=t.txt", "data.tokenizer={}"],
    ["schedule=custom", "pp=2", "schedule.file={}"], ["costs=profiled", "costs.file={}"],
    ["model=hf", "model.path={}"],
], ids=lambda words: words[-1])  # fmt: skip
def test_a_name_that_no_file_can_have(
    name: str, words: list[str], tmp_path: Path, refused: Callable[[list[str]], str]
) -> None:
    (tmp_path / "t.txt").write_text("abc" * 1000)
    refused([*(() if "model=hf" in words else MODEL), *(word.format(name) for word in words)])
