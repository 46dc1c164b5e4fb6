"""The command for each node, where no scheduler starts the ranks."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Sequence

from launcher.processes.nodes import Nodes

_PORT = 29500
_LEFT_OUT = ("mode", "cluster", "cluster.nodes", "cluster.master")


def node_commands(nodes: Nodes, words: Sequence[str], *, master: str | None) -> list[str]:
    """One command line per node, the first node's first.

    A static rendezvous on purpose: torchrun's own may hand rank 0 to any node, and the order of
    ranks decides which pipeline ranks are neighbours.

    Args:
        nodes: How the ranks lie.
        words: Overrides as typed.
        master: HOST:PORT of the first node; None for this machine.
    """
    host, port = (master or f"{socket.gethostname()}:{_PORT}").split(":")
    kept = [w for w in words if w.lstrip("+").partition("=")[0] not in _LEFT_OUT]
    return [
        shlex.join(
            [
                "python", "-m", "torch.distributed.run", f"--nnodes={nodes.count}",
                f"--node-rank={node}", f"--nproc-per-node={nodes.ranks_each}",
                "--rdzv-backend=static", f"--master-addr={host}", f"--master-port={port}",
                "-m", "launcher", "cluster=torchrun", *kept,
            ]
        )
        for node in range(nodes.count)
    ]  # fmt: skip
