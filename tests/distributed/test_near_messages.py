"""Ranks of one machine train with shared memory as they do with gloo, alone and mixed with it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from strategies.runtime.messages import shared_memory, transport
from strategies.runtime.messages.mesh import Communicators, Coordinates
from strategies.runtime.messages.shared_memory import Channel
from strategies.runtime.messages.transport import SharedTransport
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, small_shape, train

pytestmark = pytest.mark.distributed


def loops() -> int:
    """Threads of this process that look after gloo's sockets."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("gloo_tcp_loop")


def train_noting_channels(case: Case, hosts: tuple[int, ...] | None = None) -> dict[str, Any]:
    """``train``, and whom this rank reaches by shared memory; ``hosts``: by rank, where it is."""
    found: list[SharedTransport] = []
    looking: list[int] = []
    place = None if hosts is None else [socket.gethostname(), hosts[dist.get_rank()], 0, 0]
    opened = SharedTransport.__init__

    def noted(self: SharedTransport, *arguments: Any, **options: Any) -> None:
        opened(self, *arguments, **options)
        found.append(self)
        looking.append(loops())

    with mock.patch.object(SharedTransport, "__init__", noted):
        if place is None:
            result = train(case=case)
        else:
            with mock.patch.object(shared_memory, "_place", lambda: place):
                result = train(case=case)
    return {**result, "near": [sorted(each._near) for each in found], "loops": looking}


SHAPE = small_shape(layers=2, hidden=16, heads=4, kv_heads=4, ffn=12)
CASES = {
    "1f1b": Case("1f1b", pp=2, dp=2, steps=4),
    "two stages each": Case("interleaved_1f1b", pp=4, steps=4),
    "recomputed": Case("zb_v", pp=4, steps=4, accumulation=2, short_last=True),
    "sliced": Case("1f1b", pp=2, tp=2, steps=3, shape=SHAPE),
}
EVERY_DAY = ("1f1b",)  # "recomputed" is compared below, with a thread that copies.


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name in EVERY_DAY else pytest.mark.full)
        for name, case in CASES.items()
    ],
)
def test_losses_and_weights_are_those_of_gloo_to_the_last_bit(
    ranks: Callable[[int], Ranks], case: Case
) -> None:
    gloo = ranks(4).run(train_noting_channels, case=replace(case, backend="gloo"))
    shared = ranks(4).run(train_noting_channels, case=case)
    for one, other in zip(gloo, shared, strict=True):
        assert one["near"] == []
        others = [rank for rank in range(case.pp) if rank != other["pp_rank"]]
        assert other["near"] == [others]
        assert one["losses"] == other["losses"]
        assert one["bytes_sent"] == other["bytes_sent"]
        assert one["parameters"].keys() == other["parameters"].keys()
        for name, value in one["parameters"].items():
            assert torch.equal(value, other["parameters"][name])


def train_while_a_thread_copies(case: Case) -> dict[str, Any]:
    """``train_noting_channels`` where no message is too small, and how many a thread has copied."""
    opened, sent = SharedTransport.__init__, Channel.send_later
    apart: list[Any] = []

    def with_cores(self: SharedTransport, *arguments: Any, **options: Any) -> None:
        opened(self, *arguments, **options)
        self.copies = True

    def counted(self: Channel, tensor: torch.Tensor, tag: int) -> Callable[[], None]:
        fill = sent(self, tensor, tag)

        def elsewhere() -> None:
            apart.append(threading.current_thread().name)
            fill()

        return elsewhere

    with (
        mock.patch.object(transport, "_WORTH_A_THREAD", 0),
        mock.patch.object(SharedTransport, "__init__", with_cores),
        mock.patch.object(Channel, "send_later", counted),
    ):
        return {**train_noting_channels(case), "apart": apart}


@pytest.mark.parametrize(
    "case",
    [pytest.param(CASES["two stages each"], marks=pytest.mark.full), CASES["recomputed"]],
)
def test_a_rank_that_goes_on_computing_lets_a_thread_copy(
    ranks: Callable[[int], Ranks], case: Case
) -> None:
    alone = ranks(4).run(train_noting_channels, case=case)
    for one, other in zip(alone, ranks(4).run(train_while_a_thread_copies, case=case), strict=True):
        assert set(other["apart"]) == {"copies"}
        assert one["bytes_sent"] == other["bytes_sent"]
        assert one["losses"] == other["losses"]
        for name, value in one["parameters"].items():
            assert torch.equal(value, other["parameters"][name])


def test_all_groups_of_a_rank_share_one_thread(ranks: Callable[[int], Ranks]) -> None:
    case = Case("1f1b", pp=2, dp=2, steps=1, overlap="zero1")
    assert [found["loops"] for found in ranks(4).run(train_noting_channels, case=case)] == [[1]] * 4


def loops_after_each_group() -> list[int]:
    """Before any, behind one as usual, and behind one for which another network is chosen."""
    made = dist.new_group
    groups = Communicators(Coordinates.of(dist.get_rank(), pp=2, dp=1))

    def elsewhere(*arguments: Any, **options: Any) -> Any:
        with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"):
            return made(*arguments, **options)

    found = [loops()]
    for purpose, how in {"control": made, "reduce": elsewhere}.items():
        with mock.patch.object(dist, "new_group", how):
            groups.create([(purpose, (0, 1))], backends={purpose: "gloo"}, timeout_s=30.0)
        found.append(loops())
    groups.destroy()
    return found


def test_a_group_on_another_network_has_a_thread_there(ranks: Callable[[int], Ranks]) -> None:
    for before, usual, elsewhere in ranks(2).run(loops_after_each_group):
        assert before == usual == elsewhere - 1


def test_between_machines_messages_go_by_gloo(ranks: Callable[[int], Ranks]) -> None:
    case = Case("interleaved_1f1b", pp=4, steps=2)
    one = ranks(4).run(train_noting_channels, case=case)
    two = ranks(4).run(train_noting_channels, case=case, hosts=(0, 0, 1, 1))
    apart = ranks(4).run(train_noting_channels, case=case, hosts=(0, 1, 2, 3))
    assert [found["near"] for found in two] == [[[1]], [[0]], [[3]], [[2]]]
    assert [found["near"] for found in apart] == [[[]]] * 4
    for whole, split, alone in zip(one, two, apart, strict=True):
        assert whole["losses"] == split["losses"] == alone["losses"]
