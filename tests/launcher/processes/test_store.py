"""torch's own client at the parent's store: whoever changes torch's version hears of it here."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from launcher.processes.local import LocalRanks
from launcher.processes.store import (
    Store,
    listen_at,
    meeting_address,
    serve_for_good,
    store_served,
)

GREETING = b"\0" + struct.pack("<I", 0x3C85F7CE)


@pytest.fixture
def port():
    with store_served() as found:
        yield found


def client(port: int, timeout_s: float = 10.0) -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def test_values_are_shared_between_clients(port):
    one, two = client(port), client(port)
    one.set("word", "spoken")
    assert two.get("word") == b"spoken"
    assert one.add("count", 2) == 2
    assert two.add("count", -5) == -3
    assert one.get("count") == b"-3"
    two.append("word", " twice")
    assert one.get("word") == b"spoken twice"
    assert two.check(["word", "count"])
    assert not two.check(["word", "other"])
    one.multi_set(["a", "b"], ["1", "2"])
    assert two.multi_get(["b", "a"]) == [b"2", b"1"]
    assert two.num_keys() == 4
    assert two.delete_key("a")
    assert not two.delete_key("a")
    assert not one.check(["a"])


def test_compare_and_set_does_so_only_where_it_is_as_expected(port):
    store = client(port)
    assert store.compare_set("key", "old", "new") == b"old"
    assert not store.check(["key"])
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "other", "second") == b"first"
    assert store.compare_set("key", "first", "second") == b"second"
    assert store.get("key") == b"second"


def test_whoever_waits_goes_on_when_the_last_key_is_there(port):
    waiting, setting = client(port), client(port)
    went_on = []

    def wait() -> None:
        waiting.wait(["a", "b"], timedelta(seconds=10))
        went_on.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    setting.set("a", "1")
    time.sleep(0.2)
    assert went_on == []
    setting.add("b", 1)
    thread.join()
    assert len(went_on) == 1


def test_a_wait_that_takes_too_long_leaves_the_connection_usable(port):
    store = client(port)
    with pytest.raises(RuntimeError):
        store.wait(["never"], timedelta(seconds=0.3))
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_large_values_come_through_whole(port):
    one, two = client(port), client(port)
    data = bytes(range(256)) * 8192
    one.set("large", data)
    assert two.get("large") == data


@pytest.mark.parametrize(
    "said",
    [
        b"\1" + struct.pack("<Q", 4) + b"word" + struct.pack("<Q", 1) + b"x",  # no greeting
        GREETING + b"\xee",
        GREETING + b"\3" + struct.pack("<Q", 1 << 60),
        GREETING + b"\5" + struct.pack("<Q", 1 << 60),
    ],
)
def test_whoever_is_not_torch_is_shown_out_and_changes_nothing(port, said):
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
        stranger.sendall(said)
        assert stranger.recv(1) == b""
    assert not client(port).check(["word"])


def test_it_outlives_every_client_and_listens_on_this_machine_only(port):
    first = client(port)
    first.set("word", "spoken")
    del first
    assert client(port).get("word") == b"spoken"
    with pytest.raises(OSError), socket.create_connection(("::1", port), timeout=30):
        pass


def test_the_port_is_free_again_after_the_block():
    with store_served() as port:
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=30)


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.set("word", "mine"),
        lambda store: store.set("wrong/word", "mine"),
        lambda store: store.get("word"),
        lambda store: store.add("word", 1),
        lambda store: store.append("word", "!"),
        lambda store: store.compare_set("word", "spoken", "mine"),
        lambda store: store.multi_set(["token/word", "word"], ["mine", "mine"]),
        lambda store: store.multi_get(["word"]),
        lambda store: store.delete_key("word"),
        lambda store: store.check(["word"]),
    ],
)
def test_whoever_does_not_know_the_token_reads_and_writes_nothing(act):
    with store_served("token") as port:
        ours = dist.PrefixStore("token", client(port))
        ours.set("word", "spoken")
        stranger = client(port, timeout_s=2)
        with contextlib.suppress(RuntimeError):  # a set is not answered, so torch does not notice
            act(stranger)
            stranger.set("after", "x")
        assert ours.get("word") == b"spoken"
        assert ours.num_keys() == 1


def test_a_stranger_can_have_nothing_large_kept():
    """What is not a whole request yet has to be kept; of a client with the token, all of it."""
    with store_served("secret") as port:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.settimeout(30)
            large = 1 << 23
            key = b"/other/key"
            request = b"\1" + struct.pack("<Q", len(key)) + key + struct.pack("<Q", large)
            with contextlib.suppress(OSError):
                stranger.sendall(GREETING + request + b"x" * large)
            with contextlib.suppress(OSError):
                assert stranger.recv(1) == b""
        one = dist.PrefixStore("secret", client(port))
        one.set("small", "1")
        one.set("large", "x" * large)
        assert len(one.get("large")) == large


def test_a_new_run_has_a_new_token(tmp_path):
    one, other = (LocalRanks(tmp_path, 1, lambda _: None, {})._token for _ in range(2))
    assert one != other
    assert len(one) == len(other) == 32


def test_ranks_meet_at_an_address_that_the_others_can_reach(monkeypatch):
    # Of one machine nobody else is to reach it.
    assert meeting_address("node7", alone=True) == "127.0.0.1"
    assert meeting_address("10.1.2.3", alone=False) == "10.1.2.3"
    known = {"outside": ["127.0.1.1", "10.0.0.7"], "inside": ["127.0.1.1"]}

    def getaddrinfo(host, port, **_):
        if host not in known:
            raise socket.gaierror
        return [(socket.AF_INET, 1, 6, "", (address, port)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert meeting_address("outside", alone=False) == "10.0.0.7"
    assert meeting_address("inside", alone=False) == "inside"
    assert meeting_address("strange", alone=False) == "strange"


def test_a_store_for_several_machines_listens_at_its_address_and_wants_the_token():
    with listen_at("127.0.0.1") as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            listen_at("127.0.0.1", port)
        serve_for_good(listener, "token")
        ours = dist.PrefixStore("token", client(port))
        ours.set("here/0", "node0")
        assert ours.get("here/0") == b"node0"
        with pytest.raises(RuntimeError):  # closed without an answer
            client(port).get("here/0")
        assert ours.get("here/0") == b"node0"
    # One that no interface of this machine has: of TEST-NET-3.
    with listen_at("203.0.113.7") as everywhere:
        assert everywhere.getsockname()[0] in ("::", "0.0.0.0")


def test_strangers_who_stay_take_no_descriptor_that_others_need(monkeypatch):
    monkeypatch.setattr(Store, "_most_clients", staticmethod(lambda: 3))
    with store_served("token") as port, contextlib.ExitStack() as stack:
        ours = dist.PrefixStore("token", client(port))
        ours.set("word", "spoken")
        held = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            for _ in range(20)
        ]
        another = dist.PrefixStore("token", client(port))
        another.set("more", "words")
        assert ours.get("more") == b"words"
        assert held[0].recv(1) == b""
