"""The job script of ``cluster=slurm``: one readable file, from checked values only.

What a user chooses stands in ``#SBATCH`` lines, which no shell reads, and in words of ``srun``, and
has matched a pattern as a whole (``launcher.config.check_cluster``). Paths are quoted. Only the
lines of ``cluster.setup`` are the user's own bash.
"""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from launcher.config import LaunchConfig
from launcher.config.check_cluster import cores_of
from launcher.config.key import shorten
from launcher.config.running import ContainerConfig
from launcher.processes.nodes import Nodes
from strategies.errors import PlanError

SCRIPT, ARRAY = "job.sbatch", "array.sbatch"
# SLURM expands % in names of logs; a blank or a quote would end a word of an #SBATCH line.
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_./=,+@:~-]*")
_AGAIN = 75  # how ``launcher.processes.slurm_job`` asks for another attempt
_ROOT = Path(__file__).resolve().parents[2]


def job_script(config: LaunchConfig, run_dir: Path, nodes: Nodes, *, cwd: Path) -> str:
    """The text of the script."""
    check_run_dir(run_dir)
    world = nodes.count * nodes.ranks_each
    degrees = f"pp={config.pp} dp={nodes.dp} tp={config.tp}"
    return f"""\
#!/bin/bash
# {config.mode} {config.schedule.name} {degrees}: {world} ranks.
# Written by foldpipe; submitted with: sbatch {shlex.quote(str(run_dir / SCRIPT))}
{_sbatch_lines(sbatch_options(config, run_dir, nodes))}

run_dir={shlex.quote(str(run_dir))}
python={shlex.quote(config.cluster.python or sys.executable)}
cd {shlex.quote(str(cwd))} || exit 1
{_setup(config.cluster.setup)}\
export PYTHONPATH={shlex.quote(str(_ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}
umask {config.output.umask:03o}
{_tool_check(config.cluster.container)}\

# scancel and an exceeded time limit signal this shell, too. It must live until the ranks have
# written their checkpoint, and must not requeue what somebody has cancelled.
cancelled=
trap 'cancelled=yes' TERM

code={_AGAIN}
while [ "$code" -eq {_AGAIN} ]; do
  # Finds the newest checkpoint of this folder, and an address and port of this node, where rank 0
  # will be. Only who knows the token reads or writes there.
  meeting=$("$python" -P -m launcher.processes.slurm_job begin "$run_dir") || exit
  read -r MASTER_ADDR MASTER_PORT FOLDPIPE_STORE <<< "$meeting"
  export MASTER_ADDR MASTER_PORT FOLDPIPE_STORE

  # One task per rank, in order over the nodes: tp innermost, pp outermost.
  {_srun(config, run_dir, cwd)} 2>> "$run_dir/logs/srun.log"
  code=$?

  # Writes result.json, and names the first failing rank. {_AGAIN}: the ranks have found the newest
  # checkpoint damaged, and the one before is taken.
  "$python" -P -m launcher.processes.slurm_job end "$run_dir" "$code"
  code=$?
done

# 85: the ranks were asked to stop, and have written a checkpoint.
if [ "$code" -eq 85 ] && [ -z "$cancelled" ]; then
  # The requeue ends this script; one that is gone before counts as a job that has failed.
  scontrol requeue "$SLURM_JOB_ID" && sleep 20
fi
exit "$code"
"""


def check_run_dir(run_dir: Path) -> None:
    if not _PLAIN_PATH.fullmatch(str(run_dir)):
        raise PlanError(
            f"The run folder {run_dir} has characters that SLURM does not take as they are: "
            "letters, digits and any of _./=,+@:~- are fine. Try hydra.run.dir=my_run."
        )


def sbatch_options(config: LaunchConfig, run_dir: Path, nodes: Nodes) -> list[str]:
    """What stands in the script's ``#SBATCH`` lines."""
    return [
        f"--job-name={job_name(config, nodes)}",
        *resources(config, nodes),
        f"--output={run_dir}/slurm-%j.out",
        *_HABITS,
        f"--signal=USR1@{config.cluster.signal_s}",
        *config.cluster.extra,
    ]


def job_name(config: LaunchConfig, nodes: Nodes) -> str:
    """``my_experiment-1f1b-pp4-dp2``: what squeue shows."""
    name = [] if config.experiment_name == "default" else [config.experiment_name]
    tp = [f"tp{config.tp}"] if config.tp > 1 else []
    tp += [f"ep{config.ep}"] if config.ep > 1 else []
    mode = [] if config.mode == "train" else [config.mode]
    words = [*name, *mode, config.schedule.name, f"pp{config.pp}", f"dp{nodes.dp}", *tp]
    return "-".join(words)


def resources(config: LaunchConfig, nodes: Nodes) -> list[str]:
    """What a job asks SLURM for; the jobs of an array must ask for the same."""
    cluster = config.cluster
    options = [f"--nodes={nodes.count}", f"--ntasks-per-node={nodes.ranks_each}"]
    cores = cluster.cpus_per_task
    if cores is not None:
        options.append(f"--cpus-per-task={cores}")
    named = cluster.gres is not None and re.search(r"(^|,)gpu\b", cluster.gres)
    if cluster.gpus_per_node is not None and not named:
        options.append(f"--gpus-per-node={cluster.gpus_per_node}")
    for name in ("gres", "mem", "constraint", "partition", "qos", "time", "account"):
        value = getattr(cluster, name)
        if value is not None:
            options.append(f"--{name}={value}")
    return [*options, *(["--exclusive"] if cluster.exclusive else [])]


_HABITS = ("--open-mode=append", "--requeue")


def _sbatch_lines(options: Iterable[str]) -> str:
    return "\n".join(f"#SBATCH {option}" for option in options)


def _setup(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    text = "\n".join(lines)
    return f"""\

# cluster.setup, on the job's first node: srun hands the variables on to every rank.
set -eE
trap 'echo "error: cluster.setup has failed (exit code $?): $BASH_COMMAND" >&2' ERR
{text}
trap - ERR
set +eE

"""


def _srun(config: LaunchConfig, run_dir: Path, cwd: Path) -> str:
    """The command that starts the ranks, a part of it in each line."""
    cores, container = cores_of(config.cluster), config.cluster.container
    # Since 22.05 srun does not take sbatch's number of cores for its tasks.
    per_task = "" if cores is None else f" --cpus-per-task={cores}"
    lines = [
        f"srun --kill-on-bad-exit=1 --wait=30 --distribution=block:block{per_task}",
        *(shlex.quote(option) for option in config.cluster.srun),
        '--output="$run_dir/logs/rank_%5t.log" --open-mode=append',
    ]
    start = '"$python"'
    if container.image is not None:
        lines += _container_words(config, run_dir, cwd)
        # Packages of this machine are none of the image's; a checkout is.
        path = f"PYTHONPATH={shlex.quote(str(_ROOT))}" if _is_checkout() else "-u PYTHONPATH"
        start = f"env {path} {shlex.quote(container.python)}"
    lines.append(f'{start} -P -m launcher.rank.slurm_rank "$run_dir"')
    return " \\\n    ".join(lines)


# The jobs of a sweep as one array: each keeps its script, and can be submitted by itself, too.


def array_options(script: str) -> tuple[str, ...]:
    """What a job's script asks of SLURM besides its name and its log."""
    options = [line[8:] for line in script.splitlines() if line.startswith("#SBATCH ")]
    return tuple(o for o in options if not o.startswith(("--job-name=", "--output=")))


def array_script(
    script: Path, options: Iterable[str], jobs: Mapping[int, Path], *, throttle: int | None
) -> str:
    """The text of a script for jobs of a sweep, by their numbers in it, that ask for the same."""
    folder = script.parent
    check_run_dir(folder)
    asked = [
        f"--job-name=sweep-{folder.name}",
        f"--array={_ranges(sorted(jobs))}" + ("" if throttle is None else f"%{throttle}"),
        f"--output={folder}/array-%A.out",
        *options,
    ]
    cases = "\n".join(f"  {index}) run_dir={path} ;;" for index, path in jobs.items())
    return f"""\
#!/bin/bash
# {len(jobs)} jobs of a sweep. Each has a script of its own, whose #SBATCH lines count only where it
# is submitted alone; what they ask for stands here.
# Written by foldpipe; submitted with: sbatch {script}
{_sbatch_lines(asked)}

case "$SLURM_ARRAY_TASK_ID" in
{cases}
esac
log=$run_dir/slurm-${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID.out
exec bash "$run_dir/{SCRIPT}" >> "$log" 2>&1
"""


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as ``--array`` has them.

    >>> _ranges([0, 1, 2, 4, 7, 8])
    '0-2,4,7-8'
    """
    words: list[str] = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        words.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(words)


# Containers.


def container_tool(container: ContainerConfig) -> str:
    """``pyxis`` or ``apptainer``."""
    if container.tool != "auto":
        return container.tool
    image = container.image or ""
    addresses = ("docker://", "oras://", "library://", "shub://", "docker-archive:")
    return "apptainer" if image.endswith(".sif") or image.startswith(addresses) else "pyxis"


def check_tool(config: LaunchConfig) -> None:
    """Refuses an image that nothing here could start, before the job waits for its turn.

    Raises:
        PlanError: The tool is not there, and ``cluster.setup`` has no line that may bring it.
    """
    container = config.cluster.container
    if container.image is None or config.cluster.setup:
        return
    tool = container_tool(container)
    asked = f"cluster.container.image={container.image} is to be started by {tool}"
    if tool == "apptainer" and not (shutil.which("apptainer") or shutil.which("singularity")):
        raise PlanError(
            f"{asked}, and there is neither apptainer nor singularity in PATH. "
            "Try \"cluster.setup=['module load apptainer']\", or cluster.container.tool=pyxis."
        )
    if tool == "pyxis" and "--container-image" not in _said(["srun", "--help"]):
        raise PlanError(
            f"{asked}, and srun --help knows no --container-image: this cluster has no pyxis. "
            "Try an image for apptainer, cluster.container.image=/images/torch.sif, or without "
            "cluster.container.image."
        )


def _container_words(config: LaunchConfig, run_dir: Path, cwd: Path) -> list[str]:
    container = config.cluster.container
    assert container.image is not None
    own = [run_dir, cwd, *([_ROOT] if _is_checkout() else [])]
    strange = [path for path in own if re.search(r"[^A-Za-z0-9_./=+@~-]", str(path))]
    if strange:
        raise PlanError(
            f"{strange[0]} cannot be mounted into a container: its name has characters other than "
            "letters, digits and _./=+@~-. Try another working directory, or hydra.run.dir=."
        )
    outer = [path for path in own if not any(path != o and path.is_relative_to(o) for o in own)]
    mounts = ",".join([*(f"{path}:{path}" for path in dict.fromkeys(outer)), *container.mounts])
    if container_tool(container) == "pyxis":
        return [
            f"--container-image={shlex.quote(container.image)}",
            f"--container-mounts={mounts} --container-workdir={cwd}",
        ]
    gpus = "" if config.cluster.gpus_per_node is None else " --nv"
    return [f'"$apptainer" exec{gpus} --bind {mounts} --pwd {cwd}', shlex.quote(container.image)]


def _tool_check(container: ContainerConfig) -> str:
    if container.image is None:
        return ""
    if container_tool(container) == "apptainer":
        return """
apptainer=$(command -v apptainer || command -v singularity) || {
  echo "error: there is neither apptainer nor singularity on $(hostname)" >&2; exit 1; }
"""
    return """
srun --help | grep -q -e --container-image || {
  echo "error: srun on $(hostname) knows no --container-image: pyxis is not there" >&2; exit 1; }
"""


def _is_checkout() -> bool:
    return (_ROOT / "pyproject.toml").is_file()


# Hands a job script to ``sbatch``: a list of arguments, never a line for a shell.

_TIMEOUT_S = 60
_NOBODY_THERE = re.compile(
    r"Could not establish a configuration source|Unable to contact|Unable to resolve|"
    r"Connection (refused|timed out)|Zero Bytes were transmitted|munge",
    re.IGNORECASE,
)


def find_sbatch() -> str:
    found = shutil.which("sbatch")
    if found is None:
        raise PlanError(
            "cluster=slurm needs sbatch, which is not on this machine's PATH. Try it on a login "
            "node, or cluster.submit=false, which only writes the script."
        )
    return found


def submit(script: Path) -> str:
    """Submits a script; returns the job's number."""
    try:
        done = subprocess.run(
            [find_sbatch(), "--parsable", str(script)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise PlanError(
            f"sbatch has not answered for {_TIMEOUT_S} s. Try squeue --me before you submit it "
            "again: the job may be there."
        ) from None
    job = done.stdout.strip().partition(";")[0]  # NUMBER[;CLUSTER]
    if done.returncode or not re.fullmatch(r"[0-9]+", job):
        raise _refused(done)
    return job


def try_out(script: str) -> str:
    """What ``sbatch --test-only`` says of a script: when and where it would start.

    Raises:
        PlanError: SLURM would refuse it.
    """
    if shutil.which("sbatch") is None:
        return "not tried out: sbatch is not on this machine"
    try:
        done = subprocess.run(
            [find_sbatch(), "--test-only"],
            input=script,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"not tried out: sbatch --test-only has not answered for {_TIMEOUT_S} s"
    said = " ".join((done.stderr or done.stdout).split())
    if done.returncode and _NOBODY_THERE.search(said):
        return f"not tried out: sbatch reaches no SLURM ({shorten(said, 120)})"
    if done.returncode:
        raise _refused(done)
    said = said.removeprefix("sbatch: ")
    # The number is of a job that there will never be.
    return f"sbatch --test-only: {re.sub(r'^Job [0-9]+ to start', 'would start', said)}"


def _refused(done: subprocess.CompletedProcess[str]) -> PlanError:
    said = " ".join((done.stderr or done.stdout).split())
    return PlanError(
        f"sbatch has refused the job: {shorten(said, 300)}. Try sinfo, which lists partitions "
        "and their limits, and other cluster.* keys."
    )


def _said(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr
