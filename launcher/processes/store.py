"""The store that ranks meet at, kept by the parent: no rank's death takes it away.

Speaks to torch's own client, ``torch.distributed.TCPStore``, without torch: requests are a byte for
the command, then little-endian numbers, keys and values, each with its length before it. Listens on
this machine only, or at the address by which other machines of the run reach it. torch's queues
(``queue_push`` and its kin), which no process group uses, are not served; a request that is not
understood closes the connection, as torch's own server does. So does one about a key without the
job's token: what ranks read here tells them whom to connect to, and any process that reaches the
port can ask.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import resource
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum

_MAGIC = 0x3C85F7CE
_MOST_KEYS = 1 << 17
_MOST_BYTES = 1 << 24
# Of a client that has not shown that it knows the token: any process of this machine can connect.
_MOST_UNPROVEN_BYTES = 1 << 20
# Descriptors that are left to everything else this process opens.
_LEFT_FILES = 64
_STOP_WAITING, _WAIT_CANCELED = b"\0", b"\1"
_READY, _NOT_READY = b"\0", b"\1"


class Command(IntEnum):
    """The first byte of a request."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    GETNUMKEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13


# A request of these without the token closes the connection.
_WITH_KEYS = frozenset(
    (
        Command.SET, Command.COMPARE_SET, Command.GET, Command.ADD, Command.DELETE_KEY,
        Command.APPEND,
    )
)  # fmt: skip


class _IncompleteError(Exception):
    """The rest of a request is still on its way."""


class _RefusedError(Exception):
    """Not torch's client, or one that asks for what is not served."""


@dataclass(eq=False)
class _Client:
    connection: socket.socket
    received: bytearray = field(default_factory=bytearray)
    to_send: bytearray = field(default_factory=bytearray)
    known: bool = False
    trusted: bool = False  # whether it has named a key with the job's token
    awaited: set[bytes] = field(default_factory=set)


@dataclass
class _Request:
    """Reads one request from what has been received."""

    data: bytearray
    at: int = 0

    def take(self, size: int) -> bytes:
        if size > _MOST_BYTES:
            raise _RefusedError
        if self.at + size > len(self.data):
            raise _IncompleteError
        self.at += size
        return bytes(self.data[self.at - size : self.at])

    def number(self, kind: str) -> int:
        (found,) = struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))
        return int(found)

    def text(self) -> bytes:
        return self.take(self.number("Q"))

    def texts(self) -> list[bytes]:
        count = self.number("Q")
        if count > _MOST_KEYS:
            raise _RefusedError
        return [self.text() for _ in range(count)]


class Store:
    """Keys and values, and who waits for which.

    Args:
        token: With which every key begins (``PrefixStore(token, ...)``); empty for any key.
    """

    def __init__(self, listener: socket.socket, token: str = "") -> None:
        self._listener = listener
        # torch's client puts a slash before every key.
        self._prefix = f"/{token}/".encode() if token else b""
        self._values: dict[bytes, bytes] = {}
        self._clients: dict[_Client, None] = {}  # in the order in which they came
        self._selector = selectors.DefaultSelector()
        self._commands: dict[int, Callable[[_Client, _Request], bytes]] = {
            Command.SET: self._set,
            Command.COMPARE_SET: self._compare_set,
            Command.GET: lambda _, request: _framed(self._values.get(self._key(request), b"")),
            Command.ADD: self._add,
            Command.CHECK: self._check,
            Command.WAIT: self._wait,
            Command.GETNUMKEYS: lambda *_: struct.pack("<q", len(self._values)),
            Command.DELETE_KEY: self._delete,
            Command.APPEND: self._append,
            Command.MULTI_GET: self._multi_get,
            Command.MULTI_SET: self._multi_set,
            Command.CANCEL_WAIT: self._cancel,
            Command.PING: lambda _, request: request.take(4),
        }

    def serve(self, end: int) -> None:
        """Answers until somebody writes to, or closes, the other end of a pipe."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(end, selectors.EVENT_READ)
        try:
            while True:
                for key, events in self._selector.select():
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is None:
                        return
                    else:
                        self._talk(key.data, events)
        finally:
            for client in tuple(self._clients):
                self._close(client)
            self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client = _Client(connection, trusted=not self._prefix)
            self._clients[client] = None
            self._selector.register(connection, selectors.EVENT_READ, client)
            if len(self._clients) > self._most_clients():
                self._show_one_out()

    @staticmethod
    def _most_clients() -> int:
        """Strangers may connect as often as they like: what this process needs stays free."""
        return max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _LEFT_FILES)

    def _show_one_out(self) -> None:
        """The first of those that have not shown that they know the token."""
        strange = next((client for client in self._clients if not client.trusted), None)
        if strange is not None:
            self._close(strange)

    def _talk(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                data = client.connection.recv(1 << 16)
                if not data:
                    raise _RefusedError  # it has left
                client.received += data
                if not client.trusted and len(client.received) > _MOST_UNPROVEN_BYTES:
                    raise _RefusedError
                while self._answer(client):
                    # A stranger who asks and never listens would have the answers kept.
                    if not client.trusted and len(client.to_send) > _MOST_UNPROVEN_BYTES:
                        raise _RefusedError
            self._send(client)
        except (_RefusedError, OSError):
            self._close(client)

    def _answer(self, client: _Client) -> bool:
        """Answers the first request of what has been received; False if there is none."""
        request = _Request(client.received)
        try:
            command = request.number("B")
            if not client.known:
                if command != Command.VALIDATE or request.number("I") != _MAGIC:
                    raise _RefusedError
                client.known = True
            elif command in self._commands:
                client.to_send += self._commands[command](client, request)
                client.trusted = client.trusted or command in _WITH_KEYS
            else:
                raise _RefusedError
        except _IncompleteError:
            return False
        del client.received[: request.at]
        return True

    def _send(self, client: _Client) -> None:
        if client.to_send:
            with contextlib.suppress(BlockingIOError):
                del client.to_send[: client.connection.send(client.to_send)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.to_send else 0)
        if self._selector.get_key(client.connection).events != wanted:
            self._selector.modify(client.connection, wanted, client)

    def _close(self, client: _Client) -> None:
        self._clients.pop(client, None)
        self._selector.unregister(client.connection)
        client.connection.close()

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for client in tuple(self._clients):
            if key in client.awaited:
                client.awaited.discard(key)
                if not client.awaited:
                    client.to_send += _STOP_WAITING
                    try:
                        self._send(client)
                    except OSError:
                        self._close(client)

    def _key(self, request: _Request) -> bytes:
        key = request.text()
        if not key.startswith(self._prefix):
            raise _RefusedError
        return key

    def _keys(self, request: _Request) -> list[bytes]:
        keys = request.texts()
        if not all(key.startswith(self._prefix) for key in keys):
            raise _RefusedError
        return keys

    def _set(self, _: _Client, request: _Request) -> bytes:
        key, value = self._key(request), request.text()
        self._put(key, value)
        return b""

    def _compare_set(self, _: _Client, request: _Request) -> bytes:
        key, expected, desired = self._key(request), request.text(), request.text()
        found = self._values.get(key)
        if found == expected or (found is None and not expected):
            self._put(key, desired)
            return _framed(desired)
        return _framed(expected if found is None else found)

    def _add(self, _: _Client, request: _Request) -> bytes:
        key, amount = self._key(request), request.number("q")
        try:
            total = int(self._values.get(key, b"0")) + amount
            answer = struct.pack("<q", total)
        except (ValueError, struct.error):  # no number, or one that has outgrown its type
            raise _RefusedError from None
        self._put(key, str(total).encode())
        return answer

    def _check(self, _: _Client, request: _Request) -> bytes:
        there = all(key in self._values for key in self._keys(request))
        return _READY if there else _NOT_READY

    def _wait(self, client: _Client, request: _Request) -> bytes:
        client.awaited = {key for key in self._keys(request) if key not in self._values}
        return b"" if client.awaited else _STOP_WAITING

    def _cancel(self, client: _Client, _: _Request) -> bytes:
        client.awaited.clear()
        return _WAIT_CANCELED

    def _delete(self, _: _Client, request: _Request) -> bytes:
        found = self._values.pop(self._key(request), None)
        return struct.pack("<q", found is not None)

    def _append(self, _: _Client, request: _Request) -> bytes:
        key, value = self._key(request), request.text()
        self._put(key, self._values.get(key, b"") + value)
        return b""

    def _multi_get(self, _: _Client, request: _Request) -> bytes:
        return b"".join(_framed(self._values.get(key, b"")) for key in self._keys(request))

    def _multi_set(self, _: _Client, request: _Request) -> bytes:
        count = request.number("Q")
        if count > _MOST_KEYS:
            raise _RefusedError
        for key, value in [(self._key(request), request.text()) for _ in range(count)]:
            self._put(key, value)
        return b""


@contextmanager
def store_served(token: str = "") -> Iterator[int]:
    """A store on a port of this machine, in a thread, as long as the block runs.

    Args:
        token: Known to the job's processes alone; all keys begin with it. Empty for any key.
    """
    reader, writer = os.pipe()
    # Taken from the kernel once, and never let go: nobody else can get it in between.
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        port: int = listener.getsockname()[1]
        store = Store(listener, token)
        thread = threading.Thread(target=store.serve, args=(reader,), name="store", daemon=True)
        thread.start()
        try:
            yield port
        finally:
            os.close(writer)
            thread.join()
            os.close(reader)


# Where ranks are on several machines, the first of them keeps the store.

LOOPBACK = "127.0.0.1"


def meeting_address(host: str, *, alone: bool) -> str:
    """The address to hand to all ranks for a name by which this machine is known.

    Args:
        host: What a scheduler calls this machine.
        alone: Whether all ranks are here: then nobody else needs to reach it.
    """
    if alone:
        return LOOPBACK
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    except OSError:
        return host  # The others may know more.
    # Debian gives a machine's own name an address of its loopback, which nobody else can reach.
    outside = [one for one in found if not ipaddress.ip_address(one.split("%")[0]).is_loopback]
    return outside[0] if outside else host


def listen_at(address: str, port: int = 0) -> socket.socket:
    """A listener at one of this machine's addresses; on all where that is not one of them.

    Raises:
        OSError: The port is taken.
    """
    with contextlib.suppress(ValueError):
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        try:
            return socket.create_server((address, port), family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # a container, an address that is translated
                raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=1024)


def serve_for_good(listener: socket.socket, token: str) -> None:
    """Keeps a store in a thread for as long as this process lives."""
    reader, _ = os.pipe()
    store = Store(listener, token)
    threading.Thread(target=store.serve, args=(reader,), name="store", daemon=True).start()


def _framed(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value
