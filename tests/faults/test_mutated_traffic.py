"""Clients of the ranks' store that are none of ours, drawn at random: the job never notices."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from launcher.processes.store import Command, store_served
from tests.faults.results import record

GREETING = b"\0" + struct.pack("<I", 0x3C85F7CE)
_COUNTS = [0, 1, 2, 7, 1 << 17, 1 << 24, (1 << 24) + 1, 1 << 40, (1 << 64) - 1]
_MOST_SENT = 1 << 18


def traffic(draw: random.Random, token: str) -> bytes:
    """What one client sends: noise, or requests with wrong tokens, lengths, types and ends."""
    if draw.random() < 0.2:
        return draw.randbytes(draw.randrange(1, 5000))
    said = bytearray(draw.choice([GREETING, GREETING, GREETING, GREETING[:3], b""]))
    for _ in range(draw.randrange(1, 40)):
        said.append(draw.choice([*Command, *Command, 14, 200]))
        for _ in range(draw.randrange(4)):
            text = draw.choice(
                [b"", b"/word", f"/{token[:-1]}/word".encode(), b"/x" * 900, draw.randbytes(30)]
            )
            length = len(text) if draw.random() < 0.8 else draw.choice(_COUNTS)
            said += struct.pack("<Q", length) + text
    if draw.random() < 0.03:  # many answers that nobody reads
        said = bytearray(GREETING) + bytes([Command.GETNUMKEYS]) * _MOST_SENT
    return bytes(said[: draw.randrange(1, len(said) + 1)] if draw.random() < 0.3 else said)


def disturb(count: int, *, seed: int) -> None:
    draw, token = random.Random(seed), "4f6e65"
    with store_served(token) as port:
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=False, wait_for_workers=False,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
        ours = dist.PrefixStore(token, store)
        ours.set("word", "spoken")
        held = []
        for number in range(count):
            stranger = socket.create_connection(("127.0.0.1", port), timeout=30)
            stranger.settimeout(30)
            with contextlib.suppress(OSError):  # shown out in the middle of it
                stranger.sendall(traffic(draw, token))
            held.append(stranger)  # and most stay
            if draw.random() < 0.3:
                held.pop(draw.randrange(len(held))).close()
            assert ours.get("word") == b"spoken", number
            assert ours.num_keys() == 1, number
        assert ours.add("count", 1) == 1
        for stranger in held:
            stranger.close()


def test_30_clients_that_are_not_ours() -> None:
    disturb(30, seed=3)


@pytest.mark.faults
def test_300_clients_that_are_not_ours() -> None:
    begun = time.monotonic()
    disturb(300, seed=4)
    what = "clients of the ranks' store that are none of ours: no word read or lost (mean seconds)"
    record("fuzz", what, 300, 300, (time.monotonic() - begun) / 300)


def test_who_asks_and_never_listens_is_shown_out() -> None:
    with (
        store_served("token") as port,
        socket.create_connection(("127.0.0.1", port), timeout=60) as stranger,
        pytest.raises(OSError),
    ):
        stranger.sendall(GREETING)
        for _ in range(256):
            stranger.sendall(bytes([Command.GETNUMKEYS]) * (1 << 20))


def test_a_count_that_is_no_number_ends_nobody_else() -> None:
    with store_served() as port:
        one, two = (
            dist.TCPStore(
                "127.0.0.1", port, is_master=False, wait_for_workers=False,
                timeout=timedelta(seconds=60),
            )
            for _ in range(2)
        )  # fmt: skip
        one.set("word", "spoken")
        with pytest.raises(RuntimeError):
            one.add("word", 1)
        two.add("count", (1 << 63) - 1)
        three = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        with pytest.raises(RuntimeError):
            two.add("count", 1)
        assert three.get("word") == b"spoken"
