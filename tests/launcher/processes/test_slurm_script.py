"""The text of the job script: what stands in it, and that no value can be more than a value."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.commands.submit import JOB_FILE
from launcher.config import check, from_dict
from launcher.processes.nodes import plan_nodes
from launcher.processes.slurm_script import job_script
from strategies.errors import PlanError
from tests.launcher.command_line import launch_here, run_here
from tests.launcher.runs import MODEL, launch

CLUSTER = {
    "name": "slurm", "nodes": 2, "gpus_per_node": 4, "partition": "gpu,debug", "time": "1-12:00",
    "account": "team_7", "extra": ["--qos=high", "--mem=0", "--exclusive"], "signal_s": 300,
}  # fmt: skip
SLURM = ("cluster=slurm", "cluster.submit=false", *MODEL, "hydra.run.dir=run")


def script(run_dir: str = "/data/run", cwd: str = "/home/me", **more: object) -> str:
    config = from_dict({"pp": 4, "dp": 2, "cluster": {**CLUSTER, **more}})
    return job_script(config, Path(run_dir), plan_nodes(config, dp=2), cwd=Path(cwd))


def options(text: str) -> list[str]:
    return [line[8:] for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_the_script_says_what_was_asked():
    assert options(script()) == [
        "--job-name=1f1b-pp4-dp2",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--partition=gpu,debug",
        "--time=1-12:00",
        "--account=team_7",
        "--output=/data/run/slurm-%j.out",
        "--open-mode=append",
        "--requeue",
        "--signal=USR1@300",
        "--qos=high",
        "--mem=0",
        "--exclusive",
    ]


def test_one_task_is_one_rank_and_a_failing_one_ends_all():
    text = script()
    (line,) = [x for x in text.replace("\\\n", "").splitlines() if x.strip().startswith("srun ")]
    assert "--kill-on-bad-exit=1" in line
    assert "--distribution=block:block" in line
    assert "-m launcher.rank.slurm_rank" in line
    assert f"python={sys.executable}\n" in text


def test_what_was_not_asked_for_is_not_there():
    config = from_dict({"pp": 2, "cluster": {"name": "slurm"}})
    found = job_script(config, Path("/r"), plan_nodes(config, dp=1), cwd=Path("/"))
    names = {option.partition("=")[0] for option in options(found)}
    assert not names & {"--partition", "--time", "--account", "--gpus-per-node"}


@pytest.mark.parametrize("name", ["/a b", "/a'b", "/a%j", "/a$b", "/a\nb", "/a;b", "/a#b", "/ä"])
def test_a_run_folder_that_slurm_would_not_take_is_refused(name):
    with pytest.raises(PlanError, match=r"Try hydra\.run\.dir=my_run"):
        script(run_dir=name)


@pytest.mark.parametrize("cwd", ["/a b", "/a'b\"", "/$(touch /tmp/x)", "/`x`;x", "/a\nb", "/-x"])
def test_any_working_directory_is_one_word_for_the_shell(cwd):
    text = script(cwd=cwd)
    line = text[text.index("\ncd ") + 1 : text.index(" || exit 1")]
    shown = subprocess.run(
        ["bash", "-c", f'cd() {{ printf %s "$1"; }}; {line}'], capture_output=True, text=True
    )
    assert (shown.stdout, shown.stderr) == (cwd, "")


HOSTILE = [
    "$(touch canary)", "`touch canary`", "a;touch canary", "a&&touch canary", "a|touch canary",
    "a b", "a\n#SBATCH --wrap=x", "a\ntouch canary", "a'b", 'a"b', "-a", "--wrap=x", "a\\b", "",
    "../a", "a/b", "a#b", "${HOME}x", "a\tb", "a\x00b", "ä", "x" * 5000, "~", "*", ">canary",
]  # fmt: skip


@pytest.mark.parametrize(
    "key",
    [
        "partition", "account", "time", "extra", "nodes", "signal_s", "qos", "mem", "gres",
        "constraint", "srun", "cpus_per_task", "python", "throttle",
    ],
)  # fmt: skip
def test_hostile_values_are_refused(key):
    lists = {"extra": "--nice={}", "srun": "--cpu-bind={}"}
    for value in HOSTILE:
        if key in ("gres", "python") and value in ("a/b", "../a", "~"):
            continue  # names with a slash are fine there, and quoted
        given = [lists[key].format(value)] if key in lists else value
        with pytest.raises(PlanError) as caught:
            check(from_dict({"cluster": {"name": "slurm", key: given}}))
        assert f"cluster.{key}=" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["partition", "extra"])
def test_hostile_values_on_the_command_line_execute_nothing(key, tmp_path, monkeypatch):
    for number, value in enumerate(HOSTILE[:8]):
        folder = tmp_path / str(number)
        given = f"['--qos={value}']" if key == "extra" else f"'{value}'"
        run_here([*SLURM, f"cluster.{key}={given}"], folder, monkeypatch).assert_refused()
    assert list(tmp_path.rglob("canary")) == []


@pytest.mark.parametrize(
    "option",
    [
        "--wrap=id", "--export=LD_PRELOAD=/tmp/x.so", "--propagate", "--chdir=/", "--output=/x",
        "--uid=0", "--get-user-env", "--batch=x", "--container=x", "--bb=x", "--parsable", "x.sh",
        "-p", "--qos=a --wrap=id", "--partition=x", "--requeue", "--no-requeue", "--array=1-9",
        "--ntasks=4", "--signal=KILL@1", "--wait", "--prolog=x", "--Qos=x",
    ],
)  # fmt: skip
def test_only_options_that_say_what_a_job_gets_may_be_added(option):
    with pytest.raises(PlanError, match=re.escape(f"cluster.extra={option}")):
        check(from_dict({"cluster": {"name": "slurm", "extra": [option]}}))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.partition=gpu"], "cluster.partition=gpu is for cluster=slurm"),
        (["cluster.submit=false"], "Try cluster=slurm cluster.submit=false."),
        (["cluster.nodes=2"], "Try cluster=slurm, or mode=validate"),
        (["cluster=torchrun", "cluster.nodes=2"], "Try without cluster.nodes"),
        (["cluster=torchrun", "cluster.time=10"], "is for cluster=slurm"),
        (["cluster=slurm", "mode=generate"], "Try cluster=local."),
        (["cluster=slurm", "cluster.time=1h"], "Try cluster.time=01:00:00."),
        (["cluster=slurm", "cluster.extra=['--qso=a']"], "Did you mean --qos"),
        (["cluster=slurm", "cluster.extra=['--time=9']"], "Try cluster.time="),
        (["mode=validate", "cluster.nodes=2", "cluster.master=h"], "Try cluster.master=node0:"),
        (["cluster.nods=2"], "Did you mean cluster.nodes"),
    ],
)  # fmt: skip
def test_keys_without_a_meaning_are_refused(words, message, tmp_path, monkeypatch):
    done = run_here(words, tmp_path, monkeypatch)
    done.assert_refused()
    assert message in done.errors


def test_a_script_is_written_and_not_submitted(tmp_path):
    done = launch_here([*SLURM, "pp=4", "cluster.nodes=2"], tmp_path).assert_done()
    assert done.errors == ""
    run = tmp_path / "run"
    assert sorted(path.name for path in run.iterdir()) == [
        ".hydra", "job.sbatch", "logs", "resolved.json", "schedule.csv", "schedule.txt",
        "timeline.html", "trace.json",
    ]  # fmt: skip
    assert "node 1: ranks 2-3, pp_ranks 2-3" in done.output
    assert f"to submit it: sbatch {run / 'job.sbatch'}" in done.output
    assert stat.S_IMODE((run / "job.sbatch").stat().st_mode) == 0o600
    checked = subprocess.run(["bash", "-n", run / "job.sbatch"], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_resources_have_keys_of_their_own():
    asked = {
        "extra": [], "cpus_per_task": 6, "qos": "high", "constraint": "a100&ib", "exclusive": True,
        "mem": "64G", "gres": "gpu:a100:4,nvme:1", "srun": ["--cpu-bind=cores", "--mpi=none"],
    }  # fmt: skip
    text = script(**asked)
    found = options(text)
    for option in ("--cpus-per-task=6", "--qos=high", "--constraint=a100&ib", "--exclusive",
                   "--mem=64G", "--gres=gpu:a100:4,nvme:1"):  # fmt: skip
        assert found.count(option) == 1
    assert not any(option.startswith("--gpus-per-node") for option in found)  # gres says it
    (line,) = [x for x in text.replace("\\\n", "").splitlines() if x.strip().startswith("srun ")]
    # srun has not taken it from sbatch since SLURM 22.05.
    assert "--cpus-per-task=6" in line
    assert "--cpu-bind=cores" in line
    assert "--mpi=none" in line


def test_cores_that_were_given_to_sbatch_alone_reach_srun():
    assert " --cpus-per-task=3 " in script(extra=["--cpus-per-task=3"]).replace("\\\n", " ")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gres": "gpu:2"}, r"asks for 2 GPUs per node.*Try cluster\.gpus_per_node=2\."),
        ({"qos": "a", "extra": ["--qos=b"]}, "say the same thing twice"),
        ({"srun": ["--ntasks=3"]}, "no option of srun"),
        ({"srun": ["--container-image=x"]}, r"Try cluster\.container\.image=\.\.\."),
        ({"srun": ["--output=/x"]}, "no option of srun"),
        ({"srun": ["--export=LD_PRELOAD=x"]}, "no option of srun"),
        ({"srun": ["--task-prolog=x"]}, "no option of srun"),
        ({"extra": ["--array=0-3"]}, r"Try cluster\.throttle="),
        ({"setup": ["a\nb"]}, "is one line of bash"),
        ({"setup": [" "]}, "is one line of bash"),
        ({"setup": ["module load \\"]}, "is one line of bash"),
        ({"setup": ["if true; then"]}, "bash cannot read that as a line of its own"),
        ({"setup": ["cat <<END"]}, "bash cannot read that as a line of its own"),
        ({"setup": ["export WANDB_API_KEY=abc"]}, "looks like the name of a credential"),
        ({"setup": ["true"] * 101}, "has 101 lines"),
        ({"container": {"mounts": ["/a:/b"]}}, "run in no container"),
        ({"container": {"tool": "pyxis"}}, r"cluster\.container\.tool=pyxis, but"),
        ({"container": {"image": "a b"}}, "without blanks"),
        ({"container": {"image": "x.sif", "mounts": ["data"]}}, "SOURCE:TARGET"),
        ({"container": {"image": "x.sif", "mounts": ["/a:/b,/c:/d"]}}, "SOURCE:TARGET"),
        ({"container": {"image": "-x"}}, "without blanks"),
        ({"container": {"image": "x.sif", "python": "python -c x"}}, "a name in PATH"),
    ],
)
def test_what_makes_no_sense_in_a_script_is_refused(given, message):
    with pytest.raises(PlanError, match=message) as caught:
        check(from_dict({"cluster": {"name": "slurm", **given}}))
    assert "\n" not in str(caught.value)
    assert re.search(r" (Try|Did you mean) ", str(caught.value))


def test_a_secret_that_is_read_in_the_job_is_none():
    lines = ["export WANDB_API_KEY=$(cat ~/.wandb)", 'export HF_TOKEN="$MY_TOKEN"']
    check(from_dict({"cluster": {"name": "slurm", "setup": lines}}))


def run_part(text: str, end: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The script up to a line, and what the environment is then."""
    head = text[: text.index(end)] + "env"
    return subprocess.run(["bash", "-c", head], cwd=cwd, capture_output=True, text=True)


def test_set_up_runs_before_the_ranks_and_its_first_failing_line_ends_the_job(tmp_path):
    lines = ["export A=1", "export B=$A$A OMP_NUM_THREADS=7", "cd /"]
    text = script(cwd=str(tmp_path), setup=lines)
    done = run_part(text, "umask", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"A=1", "B=11", "OMP_NUM_THREADS=7"} <= set(done.stdout.splitlines())
    failing = script(cwd=str(tmp_path), setup=["export A=1", "ls /none/such", "touch canary"])
    done = run_part(failing, "umask", tmp_path)
    assert done.returncode == 2
    assert "error: cluster.setup has failed (exit code 2): ls /none/such" in done.stderr
    assert list(tmp_path.iterdir()) == []


def in_container(**container: object) -> str:
    text = script(container={"image": "/images/torch.sif", **container}, cwd="/home/me")
    return re.sub(r" \\\n *", " ", text)


def test_an_image_is_started_by_apptainer_with_the_folders_that_a_run_needs():
    (line,) = [x for x in in_container(mounts=["/data:/in:ro"]).splitlines() if "exec" in x]
    root = Path(__file__).resolve().parents[3]
    assert f"--bind /data/run:/data/run,/home/me:/home/me,{root}:{root},/data:/in:ro " in line
    assert "--nv" in line  # for GPUs
    assert f"/images/torch.sif env PYTHONPATH={root} python -P -m launcher.rank.slurm_rank" in line
    # A run folder below the working directory needs no mount of its own.
    below = script(run_dir="/home/me/run", container={"image": "x.sif"}).replace("\\\n", " ")
    assert "--bind /home/me:/home/me," in below


def test_an_image_is_started_by_pyxis_as_options_of_srun():
    text = in_container(image="nvcr.io#nvidia/pytorch:25.01-py3", python="/opt/bin/python3")
    (line,) = [x for x in text.splitlines() if x.strip().startswith("srun --kill")]
    assert "--container-image='nvcr.io#nvidia/pytorch:25.01-py3'" in line
    assert "--container-mounts=/data/run:/data/run," in line
    assert "--container-workdir=/home/me" in line
    assert "/opt/bin/python3 -P -m launcher.rank.slurm_rank" in line
    assert "grep -q -e --container-image" in text


def test_the_tool_goes_by_the_image():
    for image in ("/x/a.sif", "docker://a/b:1", "library://a/b"):
        assert "--container-image" not in in_container(image=image)
    assert "--container-image=a.sif" in in_container(image="a.sif", tool="pyxis")
    assert '"$apptainer" exec' in in_container(image="a/b", tool="apptainer")


@pytest.mark.parametrize("image", ["a.sif", "nvcr.io/a:1"])
def test_an_image_without_its_tool_is_refused_before_anything_waits(image, tmp_path, monkeypatch):
    fake(tmp_path / "bin", "sbatch", f"touch {tmp_path}/canary; echo 17")
    fake(tmp_path / "bin", "srun", "echo 'Usage: srun'")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    words = [*(w for w in SLURM if w != "cluster.submit=false"), f"cluster.container.image={image}"]
    for mode in ("train", "validate"):
        done = launch_here([*words, f"mode={mode}"], tmp_path / "a")
        assert (done.code, list((tmp_path / "a").iterdir())) == (2, [])
        assert "is to be started by" in done.errors
        assert done.errors.count("\n") == 1
    assert not (tmp_path / "canary").exists()
    # A line of the job's own may bring it.
    setup = "cluster.setup=['module load apptainer']"
    launch_here([*words, setup, "pp=2"], tmp_path / "b").assert_done()


def test_a_job_whose_node_lacks_the_tool_says_so(tmp_path):
    text = script(cwd=str(tmp_path), container={"image": "a.sif"})
    done = run_part(text, "# scancel and", tmp_path)
    assert done.returncode == 1
    assert "error: there is neither apptainer nor singularity on" in done.stderr


def test_a_validation_asks_slurm_whether_it_would_take_the_job(tmp_path, monkeypatch):
    words = ["mode=validate", *(w for w in SLURM if w != "cluster.submit=false")]
    said = "sbatch: Job 9 to start at 2030-01-01T00:00:00 using 2 processors on nodes n0"
    fake(tmp_path / "bin", "sbatch", f"cat > {tmp_path}/script; echo '{said}' >&2")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    done = launch_here([*words, "pp=2"], tmp_path / "a").assert_done()
    assert "sbatch --test-only: would start at 2030-01-01T00:00:00 using 2 processors" in (
        done.output
    )
    assert (tmp_path / "script").read_text() in done.output
    assert "--job-name=1f1b-pp2-dp1" in done.output
    fake(tmp_path / "bin", "sbatch", "echo 'allocation failure: Invalid qos' >&2; exit 1")
    done = launch_here([*words, "pp=2"], tmp_path / "b")
    assert (done.code, list((tmp_path / "b").iterdir())) == (2, [])
    assert "sbatch has refused the job: allocation failure: Invalid qos" in done.errors
    fake(tmp_path / "bin", "sbatch", "echo 'Unable to contact slurm controller' >&2; exit 1")
    done = launch_here([*words, "pp=2"], tmp_path / "c").assert_done()
    assert "not tried out: sbatch reaches no SLURM" in done.output


def test_a_sweep_is_one_array_with_a_throttle(tmp_path, monkeypatch):
    fake(tmp_path / "bin", "sbatch", f"cat $2 >> {tmp_path}/scripts; echo 17")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    words = ["-m", "cluster=slurm", *MODEL, "hydra.sweep.dir=s", "cluster.throttle=2"]
    values = "optimizer.lr=0.1,0.01"
    done = launch_here([*words, values], tmp_path / "a").assert_done()
    sweep = tmp_path / "a" / "s"
    (array,) = [o for o in options((tmp_path / "scripts").read_text()) if "--array" in o]
    assert array == "--array=0-1%2"
    assert "job array 17 submitted, 2 at a time: 2 jobs of the sweep" in done.output
    assert [(sweep / str(n) / JOB_FILE).read_text() for n in range(2)] == [
        "17_0\n", "17_1\n",
    ]  # fmt: skip
    # Each task runs its own job's script, and writes where that one would have written.
    fake(tmp_path / "bin", "bash", f'echo "$@" > {tmp_path}/ran')
    subprocess.run(
        ["/bin/bash", sweep / "array.sbatch"],
        env={**os.environ, "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "17"},
        check=True,
    )
    assert (tmp_path / "ran").read_text() == f"{sweep}/1/job.sbatch\n"
    assert (sweep / "1" / "slurm-17_1.out").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster=local,slurm"], "Try one sweep with cluster=slurm, and one with cluster=local."),
        (["cluster=slurm", "cluster.throttle=2,3"], "is about the whole sweep"),
    ],
)
def test_what_a_sweep_has_only_one_of_is_no_choice(words, message, tmp_path, monkeypatch):
    done = run_here(["-m", *MODEL, *words], tmp_path, monkeypatch)
    done.assert_refused()
    assert message in done.errors


def test_jobs_of_other_sizes_are_an_array_each(tmp_path):
    words = ["-m", "cluster=slurm", "cluster.submit=false", *MODEL, "hydra.sweep.dir=s"]
    done = launch_here([*words, "pp=1,2"], tmp_path).assert_done()
    found = [options((tmp_path / "s" / f"array_{n}.sbatch").read_text())[1] for n in range(2)]
    assert found == ["--array=0", "--array=1"]
    assert done.output.count("not submitted (cluster.submit=false): 1 job of the sweep") == 2


def fake(folder: Path, name: str, text: str) -> None:
    """A program of ours under a name of SLURM's."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def test_the_script_is_handed_over_as_one_argument(tmp_path, monkeypatch):
    fake(tmp_path / "bin", "sbatch", f'printf "%s\\n" "$#" "$@" > {tmp_path}/said; echo "17;here"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    words = [w for w in SLURM if w != "cluster.submit=false"]
    done = launch_here([*words, "pp=2"], tmp_path / "a").assert_done()
    run = tmp_path / "a" / "run"
    assert (tmp_path / "said").read_text().splitlines() == ["2", "--parsable", f"{run}/job.sbatch"]
    assert "job 17 submitted: 2 ranks" in done.output
    assert f"tail -F {run}/logs/rank_00000.log {run}/slurm-17.out" in done.output
    assert "scancel 17" in done.output
    assert (run / JOB_FILE).read_text() == "17\n"


def test_what_slurm_refuses_leaves_nothing(tmp_path, monkeypatch):
    fake(tmp_path / "bin", "sbatch", "echo 'sbatch: error: invalid partition: nope' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    words = [w for w in SLURM if w != "cluster.submit=false"]
    done = launch_here([*words, "cluster.partition=nope"], tmp_path / "a")
    assert done.code == 2
    assert done.errors.startswith("error: sbatch has refused the job: sbatch: error: invalid part")
    assert done.errors.count("\n") == 1
    assert list((tmp_path / "a").iterdir()) == []


def test_without_slurm_the_fix_is_named(tmp_path, monkeypatch):
    words = [w for w in SLURM if w != "cluster.submit=false"]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    done = launch_here(words, tmp_path / "a")
    assert done.code == 2
    assert "cluster.submit=false, which only writes the script" in done.errors
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.parametrize(("requeues", "srun"), [(True, "true"), (False, "kill -TERM $PPID")])
def test_the_script_runs_in_any_folder_and_requeues_unless_cancelled(requeues, srun, tmp_path):
    """The real script, with programs of ours in SLURM's place."""
    cwd = tmp_path / "a b$(touch canary)'`touch canary`"
    launch([*SLURM[:-1], f"hydra.run.dir={tmp_path}/run", "pp=2"], cwd).assert_done()
    outcome = '{"stopped_by": "SIGUSR1", "steps": 3, "checkpoint": "c"}'
    run = tmp_path / "run"
    fake(tmp_path / "bin", "srun", f"pwd > {tmp_path}/pwd; echo $MASTER_ADDR $MASTER_PORT > "
         f"{tmp_path}/master; echo '{outcome}' > {run}/outcome.json; {srun}; exit 85")  # fmt: skip
    fake(tmp_path / "bin", "scontrol", f'echo "$@" >> {tmp_path}/scontrol; echo NodeAddr=10.1.2.3')
    fake(tmp_path / "bin", "sleep", f"echo $@ > {tmp_path}/waited")
    done = subprocess.run(
        ["bash", run / "job.sbatch"],
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "9"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 85, done.stderr
    assert (tmp_path / "pwd").read_text() == f"{cwd}\n"
    address, port = (tmp_path / "master").read_text().split()
    assert address == "10.1.2.3"
    assert 1024 <= int(port) < 65536
    assert ("requeue 9" in (tmp_path / "scontrol").read_text()) is requeues
    assert (tmp_path / "waited").exists() is requeues  # for the end that the requeue brings
    assert "SIGUSR1 has stopped the run after step 3" in done.stdout
    assert '"status": "preempted"' in (run / "result.json").read_text()
    assert list(tmp_path.rglob("canary")) == []
