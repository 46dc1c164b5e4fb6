"""Rules of ``cluster.*``: what may stand in a job script, and what has no meaning elsewhere.

Values end up in a script that a scheduler reads, so each must match a pattern as a whole. Nothing
here or behind it hands one to a shell.
"""

from __future__ import annotations

import re
import sys

from launcher.config.decode import did_you_mean, nearest
from launcher.config.key import shorten, spell
from launcher.config.launch import LaunchConfig
from strategies.errors import PlanError

_SLURM_KEYS = ("gpus_per_node", "partition", "time", "account", "extra")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,99}")
_WORDS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,99}(,[A-Za-z0-9_][A-Za-z0-9_.@-]{0,99}){0,19}")
_TIME = re.compile(
    r"[0-9]{1,6}|[0-9]{1,6}:[0-9]{1,2}|[0-9]{1,5}:[0-9]{1,2}:[0-9]{1,2}|"
    r"[0-9]{1,4}-[0-9]{1,2}(:[0-9]{1,2}){0,2}"
)
_MASTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}:[0-9]{1,5}")
_EXTRA = re.compile(r"--([a-z][a-z-]{1,39})(=[A-Za-z0-9_][A-Za-z0-9_.,:@%+*&|()\[\]-]{0,199})?")
# Of sbatch's options those that say what a job gets, and none that runs a program, changes the
# environment or undoes a line of the script.
_EXTRA_NAMES = (
    "begin", "cluster-constraint", "clusters", "comment", "constraint", "contiguous", "core-spec",
    "cores-per-socket", "cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline", "dependency",
    "exclude", "exclusive", "gpu-bind", "gpu-freq", "gres", "gres-flags", "hint", "licenses",
    "mail-type", "mail-user", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "nice", "nodelist",
    "oversubscribe", "power", "prefer", "priority", "qos", "reservation", "sockets-per-node",
    "switches", "thread-spec", "threads-per-core", "tmp", "use-min-nodes", "wckey",
)  # fmt: skip


def check_cluster(config: LaunchConfig) -> None:
    """Raises on the first rule that ``cluster.*`` breaks."""
    cluster = config.cluster
    if cluster.name != "slurm":
        _refuse_slurm_keys(config)
    if cluster.name != "local" and cluster.start != "auto":
        raise PlanError(
            f"cluster.start={cluster.start} is for ranks that the launcher starts itself, but "
            f"cluster={cluster.name}. Try cluster=local, or without cluster.start."
        )
    if cluster.start == "fork" and sys.platform != "linux":
        raise PlanError(
            "cluster.start=fork needs Linux, where forked ranks can be made to end with their "
            "parent. Try cluster.start=fresh."
        )
    if cluster.name == "local" and cluster.nodes > 1 and config.mode != "validate":
        raise PlanError(
            f"cluster.nodes={cluster.nodes} has no meaning with cluster=local, which starts ranks "
            "on this machine. Try cluster=slurm, or mode=validate, which prints the command for "
            "each node."
        )
    if cluster.name != "local" and config.mode in ("generate", "export"):
        raise PlanError(
            f"mode={config.mode} runs on one process of this machine, not with "
            f"cluster={cluster.name}. Try cluster=local."
        )
    _match("partition", cluster.partition, _WORDS, "names of letters, digits, '_', '.', '@', '-'")
    _match("account", cluster.account, _WORD, "a name of letters, digits, '_', '.', '@' and '-'")
    _match("time", cluster.time, _TIME, "minutes, HH:MM:SS or D-HH:MM:SS", "24:00:00")
    _match("master", cluster.master, _MASTER, "HOST:PORT", "node0:29500")
    if cluster.master is not None and not 0 < int(cluster.master.rpartition(":")[2]) < 65536:
        raise PlanError(
            f"cluster.master={cluster.master}: ports are 1 to 65535. "
            "Try cluster.master=node0:29500."
        )
    if cluster.name == "torchrun" and cluster.nodes > 1 and config.mode != "validate":
        raise PlanError(
            f"cluster.nodes={cluster.nodes}: with cluster=torchrun the nodes are torchrun's. "
            "Try without cluster.nodes, or mode=validate, which prints the command for each node."
        )
    for option in cluster.extra:
        _check_extra(option)


def _refuse_slurm_keys(config: LaunchConfig) -> None:
    cluster = config.cluster
    for name in _SLURM_KEYS:
        value = getattr(cluster, name)
        if value not in (None, ()):
            raise PlanError(
                f"cluster.{name}={shorten(value)} is for cluster=slurm, but "
                f"cluster={cluster.name}. Try cluster=slurm, or without cluster.{name}."
            )
    if not cluster.submit:
        raise PlanError(
            f"cluster.submit=false writes a script for cluster=slurm, but cluster={cluster.name}. "
            "Try cluster=slurm cluster.submit=false."
        )


def _match(
    name: str, value: str | None, pattern: re.Pattern[str], rule: str, example: str = "main"
) -> None:
    if value is not None and not pattern.fullmatch(value):
        raise PlanError(
            f"cluster.{name}={shorten(value)}: expected {rule}. Try cluster.{name}={example}."
        )


def _check_extra(option: str) -> None:
    found = _EXTRA.fullmatch(option)
    name = option.removeprefix("--").partition("=")[0]
    if found and found[1] in _EXTRA_NAMES:
        return
    if name in _EXTRA_NAMES:
        raise PlanError(
            f"cluster.extra={shorten(option)}: expected --{name}=VALUE of letters, digits and any "
            f"of _.,:@%+*&|()[]-. Try cluster.extra=[\"'--qos=high'\"]."
        )
    near = nearest(name, _EXTRA_NAMES)
    own = {"partition": "partition", "time": "time", "account": "account", "nodes": "nodes",
           "gpus-per-node": "gpus_per_node", "signal": "signal_s"}  # fmt: skip
    hint = did_you_mean(f"--{word}" for word in near)
    if name in own:
        hint = f" Try cluster.{own[name]}=..."
    raise PlanError(
        f"cluster.extra={shorten(spell(option))} is no option of sbatch that may be added here: "
        f"allowed are those that say what a job gets, such as --qos=high or --mem=0.{hint}"
    )
