"""Jobs on a real SLURM: submitted, failing, signalled, preempted, requeued, cancelled, swept."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launcher.runs import MODEL, environment, processes_with, read_metrics, read_result
from tests.slurm.local_cluster import GRACE_S, LocalCluster, local_cluster

pytestmark = pytest.mark.slurm

TRAIN = (
    *MODEL, "cluster=slurm", "trainer.val_check_interval=1000000", "trainer.precision=64-true",
    "data.microbatch_size=2", "seed=3",
)  # fmt: skip
STEPS = 300
PATIENCE_S = 300.0  # of a machine that has much else to do


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    if os.geteuid() != 0:
        pytest.skip("the daemons of SLURM are run as root")
    # A short path, for sockets, that other users may pass through.
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    folder.chmod(0o755)
    try:
        with local_cluster(folder) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Job:
    """A run that was submitted."""

    def __init__(self, cluster: LocalCluster, cwd: Path, words: Sequence[str]) -> None:
        self.cluster = cluster
        self.folder = cwd / "run"
        done = foldpipe(cluster, cwd, [*TRAIN, *words, "hydra.run.dir=run"])
        assert done.returncode == 0, done.stderr
        self.number = (self.folder / "slurm_job.txt").read_text().strip()
        assert f"job {self.number} submitted" in done.stdout

    @property
    def log(self) -> str:
        files = [*self.folder.glob("slurm-*.out"), *sorted((self.folder / "logs").iterdir())]
        return "\n".join(f"{file.name}:\n{file.read_text(errors='replace')}" for file in files)

    @property
    def result(self) -> dict[str, Any]:
        return read_result(self.folder)

    def steps(self) -> int:
        file = self.folder / "metrics.csv"
        return max(0, len(file.read_text().splitlines()) - 1) if file.is_file() else 0

    def wait_for_step(self, step: int) -> None:
        self.until(lambda: self.steps() >= step)

    def until(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, self.log
            time.sleep(0.1)

    def wait(self, *states: str) -> str:
        try:
            return self.cluster.wait(self.number, *states, timeout_s=PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None

    def field(self, name: str) -> str:
        """What SLURM says of the job under a name."""
        shown = self.cluster.ask("scontrol", "--oneliner", "show", "job", self.number)
        return dict(word.partition("=")[::2] for word in shown.split())[name]

    def processes(self) -> dict[int, str]:
        """The ranks, and everything else that runs inside the job."""
        return processes_with(f"SLURM_JOB_ID={self.number}")

    def assert_continued(self, stopped: int) -> None:
        """Every step is there once, and the loss goes on as if nothing had happened."""
        rows = read_metrics(self.folder)
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        assert (self.result["status"], self.result["steps"]) == ("done", STEPS)
        assert f"continues {self.folder}/checkpoints/step-{stopped:08d}.ckpt" in self.log

    def stopped_at(self) -> int:
        """The step of the checkpoint with which a preempted attempt has ended."""
        self.until(lambda: self.cluster.state(self.number) == "PENDING")
        result = self.result
        assert result["status"] == "preempted"
        assert Path(str(result["checkpoint"])).is_dir()
        return int(result["steps"])


def foldpipe(
    cluster: LocalCluster, cwd: Path, words: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    cwd.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "launcher", *words],
        cwd=cwd,
        env=environment(cwd, **cluster.environment),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def uninterrupted(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two pipelines of two ranks on two nodes, to the end."""
    job = Job(
        cluster,
        tmp_path_factory.mktemp("whole"),
        ["pp=2", "dp=2", "cluster.nodes=2", "cluster.time=10", f"trainer.max_steps={STEPS}"],
    )
    assert job.wait("COMPLETED", "FAILED") == "COMPLETED", job.log
    return job


def begun(cluster: LocalCluster, cwd: Path, *words: str) -> Job:
    """The same run, in the middle of it."""
    job = Job(
        cluster, cwd, ["pp=2", "dp=2", "cluster.nodes=2", f"trainer.max_steps={STEPS}", *words]
    )
    job.wait("RUNNING")
    job.wait_for_step(20)
    return job


def test_a_job_runs_to_its_end(uninterrupted):
    result = uninterrupted.result
    assert (result["status"], result["world_size"], result["steps"]) == ("done", 4, STEPS)
    # Files of the parent, which was a node of the cluster here.
    assert result["measured_bubble_ratio"] > 0
    assert "measured" in (uninterrupted.folder / "timeline.html").read_text()
    names = sorted(path.name for path in (uninterrupted.folder / "logs").glob("rank*"))
    assert names == [f"rank_{rank:05d}.log" for rank in range(4)]
    assert f"step {STEPS:>6}  loss" in (uninterrupted.folder / "logs" / names[0]).read_text()
    assert uninterrupted.processes() == {}


def test_ranks_fill_one_node_after_the_other(cluster, tmp_path):
    job = Job(cluster, tmp_path, ["pp=4", "cluster.nodes=2", "trainer.max_steps=1000000"])
    job.wait_for_step(1)
    seen = {}
    for pid in job.processes():
        with contextlib.suppress(OSError):
            text = (Path("/proc") / str(pid) / "environ").read_bytes().decode()
            given = dict(item.partition("=")[::2] for item in text.split("\0"))
            if "SLURM_PROCID" in given and "slurm_rank" in job.processes().get(pid, ""):
                seen[int(given["SLURM_PROCID"])] = int(given["SLURM_NODEID"])
    cluster.ask("scancel", job.number)
    assert seen == {0: 0, 1: 0, 2: 1, 3: 1}
    job.wait("CANCELLED")


def test_a_failing_rank_ends_the_job_and_is_named(cluster, tmp_path):
    job = Job(cluster, tmp_path, ["pp=4", "cluster.nodes=4", "trainer.max_steps=1000000"])
    job.wait_for_step(3)
    # The rank itself; its guardian is older.
    victim = max(
        pid
        for pid, command in processes_with("SLURM_PROCID=2").items()
        if "slurm_rank" in command and str(job.folder) in command
    )
    begin = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    assert job.wait("FAILED", "COMPLETED", "PENDING") == "FAILED"
    assert time.monotonic() - begin < 45
    assert job.result["status"] == "failed"
    error = job.result["error"]
    assert re.match(r"rank 2 on \S+ failed first: SIGKILL: ended by SIGKILL", error), error
    assert re.search(r"\nIt was at step \d+ in .+\.\nIts log ", error), error
    assert job.processes() == {}


def test_a_raising_rank_fails_the_job_with_its_own_words(cluster, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "checkpoints").write_text("not a folder")
    job = Job(cluster, tmp_path, ["pp=2", "trainer.max_steps=2"])
    assert job.wait("FAILED", "COMPLETED") == "FAILED"
    assert "rank 0 on " in job.result["error"]
    assert "step-00000002.ckpt was not written" in job.result["error"]


def test_usr1_requeues_and_the_run_goes_on(cluster, uninterrupted, tmp_path):
    job = begun(cluster, tmp_path)
    before = job.steps()
    cluster.ask("scancel", "--signal=USR1", job.number)
    stopped = job.stopped_at()
    assert before <= stopped < STEPS
    assert "SIGUSR1 has stopped the run" in job.log
    assert job.wait("COMPLETED", "FAILED") == "COMPLETED", job.log
    assert cluster.restarts(job.number) == 1
    job.assert_continued(stopped)
    assert_same_losses(job, uninterrupted)


def test_preemption_by_a_higher_partition_loses_no_step(cluster, uninterrupted, tmp_path):
    job = begun(cluster, tmp_path, "data.num_workers=1")
    before, begin = job.steps(), time.monotonic()
    urgent = cluster.ask(
        "sbatch", "--parsable", "--partition=high", "--nodes=4", "--exclusive",
        "--output=/dev/null", "--wrap=sleep 1",
    )  # fmt: skip
    stopped = job.stopped_at()
    assert time.monotonic() - begin < GRACE_S
    assert before <= stopped < STEPS
    assert "SIGTERM has stopped the run" in job.log
    cluster.wait(urgent, "COMPLETED")
    assert job.wait("COMPLETED", "FAILED") == "COMPLETED", job.log
    job.assert_continued(stopped)
    assert_same_losses(job, uninterrupted)


def test_the_time_limit_requeues_before_it_comes(cluster, tmp_path):
    # The signal may come up to a minute early, and ranks need their time to start.
    words = ["cluster.time=2", "cluster.signal_s=30", "trainer.max_steps=1000000"]
    job = Job(cluster, tmp_path, ["pp=2", "dp=2", "cluster.nodes=2", *words])
    job.wait_for_step(1)
    stopped = job.stopped_at()
    assert stopped > 0
    assert "SIGUSR1 has stopped the run" in job.log
    cluster.ask("scancel", job.number)


@pytest.mark.parametrize("words", [(), ("data.num_workers=1",)], ids=["", "loaders"])
def test_what_is_cancelled_writes_a_checkpoint_and_is_not_requeued(cluster, tmp_path, words):
    """SLURM's signal reaches loader processes, too."""
    job = begun(cluster, tmp_path, *words)
    cluster.ask("scancel", job.number)
    assert job.wait("CANCELLED", "PENDING") == "CANCELLED"
    job.until(lambda: job.processes() == {})
    result = job.result
    assert result["status"] == "preempted"
    assert Path(str(result["checkpoint"])).is_dir()
    time.sleep(3)
    assert cluster.state(job.number) == "CANCELLED"


def test_one_tracked_run_across_a_requeue(cluster, tmp_path):
    job = begun(cluster, tmp_path, "tracking=wandb", "trainer.max_steps=120")
    cluster.ask("scancel", "--signal=USR1", job.number)
    job.stopped_at()
    assert job.wait("COMPLETED", "FAILED") == "COMPLETED", job.log
    files = {path.stem for path in job.folder.rglob("run-*.wandb")}
    run_id = json.loads((job.folder / "resolved.json").read_text())["run_id"]
    assert files == {f"run-{run_id}"}
    assert len(list(job.folder.rglob("run-*.wandb"))) == 2


def test_a_sweep_submits_its_jobs_and_is_collected(cluster, tmp_path):
    words = [
        *TRAIN, "-m", "schedule=1f1b,gpipe", "pp=1,2", "trainer.max_steps=5", "hydra.sweep.dir=s",
    ]  # fmt: skip
    done = foldpipe(cluster, tmp_path, words)
    assert done.returncode == 0, done.stderr
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("to compare the jobs")]
    assert f"mode=collect sweep.dir={tmp_path / 's'}" in line
    numbers = [(tmp_path / "s" / str(i) / "slurm_job.txt").read_text().strip() for i in range(4)]
    assert len(set(numbers)) == 4
    for number in numbers:
        assert cluster.wait(number, "COMPLETED", "FAILED", timeout_s=PATIENCE_S) == "COMPLETED"
    collected = foldpipe(cluster, tmp_path, ["mode=collect", f"sweep.dir={tmp_path / 's'}"])
    assert (collected.returncode, collected.stderr) == (0, "")
    with (tmp_path / "s" / "sweep.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["schedule"], row["pp"], row["status"]) for row in rows] == [
        ("1f1b", "1", "done"), ("1f1b", "2", "done"), ("gpipe", "1", "done"),
        ("gpipe", "2", "done"),
    ]  # fmt: skip
    assert all(float(row["loss_last"]) > 0 for row in rows)
    assert "best by tokens_per_s" in collected.stdout


APPTAINER = """\
#!/bin/bash
# As the real one is called: options, the image, and what runs in it.
printf '%s\\n' "$*" >> "$(dirname "$0")/called"
while [ "${1%.sif}" = "$1" ]; do shift; done
shift
exec "$@"
"""


def test_an_administrators_wishes_reach_the_ranks_and_a_killed_job_is_settled(
    cluster, tmp_path, monkeypatch
):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "apptainer").write_text(APPTAINER)
    (tools / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    image = [
        "cluster.container.image=/images/torch.sif", f"cluster.container.python={sys.executable}",
        "cluster.container.mounts=['/usr:/host/usr:ro']",
    ]  # fmt: skip
    job = Job(
        cluster,
        tmp_path,
        [
            "pp=2", "cluster.nodes=2", "cluster.cpus_per_task=2", *image,
            "trainer.max_steps=1000000", "cluster.srun=['--cpu-bind=none']",
            "cluster.setup=['export SET_UP=yes','unset OMP_NUM_THREADS']",
            "cluster.mem=100M", "cluster.exclusive=true", "output.group_readable=true",
            "trainer.checkpoint_every_n_steps=5",
        ],
    )  # fmt: skip
    job.wait_for_step(10)
    assert job.field("JobName") == "1f1b-pp2-dp1"
    assert job.field("CPUs/Task") == "2"
    assert "CPUs=4" in cluster.ask("scontrol", "--oneliner", "show", "step", f"{job.number}.0")
    # srun itself listens everywhere, for the tasks' output.
    ranks = [
        pid
        for pid, text in job.processes().items()
        if "slurm_rank" in text and not text.startswith("srun ")
    ]
    for pid in ranks:
        given = environment_of(pid)
        assert (given["SET_UP"], given["OMP_NUM_THREADS"]) == ("yes", "2")
    called = (tools / "called").read_text().splitlines()
    assert len(called) == 2
    assert all("/usr:/host/usr:ro --pwd" in line for line in called)
    # Where ranks meet: one address, and nothing for whoever has no token.
    store = environment_of(ranks[0])
    address, port = store["MASTER_ADDR"], int(store["MASTER_PORT"])
    listening = {
        (found.laddr.ip, found.laddr.port)
        for pid in ranks
        for found in psutil.Process(pid).net_connections("tcp")
        if found.status == psutil.CONN_LISTEN
    }
    assert (address, port) in listening
    assert {ip for ip, _ in listening if ip in ("0.0.0.0", "::")} == set()
    with socket.create_connection((address, port), timeout=10) as stranger:
        stranger.sendall(b"\0" + struct.pack("<I", 0x3C85F7CE))
        stranger.sendall(b"\x03" + struct.pack("<Q", 6) + b"/here/")  # GET
        assert stranger.recv(1) == b""
    (script,) = (
        pid
        for pid, text in processes_with(f"SLURM_JOB_ID={job.number}").items()
        if text.endswith("slurm_script") or "slurm_script " in text
    )
    os.kill(script, signal.SIGKILL)
    assert job.wait("FAILED", "COMPLETED") == "FAILED"
    job.until(lambda: job.processes() == {})
    assert not (job.folder / "result.json").exists()
    words = [*MODEL, "mode=validate", "trainer.resume=auto", "hydra.run.dir=later"]
    done = foldpipe(cluster, tmp_path, words)
    assert done.returncode == 0, done.stderr
    assert f"{job.folder}: SLURM job {job.number} has ended (FAILED)" in done.stdout
    assert job.result["status"] in ("failed", "preempted")
    modes = {path.stat().st_mode & 0o777 for path in job.folder.rglob("*") if path.is_file()}
    assert modes == {0o640}


def test_srun_takes_the_words_for_an_image(cluster, tmp_path):
    if not cluster.knows_images:
        pytest.skip("needs gcc and SLURM's headers (libslurm-dev)")
    words = [
        "pp=2", "trainer.max_steps=1000000",
        "cluster.container.image='nvcr.io#nvidia/pytorch:25.01'",
        f"cluster.container.python={sys.executable}", "cluster.container.mounts=['/usr:/host:ro']",
    ]  # fmt: skip
    job = Job(cluster, tmp_path, words)
    job.wait_for_step(1)
    pid = next(p for p in processes_with("SLURM_PROCID=1") if p in job.processes())
    image, mounts, place = environment_of(pid)["PYXIS_SAID"].split("|")
    assert image == "nvcr.io#nvidia/pytorch:25.01"
    assert mounts.startswith(f"{tmp_path}:{tmp_path},")
    assert mounts.endswith(",/usr:/host:ro")
    assert place == str(tmp_path)
    cluster.ask("scancel", job.number)
    job.wait("CANCELLED")


def test_a_line_of_set_up_that_fails_ends_the_job_with_its_text(cluster, tmp_path):
    job = Job(cluster, tmp_path, ["pp=2", "cluster.setup=['true','ls /none/such']"])
    assert job.wait("FAILED", "COMPLETED") == "FAILED"
    job.until(lambda: "cluster.setup has failed (exit code 2): ls /none/such" in job.log)
    words = [*MODEL, "mode=validate", "trainer.resume=auto", "hydra.run.dir=new"]
    done = foldpipe(cluster, tmp_path, words)
    assert "cluster.setup has failed" in done.stdout
    assert "cluster.setup has failed" in job.result["error"]


def test_a_sweep_is_one_array_that_is_throttled(cluster, tmp_path):
    words = [
        *TRAIN, "-m", "optimizer.lr=1e-2,1e-3,1e-4", "trainer.max_steps=3", "cluster.throttle=1",
        "hydra.sweep.dir=s",
    ]  # fmt: skip
    done = foldpipe(cluster, tmp_path, words)
    assert done.returncode == 0, done.stderr
    assert "1 at a time: 3 jobs of the sweep" in done.stdout
    numbers = [(tmp_path / "s" / str(i) / "slurm_job.txt").read_text().strip() for i in range(3)]
    array = numbers[0].partition("_")[0]
    assert numbers == [f"{array}_{index}" for index in range(3)]
    shown = ("squeue", "-h", "--array", "-j", array)
    seen: set[str] = set()  # why jobs wait
    most, until = 0, time.monotonic() + PATIENCE_S
    while cluster.ask(*shown, "-o", "%i"):
        running = cluster.ask(*shown, "-t", "RUNNING", "-o", "%i")
        seen.update(cluster.ask(*shown, "-t", "PENDING", "-o", "%r").split())
        most = max(most, len(running.split()))
        assert time.monotonic() < until
        time.sleep(0.2)
    assert most == 1
    assert "JobArrayTaskLimit" in seen
    for index in range(3):
        folder = tmp_path / "s" / str(index)
        assert read_result(folder)["status"] == "done"
        assert "attempt 1 of job" in (folder / f"slurm-{array}_{index}.out").read_text()


def test_a_validation_asks_slurm(cluster, tmp_path):
    words = [*TRAIN, "mode=validate", "pp=2"]
    done = foldpipe(cluster, tmp_path, words)
    assert done.returncode == 0, done.stderr
    assert re.search(r"sbatch --test-only: would start at \S+ using \d+ processors", done.stdout)
    refused = foldpipe(cluster, tmp_path, [*words, "cluster.partition=none"])
    assert refused.returncode == 2
    assert "sbatch has refused the job" in refused.stderr
    assert cluster.ask("squeue", "-h", "--name=1f1b-pp2-dp1", "-t", "PENDING", "-o", "%i") == ""


def environment_of(pid: int) -> dict[str, str]:
    text = (Path("/proc") / str(pid) / "environ").read_bytes().decode()
    return dict(item.partition("=")[::2] for item in text.split("\0"))


def assert_same_losses(job: Job, whole: Job) -> None:
    mine, theirs = read_metrics(job.folder), read_metrics(whole.folder)
    assert [row["train_loss"] for row in mine] == [row["train_loss"] for row in theirs]
