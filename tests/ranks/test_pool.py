"""A rank that refuses leaves the ranks usable; only one that dies or hangs is replaced."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import sys
import time
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from strategies.errors import DamagedCheckpointError, PlanError
from tests.ranks import pool

pytestmark = pytest.mark.distributed


class OddError(Exception):
    """One that cannot be made from its arguments."""

    def __init__(self, number: int, *, why: str) -> None:
        super().__init__(f"{number} for {why}")


def act(kinds: list[str]) -> tuple[int, float]:
    """What this rank's word says; then all add up."""
    kind = kinds[dist.get_rank()]
    if kind == "refuse":
        raise PlanError("pp=3 is odd. Try pp=2.")
    if kind == "damaged":
        raise DamagedCheckpointError("damaged")
    if kind == "odd":
        raise OddError(3, why="nothing")
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(1000)
    value = torch.ones(1)
    dist.all_reduce(value)
    return os.getpid(), float(value)


def test_a_refusal_of_one_rank_has_its_type_and_releases_the_other(ranks: Any) -> None:
    before = ranks(2).run(act, kinds=["go", "go"])
    for kinds in (["refuse", "go"], ["go", "refuse"]):
        began = time.monotonic()
        with pytest.raises(PlanError, match=r"^pp=3 is odd\. Try pp=2\.$") as refused:
            ranks(2).run(act, kinds=kinds)
        assert f"rank {kinds.index('refuse')}\nTraceback" in str(refused.value.__cause__)
        assert time.monotonic() - began < pool._DEADLINE_S / 2  # not after a time-out
        assert ranks(2).run(act, kinds=["go", "go"]) == before
    assert [value for _, value in before] == [2.0, 2.0]


def test_refusals_of_all_ranks_are_values(ranks: Any) -> None:
    before = ranks(2).run(act, kinds=["go", "go"])
    found = ranks(2).refusals(act, kinds=["refuse", "damaged"])
    assert [type(error) for error in found] == [PlanError, DamagedCheckpointError]
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] of 2 raise nothing"):
        ranks(2).refusals(act, kinds=["go", "go"])
    with pytest.raises(RuntimeError, match=r"^OddError: 3 for nothing$"):
        ranks(2).run(act, kinds=["odd", "odd"])
    assert ranks(2).run(act, kinds=["go", "go"]) == before


@pytest.mark.parametrize("kind", ["die", "hang"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_or_hangs_is_replaced_alone(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, kind: str, rank: int
) -> None:
    monkeypatch.setattr(pool, "_RELEASED_S", 0.5)
    before = ranks(2).run(act, kinds=["go", "go"])
    kinds = ["refuse", "refuse"]
    kinds[rank] = kind
    errors = ranks(2).refusals(act, kinds=kinds)
    assert [type(error) for error in errors] == [
        AssertionError if kind == mine else PlanError for mine in kinds
    ]
    after = ranks(2).run(act, kinds=["go", "go"])
    assert [value for _, value in after] == [2.0, 2.0]
    assert after[1 - rank] == before[1 - rank]
    assert after[rank] != before[rank]


def received(value: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The tensor, and the folder that this rank has made for listeners."""
    process: Any = multiprocessing.current_process()
    return value.bfloat16(), process._config.get("tempdir")


def test_tensors_are_sent_by_value_and_leave_no_folder(ranks: Any) -> None:
    for _ in range(2):  # A folder is made while the first answer is sent.
        ((value, folder),) = ranks(1).run(received, value=torch.arange(3.0))
    assert torch.equal(value, torch.tensor([0, 1, 2], dtype=torch.bfloat16))
    assert folder is None


def test_a_function_of_the_running_command_is_found_by_its_modules_name(ranks, monkeypatch):
    command = ModuleType("__main__")  # as `python -m tests.ranks.test_pool` has it
    command.__spec__ = importlib.util.find_spec("tests.ranks.test_pool")
    monkeypatch.setitem(sys.modules, "__main__", command)
    monkeypatch.setattr(act, "__module__", "__main__")
    assert [total for _, total in ranks(2).run(act, kinds=["", ""])] == [2.0, 2.0]
