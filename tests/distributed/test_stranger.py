"""Who takes a rank's place and sends pickles is refused, and runs nothing."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from strategies.errors import PipelineError
from strategies.runtime.messages.exchange import everybody
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


class Bomb:
    """Its pickle makes a file."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.file,)


def _answers(tmp: str, rank: int) -> str:
    """Rank 1 is the stranger: it answers as torch's object collectives do."""
    bomb = Bomb(tmp + "/ran")
    try:
        if dist.get_rank() == rank:
            data = torch.frombuffer(bytearray(pickle.dumps(bomb)), dtype=torch.uint8)
            counts = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
            dist.all_gather(counts, torch.tensor(data.numel()))
            longest = max(int(count) for count in counts)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: data.numel()] = data
            dist.all_gather([torch.empty_like(padded) for _ in range(2)], padded)
            dist.broadcast(torch.tensor(data.numel()), src=rank)
            dist.broadcast(data, src=rank)
            return "stranger"
        found = []
        for call in (lambda x: x.everyone([1]), lambda x: x.says(None, source=rank)):
            try:
                call(everybody())
            except PipelineError as error:
                found.append(f"{type(error).__name__}: {error}")
        return "\n".join(found)
    finally:
        dist.barrier()


def _refused() -> list[str]:
    found = []
    own = object() if dist.get_rank() == 1 else {"a": torch.ones(2)}
    for call in (lambda x: x.everyone(own), lambda x: x.says(own, source=1)):
        try:
            call(everybody())
        except PipelineError as error:
            found.append(f"{type(error).__name__}: {error}")
    said = everybody().says(own, source=0)
    return [*found, str(said["a"].tolist())]


def test_a_pickle_that_a_stranger_sends_is_not_opened(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    answers = ranks(2).run(_answers, tmp=str(tmp_path), rank=1)
    lines = answers[0].splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("RunError: what another rank has sent is no message of this program")
        assert "another process has taken a rank's place" in line
    assert not (tmp_path / "ran").exists()


def test_what_one_rank_cannot_say_all_ranks_refuse(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(_refused)
    assert first[2] == "[1.0, 1.0]"
    for said in (*first[:2], *second[:1]):
        assert said.startswith("ModelError: a builtins.object cannot be sent to the other ranks")
