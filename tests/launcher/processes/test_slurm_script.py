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
        "--job-name=default",
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
    (line,) = [x for x in text.replace("\\\n", "").splitlines() if x.startswith("srun")]
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


@pytest.mark.parametrize("key", ["partition", "account", "time", "extra", "nodes", "signal_s"])
def test_hostile_values_are_refused(key):
    for value in HOSTILE:
        given = [f"--qos={value}"] if key == "extra" else value
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
        (["cluster=slurm", "cluster.time=1h"], "Try cluster.time=24:00:00."),
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
