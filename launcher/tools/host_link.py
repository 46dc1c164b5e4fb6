"""Between two hosts, and of a host's clock: round trips, bytes per second, how far clocks differ.

Sockets and the kernel alone, without torch: what it cannot do, no backend can. Whoever answers
reads bytes and echoes headers; nothing that arrives is obeyed or kept.
"""

from __future__ import annotations

import ctypes
import socket
import statistics
import struct
import sys
import time
from dataclasses import dataclass

_HEADER = struct.Struct("!cQd")  # what is asked, how many bytes follow, the sender's time
_PING, _BULK, _END = b"p", b"b", b"e"
_PINGS, _BULK_BYTES = 50, 64 << 20
_CHUNK = 1 << 20
_MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Link:
    """What was measured to another host.

    Attributes:
        clock_ahead_s: By how much the other host's clock is ahead of this one's.
    """

    round_trip_s: float
    bytes_per_s: float
    clock_ahead_s: float


def measure_link(host: str, port: int, *, bulk: int = _BULK_BYTES, timeout_s: float = 10.0) -> Link:
    """Measures to a host on which ``answer`` runs.

    Raises:
        OSError: Nobody answers there, or something else than ``answer``.
    """
    with socket.create_connection((host, port), timeout=timeout_s) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips, ahead = [], []
        for _ in range(_PINGS):
            before = time.time()
            begin = time.perf_counter()
            link.sendall(_HEADER.pack(_PING, 0, before))
            _, _, theirs = _HEADER.unpack(_exactly(link, _HEADER.size))
            trips.append(time.perf_counter() - begin)
            ahead.append(theirs - before - trips[-1] / 2)
        begin = time.perf_counter()
        link.sendall(_HEADER.pack(_BULK, bulk, 0.0))
        data = memoryview(bytes(min(_CHUNK, bulk)))
        left = bulk
        while left:
            left -= link.send(data[: min(left, len(data))])
        _exactly(link, _HEADER.size)
        took = time.perf_counter() - begin
        link.sendall(_HEADER.pack(_END, 0, 0.0))
    quickest = min(range(_PINGS), key=trips.__getitem__)
    return Link(statistics.median(trips), bulk / took, ahead[quickest])


def answer(port: int, *, timeout_s: float) -> None:
    """Answers one host after the other, until nobody has come for ``timeout_s``."""
    with socket.create_server(("", port)) as server:
        server.settimeout(timeout_s)
        while True:
            try:
                link, _ = server.accept()
            except TimeoutError:
                return
            with link:
                link.settimeout(30.0)
                try:
                    _answer_one(link)
                except (OSError, ValueError, struct.error):
                    continue  # not one of ours, or gone


def _answer_one(link: socket.socket) -> None:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        kind, count, _ = _HEADER.unpack(_exactly(link, _HEADER.size))
        if kind not in (_PING, _BULK) or count > _MOST_BYTES:
            return
        while count:
            data = link.recv(min(count, _CHUNK))
            if not data:
                return
            count -= len(data)
        link.sendall(_HEADER.pack(kind, 0, time.time()))


def _exactly(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = link.recv(count - len(data))
        if not more:
            raise ConnectionError("the other end has closed the connection")
        data += more
    return data


@dataclass(frozen=True, slots=True)
class ClockState:
    """Of this host: whether something keeps it right, and the error that the kernel assumes."""

    synchronised: bool
    error_s: float


class _Timex(ctypes.Structure):
    """The beginning of Linux's ``struct timex``; it only grows at its end."""

    _fields_ = (
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long), ("esterror", ctypes.c_long), ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 512),
    )  # fmt: skip


_UNSYNCHRONISED = 0x0040


def clock_state() -> ClockState | None:
    """What the kernel knows of its clock; None where it does not say."""
    if sys.platform != "linux":
        return None
    timex = _Timex()
    try:
        code = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return None
    if code < 0:
        return None
    return ClockState(not timex.status & _UNSYNCHRONISED, timex.maxerror / 1e6)
