"""A failure has its own place in the store; the end of a group closes gloo's sockets alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from strategies.runtime.messages.meeting import Meeting


@pytest.fixture
def met() -> Iterator[Meeting]:
    """A group of this process alone."""
    store, meeting = HashStore(), Meeting()
    meeting.begins()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        meeting.has_begun(store)
        yield meeting
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_ranks_that_stay_find_nothing_of_an_earlier_failure(met: Meeting) -> None:
    met.store.set("failed/0", "no")
    met.stay()
    assert met.is_on and not met.store.check(["failed/0"])


def test_an_end_leaves_connections_of_others(met: Meeting) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
        server.accept()[0] as far,
    ):
        met.end()
        assert not met.is_on
        near.sendall(b"still here")
        assert far.recv(64) == b"still here"
