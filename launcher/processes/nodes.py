"""How ranks lie on nodes: in order, as many on each.

Global rank = (pp_rank * dp + dp_rank) * tp + tp_rank, and ranks fill one node after the other:
those that share matrices stay together, and a pipeline crosses nodes as seldom as it can.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from launcher.config import LaunchConfig
from launcher.config.decode import did_you_mean, nearest
from launcher.config.key import shorten
from strategies.errors import PlanError


@dataclass(frozen=True, slots=True)
class Nodes:
    """Machines of one run."""

    count: int
    ranks_each: int
    tp: int
    dp: int

    def describe(self) -> list[str]:
        """A line per node (of many the first and the last): its ranks, and their pipeline ranks."""
        shown = range(self.count) if self.count <= 8 else (0, 1, self.count - 1)
        return [self._line(node) for node in shown]

    def note(self) -> str | None:
        """What is slow about it; None if nothing is."""
        if self.tp > 1 and self.count > 1 and self.ranks_each % self.tp:
            return (
                f"note: tp={self.tp} shares matrices between nodes of {self.ranks_each} ranks, "
                "which is slow: tp should divide the ranks of a node"
            )
        return None

    def _line(self, node: int) -> str:
        first = node * self.ranks_each
        last = first + self.ranks_each - 1
        share = self.dp * self.tp
        begin, end = first // share, last // share
        pipeline = f"pp_rank {begin}" if begin == end else f"pp_ranks {begin}-{end}"
        ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
        return f"node {node}: {ranks}, {pipeline}"


def plan_nodes(config: LaunchConfig, *, dp: int) -> Nodes:
    cluster = config.cluster
    world = config.pp * dp * config.tp
    asked = f"pp={config.pp} * dp={dp}" + (f" * tp={config.tp}" if config.tp > 1 else "")
    per_node = cluster.gpus_per_node
    if per_node is not None and world != cluster.nodes * per_node:
        fit = world / per_node
        fit_dp = max(1, cluster.nodes * per_node // (config.pp * config.tp))
        nodes = f"cluster.nodes={int(fit)}" if fit.is_integer() else f"dp={fit_dp}"
        raise PlanError(
            f"{asked} = {world} ranks do not fill cluster.nodes={cluster.nodes} * "
            f"cluster.gpus_per_node={per_node} = {cluster.nodes * per_node} GPUs, one rank each. "
            f"Try {nodes}, or cluster.nodes=1 cluster.gpus_per_node={world}."
        )
    if world % cluster.nodes:
        fit_nodes = next(n for n in range(min(cluster.nodes, world), 0, -1) if world % n == 0)
        raise PlanError(
            f"{asked} = {world} ranks cannot be spread evenly over cluster.nodes={cluster.nodes}. "
            f"Try cluster.nodes={fit_nodes}."
        )
    return Nodes(cluster.nodes, world // cluster.nodes, config.tp, dp)


def asked_world(config: LaunchConfig) -> int | None:
    """Ranks that the cluster has room for; None on this machine."""
    cluster = config.cluster
    if cluster.name == "torchrun":
        # Set by torchrun; where it has started nothing yet, there is nothing to fill.
        return int(os.environ.get("WORLD_SIZE", config.pp * config.tp))
    if cluster.name == "slurm":
        if cluster.gpus_per_node is None:
            raise PlanError(
                "dp=auto fills the GPUs of cluster=slurm, and cluster.gpus_per_node is null. "
                "Try cluster.gpus_per_node=8, or dp=2."
            )
        return cluster.nodes * cluster.gpus_per_node
    return None


# The command for each node, where no scheduler starts the ranks.

_PORT = 29500
_LEFT_OUT = ("mode", "cluster", "cluster.nodes", "cluster.master")


def node_commands(nodes: Nodes, words: Sequence[str], *, master: str | None) -> list[str]:
    """One command line per node, the first node's first.

    A static rendezvous on purpose: torchrun's own may hand rank 0 to any node, and the order of
    ranks decides which pipeline ranks are neighbours.

    ``master``: HOST:PORT of the first node; None for this machine.
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


# --------------------------------------------------------------------------------------- variables
# What ranks would end on with a trace of torch or gloo, when a minute of waiting has passed.


def check_variables(environment: Mapping[str, str]) -> None:
    """Refuses variables that libraries of the ranks do not understand.

    Raises:
        PlanError: An interface that this machine does not have, or a word that torch does not know.
    """
    interfaces = environment.get("GLOO_SOCKET_IFNAME", "")
    known = [name for _, name in socket.if_nameindex()]
    for name in interfaces.split(",") if interfaces else ():
        if name not in known:
            fix = (*nearest(name, known), "lo" if "lo" in known else known[0])[0]
            raise PlanError(
                f"GLOO_SOCKET_IFNAME={shorten(interfaces)}: this machine has no interface "
                f"{shorten(name)}, only {', '.join(known)}. Try GLOO_SOCKET_IFNAME={fix}, or unset "
                "GLOO_SOCKET_IFNAME."
            )
    level = environment.get("TORCH_DISTRIBUTED_DEBUG")
    if level is not None and level.upper() not in _LEVELS:
        raise PlanError(
            f"TORCH_DISTRIBUTED_DEBUG={shorten(level)}: torch knows {', '.join(_LEVELS)}. "
            "Try TORCH_DISTRIBUTED_DEBUG=INFO, or unset TORCH_DISTRIBUTED_DEBUG."
        )
    for word in environment.get("TORCH_LOGS", "").split(","):
        name = word.strip().lstrip("+-").partition(":")[0]
        names = _log_names() if name and name != "help" else ()
        if names and name not in names and not _is_module(name):
            hint = did_you_mean(nearest(name, names))
            raise PlanError(
                f"TORCH_LOGS={shorten(environment['TORCH_LOGS'])}: torch has no log called "
                f"{shorten(name)}.{hint} Try TORCH_LOGS=help, or unset TORCH_LOGS."
            )


_LEVELS = ("OFF", "INFO", "DETAIL")


def _log_names() -> tuple[str, ...]:
    """As torch registers them; read, because the parent does not import it. () where it is not."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return ()
    file = Path(torch.origin).parent / "_logging" / "_registrations.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return tuple(re.findall(r'register_(?:log|artifact)\(\s*"([^"]+)"', text))


def _is_module(name: str) -> bool:
    try:
        return find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
