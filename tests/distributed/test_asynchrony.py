"""A reduction that waits inside its call is an error, not a slow run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from strategies.errors import PlanError
from strategies.runtime.update.reduction import (
    Reduction,
    check_asynchronous,
    start_all_reduce,
    start_reduce_scatter,
)
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


def ask(*, sharded: bool) -> None:
    group = dist.new_group()
    start = start_reduce_scatter if sharded else start_all_reduce
    check_asynchronous(
        group, range(dist.get_world_size()), lambda probe: start(probe, group), torch.device("cpu")
    )
    dist.destroy_process_group(group)


@pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_gloo_goes_on_by_itself(sharded: bool, ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(ask, sharded=sharded)


def ask_one_that_waits() -> str | None:
    group = dist.new_group()
    world = dist.get_world_size()

    def start(probe: Tensor) -> Reduction:
        started = start_all_reduce(probe, group)
        started.work.wait()
        return started

    message = None
    try:
        check_asynchronous(group, range(world), start, torch.device("cpu"), patience_s=0.5)
    except PlanError as error:
        message = str(error)
        start(torch.zeros(world))  # The others are still waiting for this one.
    dist.destroy_process_group(group)
    return message


def test_one_that_waits_is_refused_by_the_member_it_waits_for(
    ranks: Callable[[int], Ranks],
) -> None:
    first, last = ranks(2).run(ask_one_that_waits)
    assert first is None
    assert "instead of under it" in last and "overlap=none" in last
