"""Rules of ``cluster.*``: what may stand in a job script, and what has no meaning elsewhere.

Values end up in a script that a scheduler reads, so each must match a pattern as a whole. Nothing
here or behind it hands one to a shell.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Collection

from launcher.config.decode import did_you_mean, nearest
from launcher.config.key import keys_of, shorten, spell, value_at
from launcher.config.launch import LaunchConfig
from launcher.config.running import ClusterConfig
from launcher.secrets import refuse_secret
from strategies.errors import PlanError

# Of ``cluster.*`` those that say something without SLURM, too, or are checked by themselves.
_EVERYWHERE = ("name", "timeout_s", "backend", "start", "nodes", "signal_s", "submit", "master")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,99}")
_WORDS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,99}(,[A-Za-z0-9_][A-Za-z0-9_.@-]{0,99}){0,19}")
_TIME = re.compile(
    r"[0-9]{1,6}|[0-9]{1,6}:[0-9]{1,2}|[0-9]{1,5}:[0-9]{1,2}:[0-9]{1,2}|"
    r"[0-9]{1,4}-[0-9]{1,2}(:[0-9]{1,2}){0,2}"
)
_MASTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}:[0-9]{1,5}")
_FEATURES = re.compile(r"[A-Za-z0-9_\[(][A-Za-z0-9_.,:@%+*&|()\[\]-]{0,199}")
_MEMORY = re.compile(r"[0-9]{1,9}[KMGTkmgt]?")
_RESOURCES = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,99}(,[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,99})*")
_PROGRAM = re.compile(r"[A-Za-z0-9_./~][A-Za-z0-9_./+@~-]{0,499}")
_IMAGE = re.compile(r"[A-Za-z0-9_./~][A-Za-z0-9_./:=+@#~-]{0,499}")
_MOUNT = re.compile(r"/[A-Za-z0-9_./=+@~-]{0,499}:/[A-Za-z0-9_./=+@~-]{0,499}(:[a-z,]{1,40})?")
_MOST_LINES, _MOST_LETTERS = 100, 1000
_ASSIGNED = re.compile(r"(?:^|[\s;&])([A-Za-z_]\w*)=([^\s;&]+)")
# A value that only says where the secret is to be had.
_READ_LATER = ("$", '"$', "`", "/", "~", "'/", '"/')
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
# Of srun's those that say where a task runs and what it may use, and of pyxis what an image gets.
_SRUN_NAMES = (
    "accel-bind", "container-mount-home", "container-name", "container-remap-root",
    "container-writable", "cpu-bind", "cpu-freq", "cpus-per-gpu", "exact", "exclusive",
    "gpu-bind", "gpu-freq", "gpus-per-task", "gres", "gres-flags", "hint", "mem", "mem-bind",
    "mem-per-cpu", "mem-per-gpu", "mpi", "network", "no-container-mount-home",
    "no-container-remap-root", "overcommit", "overlap", "resv-ports", "threads-per-core",
    "unbuffered", "verbose",
)  # fmt: skip
# Options that have a key: the key knows more (srun needs it, too; it is checked against others).
_WITH_KEY = ("qos", "constraint", "exclusive", "mem", "gres", "cpus-per-task")


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
    _match("time", cluster.time, _TIME, "minutes, HH:MM:SS or D-HH:MM:SS", _clock(cluster.time))
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
    _check_resources(cluster)
    _check_container(cluster)
    for option in cluster.extra:
        _check_option("extra", option, _EXTRA_NAMES, example="--nice=100")
    for option in cluster.srun:
        _check_option("srun", option, _SRUN_NAMES, example="--cpu-bind=cores")
    _check_setup(cluster.setup)


def cores_of(cluster: ClusterConfig) -> int | None:
    """Cores per rank, by their key or as an option that has always been taken."""
    given = dict(option.removeprefix("--").partition("=")[::2] for option in cluster.extra)
    asked = given.get("cpus-per-task", "")
    return int(asked) if asked.isdecimal() and int(asked) else cluster.cpus_per_task


def _check_resources(cluster: ClusterConfig) -> None:
    _match("qos", cluster.qos, _WORD, "a name of letters, digits, '_', '.', '@' and '-'", "high")
    _match("constraint", cluster.constraint, _FEATURES, "features such as a100&ib", "a100")
    _match("mem", cluster.mem, _MEMORY, "a number of megabytes, or with K, M, G or T", "64G")
    _match("gres", cluster.gres, _RESOURCES, "NAME:COUNT or NAME:TYPE:COUNT", "gpu:a100:8")
    _match("python", cluster.python, _PROGRAM, "a path or a name in PATH", "/opt/env/bin/python")
    for name in _WITH_KEY:
        field = name.replace("-", "_")
        twice = [o for o in cluster.extra if o.removeprefix("--").partition("=")[0] == name]
        if twice and getattr(cluster, field) not in (None, False):
            raise PlanError(
                f"cluster.{field}={spell(getattr(cluster, field))} and cluster.extra="
                f"{shorten(twice[0])} say the same thing twice. Try it without the second."
            )
    gpus = _gpus_in(cluster.gres)
    if gpus is not None and gpus != cluster.gpus_per_node:
        given = spell(cluster.gpus_per_node)
        raise PlanError(
            f"cluster.gres={cluster.gres} asks for {gpus} GPUs per node, and there is a rank for "
            f"each of cluster.gpus_per_node={given}. Try cluster.gpus_per_node={gpus}."
        )


def _gpus_in(gres: str | None) -> int | None:
    """GPUs per node that generic resources name; None for none of them."""
    parts = [part.split(":") for part in (gres or "").split(",")]
    counts = [
        int(words[-1]) if words[-1].isdecimal() else 1 for words in parts if words[0] == "gpu"
    ]
    return sum(counts) if counts else None


def _check_container(cluster: ClusterConfig) -> None:
    container = cluster.container
    image = container.image
    if image is None:
        for entry in keys_of(ClusterConfig, "cluster."):
            given = value_at(cluster, entry.path.partition(".")[2])
            if entry.path.startswith("cluster.container.") and given != entry.default:
                raise PlanError(
                    f"{entry.path}={shorten(given)}, but cluster.container.image=null: the ranks "
                    "run in no container. Try cluster.container.image=/images/torch.sif, or "
                    f"without {entry.path}."
                )
        return
    example = "/images/torch.sif"
    _match("container.image", image, _IMAGE, "a path or an address without blanks", example)
    _match("container.python", container.python, _PROGRAM, "a path or a name in PATH", "python3")
    for mount in container.mounts:
        rule = "SOURCE:TARGET of absolute paths, with :ro to keep it from being written"
        _match("container.mounts", mount, _MOUNT, rule, "['/data:/data:ro']")


def _check_setup(lines: Collection[str]) -> None:
    """Each line must be a whole command: the script can then say which one has failed."""
    if len(lines) > _MOST_LINES:
        raise PlanError(
            f"cluster.setup has {len(lines)} lines; up to {_MOST_LINES} are taken. Put them into a "
            "file. Try \"cluster.setup=['source /path/to/setup.sh']\"."
        )
    for line in lines:
        fix = "Try \"cluster.setup=['module load cuda','export NCCL_DEBUG=WARN']\"."
        unfit = not line.strip() or len(line) > _MOST_LETTERS or not line.isprintable()
        if unfit or line.endswith("\\"):
            raise PlanError(
                f"cluster.setup={shorten(line)}: each entry is one line of bash, of up to "
                f"{_MOST_LETTERS} printable letters. {fix}"
            )
        for name, value in _ASSIGNED.findall(line):
            if not value.startswith(_READ_LATER):
                refuse_secret(name, value, place="a line of cluster.setup")
        said = _unreadable(line)
        if said is not None:
            raise PlanError(
                f"cluster.setup={shorten(line)}: bash cannot read that as a line of its own "
                f"({shorten(said, 120)}). {fix}"
            )


@functools.cache
def _unreadable(line: str) -> str | None:
    """What bash says against a line, which it reads and does not run; None where it is fine."""
    bash = shutil.which("bash")
    if bash is None:
        return None
    read = subprocess.run([bash, "-n"], input=line, capture_output=True, text=True, check=False)
    # A here-document without its end is a warning, and would swallow the rest of the script.
    said = " ".join(read.stderr.replace(f"{bash}: ", "").split())
    return said or (None if read.returncode == 0 else "no reason given")


def _refuse_slurm_keys(config: LaunchConfig) -> None:
    cluster = config.cluster
    for entry in keys_of(ClusterConfig, "cluster."):
        given = value_at(config, entry.path)
        if entry.path.removeprefix("cluster.") not in _EVERYWHERE and given != entry.default:
            raise PlanError(
                f"{entry.path}={shorten(given)} is for cluster=slurm, but "
                f"cluster={cluster.name}. Try cluster=slurm, or without {entry.path}."
            )
    if not cluster.submit:
        raise PlanError(
            f"cluster.submit=false writes a script for cluster=slurm, but cluster={cluster.name}. "
            "Try cluster=slurm cluster.submit=false."
        )


def _clock(time: str | None) -> str:
    """What SLURM reads for ``2h``, ``90min``, ``1d12h``; a day for what nobody can read."""
    text = (time or "").replace(" ", "").lower()
    parts = re.findall(r"(\d{1,4})(d|h|m|s)[a-z]*", text)
    if not parts or re.sub(r"(\d{1,4})(d|h|m|s)[a-z]*", "", text):
        return "24:00:00"
    seconds = sum(int(n) * {"d": 86400, "h": 3600, "m": 60, "s": 1}[unit] for n, unit in parts)
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _match(
    name: str, value: str | None, pattern: re.Pattern[str], rule: str, example: str = "main"
) -> None:
    if value is not None and not pattern.fullmatch(value):
        raise PlanError(
            f"cluster.{name}={shorten(value)}: expected {rule}. Try cluster.{name}={example}."
        )


def _check_option(key: str, option: str, names: Collection[str], *, example: str) -> None:
    """One of ``cluster.extra`` or ``cluster.srun``."""
    found = _EXTRA.fullmatch(option)
    name = option.removeprefix("--").partition("=")[0]
    if found and found[1] in names:
        return
    if name in names:
        raise PlanError(
            f"cluster.{key}={shorten(option)}: expected --{name}=VALUE of letters, digits and any "
            f"of _.,:@%+*&|()[]-. Try \"cluster.{key}=['{example}']\"."
        )
    own = {"partition": "partition", "time": "time", "account": "account", "nodes": "nodes",
           "gpus-per-node": "gpus_per_node", "signal": "signal_s", "array": "throttle",
           "cpus-per-task": "cpus_per_task", "container-image": "container.image",
           "container-mounts": "container.mounts", "container": "container.image"}  # fmt: skip
    hint = did_you_mean(f"--{word}" for word in nearest(name, names))
    hint = hint or f" Try \"cluster.{key}=['{example}']\"."
    if name in own:
        hint = f" Try cluster.{own[name]}=..."
    program, says = ("sbatch", "say what a job gets") if key == "extra" else (
        "srun", "say where tasks run and what they may use"
    )  # fmt: skip
    raise PlanError(
        f"cluster.{key}={shorten(spell(option))} is no option of {program} that may be added here: "
        f"allowed are those that {says}.{hint}"
    )
