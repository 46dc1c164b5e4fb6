"""Hosts on one machine: network namespaces whose interfaces carry only so much, and their ranks.

A host is a namespace with one or two interfaces; every interface is a veth pair to a bridge in one
more namespace, the switch. Both ends of a pair are shaped by a token bucket (``tc`` tbf), so what a
host sends and what it receives are limited alike. Nothing is made outside these namespaces: to
delete them leaves nothing behind.

    python -m benchmarks.link_hosts FOLDER        (what ``run_on`` starts)
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

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
_PORT = 29400
_DEADLINE = timedelta(seconds=120)  # of what ranks wait for each other
_LIMIT_S = 600.0
_TAIL = 2000
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000


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


# --------------------------------------------------------------------------------------- the ranks


def run_on(names: Sequence[str], function: str, **arguments: Any) -> Any:
    """Runs ``module:function(rank, **arguments)`` on every host; returns what the first one does.

    The ranks have a default group of gloo on ``eth0``. A process of its own imports the module once
    and forks them, and ends them all as soon as one has failed.

    Raises:
        RuntimeError: A rank failed.
    """
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}-") as folder:
        Path(folder, "job.pickle").write_bytes(pickle.dumps((function, tuple(names), arguments)))
        log = Path(folder, "ranks.log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.link_hosts", folder],
                stdout=output,
                stderr=output,
            )
        try:
            code = process.wait(_LIMIT_S)
        finally:
            process.kill()
            process.wait()
        if code:
            raise RuntimeError(log.read_text(errors="replace")[-_TAIL:])
        return pickle.loads(Path(folder, "result.pickle").read_bytes())


def main() -> None:
    """A rank per host, each forked onto its own, and the first failure of any."""
    folder = Path(sys.argv[1])
    # Whatever ends the parent ends these, or namespaces would live on with them.
    _die_with_parent()
    function, names, arguments = pickle.loads((folder / "job.pickle").read_bytes())
    module, _, name = function.partition(":")
    called = getattr(importlib.import_module(module), name)
    importlib.import_module("benchmarks.ranks")
    gc.collect()
    gc.freeze()  # A collection before every step would else walk all that was imported.
    ranks = []
    for rank, host in enumerate(names):
        process = os.fork()
        if process == 0:
            _be_rank(rank, host, len(names), partial(called, rank, **arguments), folder)
        ranks.append(process)
    while ranks:
        process, status = os.wait()
        ranks.remove(process)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit("a rank failed")


def _be_rank(rank: int, host: str, count: int, run: Callable[[], object], folder: Path) -> NoReturn:
    code = 1
    try:
        _die_with_parent()
        with Path("/run/netns", host).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {host}")
        import torch
        import torch.distributed as dist

        from benchmarks.ranks import prepare

        torch.set_num_threads(1)
        prepare(realtime=True)  # Before other programs, where that is allowed.
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        place = f"tcp://{address(0)}:{_PORT}"
        dist.init_process_group(
            "gloo", init_method=place, rank=rank, world_size=count, timeout=_DEADLINE
        )
        result = run()
        if rank == 0:
            (folder / "result.pickle").write_bytes(pickle.dumps(result))
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
