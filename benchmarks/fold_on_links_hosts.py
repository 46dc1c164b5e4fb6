"""Hosts on one machine: network namespaces whose interfaces carry only so much.

A host is a namespace with one or two interfaces; every interface is a veth pair to a bridge in one
more namespace, the switch. Both ends of a pair are shaped by a token bucket (``tc`` tbf), so what a
host sends and what it receives are limited alike. Nothing is made outside these namespaces: to
delete them leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "foldlinks"
# A token bucket of this size is what an idle link may send at once, beyond its rate.
_BURST_BYTES = 16384
# More than the sockets of a host may have under way (below): nothing is dropped, TCP never halts.
_QUEUE_BYTES = 16 * 2**20
# reno: every kernel has it and every namespace may use it, and without losses all behave alike.
_SETTINGS = (
    "net.ipv4.tcp_congestion_control=reno",
    "net.ipv4.tcp_slow_start_after_idle=0",
    "net.ipv4.tcp_wmem=4096 65536 1048576",
)
_MTU = "9000"


class MissingRightError(Exception):
    """This machine, or this user, cannot make such hosts."""


def address(host: int, interface: int = 0) -> str:
    """A host's IPv4 address on an interface."""
    return f"10.{77 + interface}.0.{host + 1}"


def inside(host: str) -> list[str]:
    """The words before a command that is to run on a host."""
    return ["ip", "netns", "exec", host]


@contextmanager
def hosts(count: int, *, interfaces: int, rate_mbit: float) -> Iterator[tuple[str, ...]]:
    """Makes hosts, gives their names, and deletes them however the block ends.

    Args:
        count: Number of hosts.
        interfaces: 1 (``eth0``) or 2 (``eth1`` as well, on a switch of its own).
        rate_mbit: What each interface carries per direction, in 1e6 bit/s.

    Raises:
        MissingRightError: No root, no iproute2, no token bucket in the kernel.
    """
    check_rights()
    _sweep()
    prefix = f"{_PREFIX}-{os.getpid()}-"
    names = tuple(f"{prefix}{index}" for index in range(count))
    switch = f"{prefix}switch"
    try:
        _ip("netns", "add", switch)
        for interface in range(interfaces):
            bridge = f"br{interface}"
            _ip("-n", switch, "link", "add", "name", bridge, "type", "bridge")
            _ip("-n", switch, "link", "set", bridge, "mtu", _MTU, "up")
        for index, name in enumerate(names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _run(*inside(name), "sysctl", "-q", "-w", *_SETTINGS)
            for interface in range(interfaces):
                _plug(name, switch, index, interface, rate_mbit)
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def check_rights() -> None:
    """Says in one message what is missing.

    Raises:
        MissingRightError: See ``hosts``.
    """
    missing = []
    if not sys.platform.startswith("linux"):
        missing.append("Linux")
    elif os.geteuid() != 0:
        missing.append("root")
    missing += [f"`{tool}`" for tool in ("ip", "tc", "sysctl") if shutil.which(tool) is None]
    if not missing:
        missing += _tried()
    if missing:
        raise MissingRightError(
            "fold_on_links makes network namespaces with shaped links: it needs Linux, root, `ip` "
            "and `tc` (iproute2), `sysctl`, and a kernel with veth, bridge and sch_tbf. Missing "
            f"here: {', '.join(missing)}. Try `sudo make bench-links`, or a privileged container. "
            "The simulator's part alone needs none of it: --predict-only --rate-mbit 200."
        )


def _tried() -> list[str]:
    """Makes one link and shapes it: the only way to know what a container may do."""
    name = f"{_PREFIX}-{os.getpid()}-try"
    words = (
        ("ip", "netns", "add", name),
        ("ip", "-n", name, "link", "add", "name", "shaped", "type", "veth"),
        ("ip", "-n", name, "link", "add", "name", "bridge0", "type", "bridge"),
        ("tc", "-n", name, "qdisc", "add", "dev", "shaped", "root", *_bucket(100.0)),
    )
    try:
        for command in words:
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                return [f"`{' '.join(command)}` failed: {done.stderr.strip()}"]
        return []
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _plug(name: str, switch: str, index: int, interface: int, rate_mbit: float) -> None:
    own, port = f"eth{interface}", f"p{index}n{interface}"
    _ip(
        *("-n", name, "link", "add", "name", own, "mtu", _MTU, "type", "veth"),
        *("peer", "name", port, "mtu", _MTU, "netns", switch),
    )
    _ip("-n", switch, "link", "set", port, "master", f"br{interface}", "up")
    _ip("-n", name, "address", "add", f"{address(index, interface)}/24", "dev", own)
    _ip("-n", name, "link", "set", own, "up")
    for place, device in ((name, own), (switch, port)):
        _run("tc", "-n", place, "qdisc", "replace", "dev", device, "root", *_bucket(rate_mbit))


def _bucket(rate_mbit: float) -> Sequence[str]:
    rate = f"{round(rate_mbit * 1000)}kbit"
    return ("tbf", "rate", rate, "burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES))


def _sweep() -> None:
    """Deletes what a run that was killed has left."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    for name in (line.split()[0] for line in listed.stdout.splitlines() if line.strip()):
        prefix, _, rest = name.partition("-")
        owner = rest.partition("-")[0]
        if prefix == _PREFIX and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
