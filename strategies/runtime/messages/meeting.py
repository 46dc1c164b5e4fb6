"""Where the ranks of this process' default group meet, and how all its connections are ended.

A rank that fails ends its connections, which releases every rank that waits for it, and those in
turn end theirs: no wait looks around, and no message is sent for it. Then the ranks meet again, at
the same store, in a group that knows nothing of the one before.

Gloo closes nothing as long as anybody holds a group, and waits for messages that are under way. So
its sockets are shut down. They are known by the ports on which gloo listens, here and on the
other ranks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from strategies.runtime.messages.exchange import everybody
from strategies.runtime.messages.mesh import abort_nccl
from strategies.runtime.messages.shared_memory import hang_up

_DESCRIPTORS = "/dev/fd"


@dataclass
class Meeting:
    """One per process, as the default group is.

    Attributes:
        number: Of default groups so far, the same on all ranks.
        epochs: By kind of loop, how many have ended since ``store`` is a new place.
    """

    number: int = 0
    epochs: Counter[str] = field(default_factory=Counter)
    _failures: int = 0  # of the group, after which it has stayed
    _store: Store | None = None
    _world: Any = None
    _before: set[int] = field(default_factory=set)
    _own: set[int] = field(default_factory=set)
    _theirs: set[int] = field(default_factory=set)

    @property
    def store(self) -> Store:
        """Where ranks tell how they fail; of each failure an own place, the same on all ranks."""
        assert self._store is not None, "the ranks have not met"
        return PrefixStore(f"fit/{self.number}/{self._failures}", self._store)

    @property
    def is_on(self) -> bool:
        """Whether the group is there that has begun last."""
        return self._world is not None and dist.group.WORLD is self._world

    def begins(self) -> None:
        """Right before the default group is made."""
        self._before = _listening()

    def has_begun(self, store: Store | None = None) -> None:
        """A default group is there; collective where it is new.

        ``store``: where its ranks have met; None where others have made it.
        """
        world: Any = dist.group.WORLD
        if world is self._world:
            return
        if store is None:
            # Somebody else's, whose sockets nobody has watched: but its store is none of them.
            self._store = PrefixStore("foldpipe", distributed_c10d._get_default_store())
            self._own = _listening() - {int(os.environ.get("MASTER_PORT", 0))}
        else:
            self._store = self._store or store
            self._own = _listening() - self._before
        self._world, self._failures = world, 0
        self.epochs.clear()
        exchange = everybody()
        found = exchange.everyone([self.number, sorted(self._own)])
        self.number = 1 + max(number for number, _ in found)
        others = [ports for rank, (_, ports) in enumerate(found) if rank != exchange.rank]
        self._theirs = {port for ports in others for port in ports}

    def again(self) -> Store | None:
        """Where the next group's ranks meet; None where there was none before."""
        return None if self._store is None else PrefixStore(f"met/{self.number}", self._store)

    def stay(self) -> None:
        """All ranks have failed, have said so in ``store``, and go on in this group."""
        self._failures += 1
        self.epochs.clear()

    def end(self) -> None:
        """Ends the group and all others; all ranks that wait for this one are released."""
        if not self.is_on:
            return
        hang_up()
        for link in _connections():
            with link, contextlib.suppress(OSError):
                far = link.getpeername()[1]
                if link.getsockname()[1] in self._own or far in self._theirs:
                    link.shutdown(socket.SHUT_RDWR)
        abort_nccl()
        dist.destroy_process_group()
        self._world = None


@cache
def meeting() -> Meeting:
    """That of this process."""
    return Meeting()


def _connections() -> Iterator[socket.socket]:
    """TCP sockets of this process, each under another descriptor, to be closed."""
    for name in os.listdir(_DESCRIPTORS):
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
            yield found
        else:
            found.close()


def _listening() -> set[int]:
    ports = set()
    for link in _connections():
        with link, contextlib.suppress(OSError):
            if link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(int(link.getsockname()[1]))
    return ports
