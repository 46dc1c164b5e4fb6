"""Tensors between ranks of one machine: what arrives, whose memory it is, and who may come."""

from __future__ import annotations

import gc
import os
import secrets
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from strategies.errors import RunError
from strategies.runtime.messages import shared_memory
from strategies.runtime.messages.shared_memory import connect

TIMEOUT_S = 20.0


class Words:
    """What ``Exchange`` is to ``connect``, for ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._said: list[object] = [None] * size
        self._barrier = threading.Barrier(size)

    def of(self, rank: int) -> Words:
        found = object.__new__(Words)
        found.__dict__ = {**self.__dict__, "rank": rank}
        return found

    def everyone(self, payload: object) -> list[object]:
        self._said[self.rank] = payload
        self._barrier.wait(TIMEOUT_S)
        found = list(self._said)
        self._barrier.wait(TIMEOUT_S)
        return found


def connected(size: int, *, timeout_s: float = TIMEOUT_S, places=None, before=lambda rank: None):
    """The channels of each rank; ``places``: by rank, where it is, if not all here."""
    words, found, errors = Words(size), [None] * size, []
    here = shared_memory._place()

    def come(rank: int) -> None:
        try:
            before(rank)
            own = None if places is None else places[rank]
            found[rank] = connect(words.of(rank), timeout_s=timeout_s, place=own or here)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    if errors:
        raise errors[0]
    return found


@pytest.fixture
def pair():
    first, second = connected(2)
    return first[1], second[0]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool,
     torch.complex64, torch.uint8],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (3,), (7, 11), (300, 5, 2)], ids=str)
def test_what_arrives_is_what_was_sent(pair, dtype, shape):
    sent = (torch.randn(shape) * 4).to(dtype)
    pair[0].send(sent, 7)
    assert torch.equal(pair[1].take(7, shape, dtype), sent)
    # And the other way, where nothing has gone before.
    pair[1].send(sent, 9)
    assert torch.equal(pair[0].take(9, shape, dtype), sent)


def test_messages_are_told_apart_by_tag_and_those_of_one_tag_come_in_order(pair):
    for number, tag in enumerate((5, 6, 5, 7)):
        pair[0].send(torch.full((2000,), float(number)), tag)
    found = [int(pair[1].take(tag, (2000,), torch.float32)[0]) for tag in (7, 5, 6, 5)]
    assert found == [3, 0, 1, 2]


def test_a_sent_tensor_may_be_changed_at_once(pair):
    data = torch.ones(5000)
    pair[0].send(data, 1)
    data.zero_()
    assert pair[1].take(1, (5000,), torch.float32).sum() == 5000


def test_what_is_sent_later_has_its_block_now_and_may_be_sent_by_another_thread(pair):
    one, other = pair
    first, second = torch.arange(1000.0), torch.arange(1000.0) + 1
    fill = one.send_later(first, 1)
    one.send(second, 2)  # It comes first, and in another block.
    assert other.has(2) and not other.has(1)
    thread = threading.Thread(target=fill)
    thread.start()
    thread.join(TIMEOUT_S)
    assert other.has(1)
    assert torch.equal(other.take(1, (1000,), torch.float32), first)
    assert torch.equal(other.take(2, (1000,), torch.float32), second)
    assert not other.has(1)


def test_who_asks_whether_something_has_come_hears_that_the_other_end_has_gone(pair):
    one, other = pair
    one.send(torch.ones(3), 1)
    one._link.close()
    assert other.has(1)
    with pytest.raises(RuntimeError, match="Connection closed"):
        other.has(2)
    assert torch.equal(other.take(1, (3,), torch.float32), torch.ones(3))


def test_a_block_is_used_again_when_the_last_tensor_in_it_is_gone_and_not_before(pair):
    def passed(value: float) -> torch.Tensor:
        pair[0].send(torch.full((5000,), float(value)), 1)
        return pair[1].take(1, (5000,), torch.float32)

    for step in range(5):
        assert passed(step)[0] == step
    assert pair[0]._count == 1
    kept = passed(1.0)[:10].view(2, 5)  # a part of it is enough
    for step in range(2, 7):
        assert passed(step)[0] == step
    assert pair[0]._count == 2
    assert kept.eq(1.0).all()
    kept.mul_(3.0)  # and its receiver's to change
    assert passed(7.0)[0] == 7.0
    assert kept.eq(3.0).all()
    del kept
    gc.collect()
    held = [passed(step) for step in range(2)]
    assert pair[0]._count == 2
    assert [int(each[0]) for each in held] == [0, 1]


def test_a_child_that_lets_go_of_a_tensor_gives_nothing_back(pair):
    pair[0].send(torch.ones(5000), 1)
    received = pair[1].take(1, (5000,), torch.float32)
    child = os.fork()
    if not child:
        del received
        os._exit(0)
    os.waitpid(child, 0)
    pair[0].send(torch.zeros(5000), 1)
    assert pair[1].take(1, (5000,), torch.float32).sum() == 0
    assert received.sum() == 5000
    assert pair[0]._count == 2


def test_autograd_and_operations_in_place_take_it_as_any_tensor(pair):
    pair[0].send(torch.arange(4096.0), 1)
    received = pair[1].take(1, (64, 64), torch.float32)
    leaf = received.detach().requires_grad_()
    (leaf * leaf).sum().backward()
    assert torch.equal(leaf.grad, 2 * received)
    received.relu_().add_(1)
    assert received[0, 1] == 2


def test_tensors_outlive_the_connection(pair):
    first, second = connected(2)
    first[1].send(torch.ones(5000), 1)
    kept = second[0].take(1, (5000,), torch.float32)
    del first, second
    gc.collect()
    assert kept.sum() == 5000


def test_no_file_and_no_descriptor_is_left():
    def blocks() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if not name.startswith("tmp")}  # tempfile's

    before = blocks()

    def use() -> None:
        first, second = connected(2)
        for size in (10, 5000, 50_000):
            first[1].send(torch.ones(size), size)
            second[0].take(size, (size,), torch.float32)

    use()
    gc.collect()
    opened = len(os.listdir("/proc/self/fd"))
    use()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == opened
    assert blocks() == before


def test_a_rank_that_has_gone_is_told_as_a_lost_connection():
    first, second = connected(2)
    first[1].send(torch.ones(5000), 1)
    del first
    gc.collect()
    channel = second[0]
    assert channel.take(1, (5000,), torch.float32).sum() == 5000  # What was sent is here.
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        channel.take(2, (1,), torch.float32)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        channel.send(torch.ones(1), 3)


def test_a_rank_that_says_nothing_is_waited_for_as_long_as_the_time_out():
    first, _second = connected(2, timeout_s=0.2)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="Timed out waiting 200ms for recv"):
        first[1].take(1, (1,), torch.float32)
    assert time.monotonic() - begin < TIMEOUT_S


def test_a_message_of_another_size_is_refused(pair):
    pair[0].send(torch.ones(5000), 1)
    with pytest.raises(RunError, match="20000 bytes came where one of 16000 was expected"):
        pair[1].take(1, (4000,), torch.float32)


def test_ranks_elsewhere_have_no_channel():
    there = ["another boot", 1, 2, os.getuid()]
    here, beside, far = connected(3, places=[None, None, there])
    assert [sorted(each) for each in (here, beside, far)] == [[1], [0], []]
    beside[0].send(torch.ones(3), 1)
    assert here[1].take(1, (3,), torch.float32).sum() == 3


def test_where_memory_cannot_be_shared_nobody_has_a_channel(monkeypatch):
    monkeypatch.setattr(shared_memory, "_place", lambda: None)
    assert connected(2) == [{}, {}]


def test_a_sandbox_without_such_memory_goes_by_gloo(monkeypatch):
    def refused(name: str) -> int:
        raise PermissionError(name)

    monkeypatch.setattr(os, "memfd_create", refused)
    assert shared_memory._place() is None


SLOWER = (
    "pipeline ranks {} are on one machine, but exchange tensors by gloo and not in shared memory: "
    "{}. This is slower. Try another folder as TMPDIR."
)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_ranks_that_cannot_connect_go_by_gloo_and_the_others_share(monkeypatch, caplog, failing):
    make, own = tempfile.mkdtemp, threading.local()

    def refusing(**options: str) -> str:
        if own.rank == failing:
            raise OSError("No space left")
        return make(**options)

    monkeypatch.setattr(tempfile, "mkdtemp", refusing)
    found = connected(3, before=lambda rank: setattr(own, "rank", rank))
    lost = [(rank, failing) for rank in range(failing)]  # The later rank listens.
    assert [sorted(each) for each in found] == [
        [o for o in range(3) if o != rank and (min(o, rank), max(o, rank)) not in lost]
        for rank in range(3)
    ]
    pairs = ", ".join(f"{one} and {other}" for one, other in lost)
    assert caplog.messages == ([SLOWER.format(pairs, "No space left")] if lost else [])


def test_a_network_of_ones_own_is_another_place():
    # Emulated hosts are network namespaces; a file of /proc tells them apart.
    place = shared_memory._place()
    assert place is not None
    assert os.stat("/proc/self/ns/net").st_ino in place


def listening_to(monkeypatch, strangers: Callable[[str], None]) -> None:
    """Lets ``strangers`` come to each folder with a socket before any rank does."""
    listening = shared_memory._listening

    @contextmanager
    def noted() -> Iterator[tuple[socket.socket | None, str]]:
        with listening() as found:
            strangers(found[1])
            yield found

    monkeypatch.setattr(shared_memory, "_listening", noted)


def stranger(folder: str) -> socket.socket:
    found = shared_memory._socket()
    found.setblocking(False)
    try:
        shared_memory._at(folder, found.connect)
    except BlockingIOError:
        found.close()
        raise
    return found


def test_a_stranger_is_not_taken_for_a_rank_and_not_waited_for(monkeypatch):
    held = []

    def come(folder: str) -> None:
        held.extend(stranger(folder) for _ in range(3))
        held[-1].send(secrets.token_hex(16).encode())
        held[-2].close()

    listening_to(monkeypatch, come)
    begin = time.monotonic()
    first, second = connected(2)
    assert time.monotonic() - begin < TIMEOUT_S / 2
    first[1].send(torch.ones(3), 1)
    assert second[0].take(1, (3,), torch.float32).sum() == 3
    assert len(held) == 6
    assert (sorted(first), sorted(second)) == ([1], [0])
    for each in held:
        each.close()


def test_a_queue_that_is_full_sends_the_pair_to_gloo(monkeypatch, caplog):
    held = []

    def fill(folder: str) -> None:
        with suppress(BlockingIOError):
            while len(held) < 1000:
                held.append(stranger(folder))

    listening_to(monkeypatch, fill)
    begin = time.monotonic()
    assert connected(2) == [{}, {}]
    assert time.monotonic() - begin < TIMEOUT_S / 2
    why = "other connections fill the queue of a rank's socket"
    assert caplog.messages == [SLOWER.format("0 and 1", why)]
    for each in held:
        each.close()


def test_the_socket_is_where_no_other_user_comes_and_leaves_nothing(monkeypatch, tmp_path):
    """In a folder of any length, for as long as ranks connect."""
    place = tmp_path / ("a" * 120)
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    seen = []

    def look(folder: str) -> None:
        seen.append((Path(folder).parent, stat.S_IMODE(os.stat(folder).st_mode)))
        assert "@foldpipe" not in Path("/proc/net/unix").read_text()

    listening_to(monkeypatch, look)
    first, second = connected(2)
    assert (sorted(first), sorted(second)) == ([1], [0])
    assert seen == [(place, 0o700)] * 2
    assert os.listdir(place) == []
