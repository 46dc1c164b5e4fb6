"""Checkpoints changed anywhere and sealed again: each loads, or is one message; never more."""

from __future__ import annotations

import copy
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strategies.errors import CheckpointError
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.storage.commit import Saver
from tests.faults.results import record
from tests.forgery import reseal, rewrite
from tests.strategies.runtime.storage.saving import load, save

VALUES: list[Any] = [
    None, True, 0, 1, -1, 7, 2**31, 2**63, 10**30, 0.5, float("nan"), "", "1", "x" * 2000, "../x",
    "/etc/passwd", "\0", "\u202e", [], [0], [[]], [None], {}, {"a": 1}, "float32", "int7", "model:",
]  # fmt: skip
NAMES = ("manifest.json", "tensors.json", "values.json", "rank_00000.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "step-1.ckpt"
    save(Saver(Exchange(None)), path, 1, size=7)
    return path


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with each of its keys."""
    if isinstance(node, dict | list):
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            yield node, key
            yield from places(node[key])


def mutate(draw: random.Random, content: Any) -> Any:
    """The same content with one to three of its values changed, gone, or somewhere else."""
    for _ in range(draw.randint(1, 3)):
        found = list(places(content))
        if not found or draw.random() < 0.03:
            return draw.choice(VALUES)
        node, key = draw.choice(found)
        kind = draw.random()
        if kind < 0.6:
            node[key] = copy.deepcopy(draw.choice(VALUES))
        elif kind < 0.75:
            del node[key]
        elif kind < 0.9:
            other, there = draw.choice(found)
            node[key] = copy.deepcopy(other[there])
        elif isinstance(node, dict):
            node[draw.choice(["", "x", "model:x", "optimizer.0.exp_avg:y", "pp"])] = node.pop(key)
        else:
            node.append(copy.deepcopy(node[key]))
    return content


def judge(count: int, seed: int, whole: Path, folder: Path) -> tuple[int, float, list[str]]:
    """How many were refused, the longest time for one, and what ended otherwise."""
    draw, refused, worst, wrong = random.Random(seed), 0, 0.0, []
    for number in range(count):
        path = folder / "step-1.ckpt"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole, path)
        name = draw.choice(NAMES)
        begin = time.monotonic()
        try:
            if name == "manifest.json":
                reseal(path, lambda content: mutate(draw, content))
            else:
                rewrite(path, name, lambda content: mutate(draw, content))
            load(path, size=7)
        except CheckpointError as error:
            refused += 1
            if str(path) not in str(error) or len(str(error)) > 1000:
                wrong.append(f"{number} {name}: {str(error)[:200]}")
        except BaseException as error:
            wrong.append(f"{number} {name}: {error!r}")
        worst = max(worst, time.monotonic() - begin)
    return refused, worst, wrong


def test_60_mutated_checkpoints(whole: Path, tmp_path: Path) -> None:
    refused, _, wrong = judge(60, 5, whole, tmp_path)
    assert wrong == []
    assert 30 < refused < 60


@pytest.mark.faults
def test_1000_mutated_checkpoints(whole: Path, tmp_path: Path) -> None:
    refused, worst, wrong = judge(1000, 8, whole, tmp_path)
    record(5, "changed anywhere and sealed again", 1000 - len(wrong), 1000, worst)
    assert wrong == []
    assert 500 < refused < 1000
