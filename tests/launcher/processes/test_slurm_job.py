"""What the job script does around the ranks, without SLURM."""

from __future__ import annotations

import doctest
import json
import os
import shutil
from pathlib import Path

import pytest

from launcher.processes import slurm_job
from launcher.processes.failure import write_failure
from launcher.processes.local import write_outcome
from launcher.processes.task import task_umask
from launcher.rank.slurm_rank import rank_environment
from strategies.errors import DamagedCheckpointError, RunError
from tests.launcher.command_line import launch_here
from tests.launcher.runs import MODEL, launch, read_result


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    words = [*MODEL, "cluster=slurm", "cluster.submit=false", "pp=2", "hydra.run.dir=run"]
    launch(words, folder).assert_done()
    return folder / "run"


@pytest.fixture
def run_dir(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "run"))


def test_the_example_holds():
    assert doctest.testmod(slurm_job) == (0, 1)


def test_a_rank_takes_its_place_from_slurm():
    task = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_NTASKS": "8"}
    found = rank_environment(task)
    assert {"RANK": "5", "LOCAL_RANK": "1", "NODE_RANK": "2", "WORLD_SIZE": "8"}.items() <= (
        found.items()
    )


def test_a_killed_rank_is_blamed_and_not_its_peers(run_dir, capsys):
    write_failure(run_dir, 0, RunError("Connection closed by peer"))
    (run_dir / "logs" / "rank_00001.log").write_text("its last words\n")
    log = "srun: error: n1: task 1: Killed\nsrun: error: n0: task 0: Exited with exit code 1\n"
    (run_dir / "logs" / "srun.log").write_text(log)
    assert slurm_job.end(run_dir, 137) == 1
    result = read_result(run_dir)
    assert result["status"] == "failed"
    assert result["error"].startswith("rank 1 on n1 failed first: srun: Killed")
    assert "its last words" in result["error"]
    assert f"error: {result['error']}" in capsys.readouterr().out


def test_a_raising_rank_is_blamed_although_srun_names_others_first(run_dir):
    write_failure(run_dir, 1, RunError("a defect"))
    (run_dir / "logs" / "srun.log").write_text("srun: error: n0: tasks 1: Exited with exit code 1")
    assert slurm_job.end(run_dir, 1) == 1
    assert "rank 1 on" in read_result(run_dir)["error"]
    assert "a defect" in read_result(run_dir)["error"]


def test_an_srun_that_cannot_start_is_quoted(run_dir):
    (run_dir / "logs" / "srun.log").write_text("srun: error: Unable to create step: no nodes\n")
    assert slurm_job.end(run_dir, 1) == 1
    assert "no rank has said why: srun: error: Unable to create" in read_result(run_dir)["error"]


@pytest.mark.parametrize("code", [85, 137])
def test_a_committed_checkpoint_counts_whatever_srun_made_of_the_ends(code, run_dir, capsys):
    write_outcome(run_dir, {"steps": 7, "checkpoint": "/c"}, stopped_by="SIGTERM")
    assert slurm_job.end(run_dir, code) == 85
    result = read_result(run_dir)
    assert (result["status"], result["steps"], result["checkpoint"]) == ("preempted", 7, "/c")
    assert "trainer.resume=/c" in capsys.readouterr().out


def test_a_rank_that_fails_after_the_last_step_fails_the_run(run_dir):
    write_outcome(run_dir, {"steps": 7, "checkpoint": "/c"}, stopped_by=None)
    write_failure(run_dir, 1, RunError("the disk is full"))
    assert slurm_job.end(run_dir, 1) == 1
    assert "the disk is full" in read_result(run_dir)["error"]


def test_an_attempt_forgets_what_the_one_before_died_of(run_dir, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setenv("PATH", "")
    write_failure(run_dir, 1, RunError("old"))
    host, port, token = slurm_job.begin(run_dir).split()
    assert host
    assert int(port) > 1023
    assert len(token) == 32
    assert list((run_dir / "logs").iterdir()) == []
    assert "attempt 3 of job" in capsys.readouterr().err
    assert json.loads((run_dir / "resolved.json").read_text())["checkpoint"] is None


@pytest.mark.distributed
def test_an_attempt_continues_the_newest_whole_checkpoint(run_dir, checkpoint, capsys):
    folder = run_dir / "checkpoints"
    for step in (10, 20, 30):
        shutil.copytree(checkpoint, folder / f"step-{step:08d}.ckpt")
    shutil.copytree(checkpoint, folder / "step-00000040.ckpt.tmp")
    damaged = folder / "step-00000030.ckpt" / "rank_00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    slurm_job.begin(run_dir)
    task = json.loads((run_dir / "resolved.json").read_text())
    assert task["checkpoint"] == str(folder / "step-00000020.ckpt")
    said = capsys.readouterr().err
    assert f"skips {folder / 'step-00000030.ckpt'}" in said
    assert f"continues {folder / 'step-00000020.ckpt'}" in said


@pytest.mark.distributed
def test_a_checkpoint_that_ranks_find_damaged_is_skipped_in_another_attempt(
    run_dir, checkpoint, capsys
):
    folder = run_dir / "checkpoints"
    for step in (10, 20):
        shutil.copytree(checkpoint, folder / f"step-{step:08d}.ckpt")
    slurm_job.begin(run_dir)
    task = json.loads((run_dir / "resolved.json").read_text())
    newest = folder / "step-00000020.ckpt"
    assert task["checkpoint"] == str(newest)
    write_failure(run_dir, 1, DamagedCheckpointError("rank_00001.safetensors is damaged"))
    assert slurm_job.end(run_dir, 2) == slurm_job.AGAIN
    assert not (run_dir / "result.json").exists()
    slurm_job.begin(run_dir)
    task = json.loads((run_dir / "resolved.json").read_text())
    assert task["checkpoint"] == str(folder / "step-00000010.ckpt")
    assert f"skips {newest}: rank_00001.safetensors is damaged" in capsys.readouterr().err
    # Whoever restores it has it looked at anew.
    for file in newest.iterdir():
        os.utime(file)
    slurm_job.begin(run_dir)
    assert json.loads((run_dir / "resolved.json").read_text())["checkpoint"] == str(newest)


@pytest.mark.distributed
def test_a_damaged_checkpoint_that_was_asked_for_by_name_ends_the_job(run_dir, checkpoint):
    task = json.loads((run_dir / "resolved.json").read_text())
    task["checkpoint"] = task["config"]["trainer"]["resume"] = str(checkpoint)
    (run_dir / "resolved.json").write_text(json.dumps(task))
    slurm_job.begin(run_dir)
    write_failure(run_dir, 0, DamagedCheckpointError("it is damaged"))
    assert slurm_job.end(run_dir, 2) == 1
    assert "it is damaged" in read_result(run_dir)["error"]


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    (folder / "scontrol").write_text(f"#!/bin/sh\n{said}\n")
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_a_job_whose_script_was_killed_is_settled_by_whoever_comes_by(
    run_dir, tmp_path, monkeypatch, capsys
):
    scontrol(tmp_path, monkeypatch, "echo JobId=17 JobState=RUNNING")
    assert slurm_job.settle(run_dir) is None  # never submitted
    (run_dir / "slurm_job.txt").write_text("17\n")
    slurm_job.begin(run_dir)
    (run_dir / "slurm-17.out").write_text("attempt 1\nslurmstepd: error: it was killed\n\n")
    assert slurm_job.settle(run_dir) is None  # still running
    scontrol(tmp_path, monkeypatch, "echo JobId=17 JobState=FAILED Reason=x")
    told = slurm_job.settle(run_dir)
    assert told is not None
    assert told.startswith("SLURM job 17 has ended (FAILED), and its script was ended before")
    assert "Its last words: slurmstepd: error: it was killed" in told
    assert read_result(run_dir)["error"] == told
    assert read_result(run_dir)["status"] == "failed"
    assert slurm_job.settle(run_dir) is None  # done


def test_what_the_ranks_had_left_counts_when_a_job_is_settled(run_dir, tmp_path, monkeypatch):
    scontrol(tmp_path, monkeypatch, "echo 'slurm_load_jobs error: Invalid job id' >&2; exit 1")
    (run_dir / "slurm_job.txt").write_text("17\n")
    slurm_job.begin(run_dir)
    write_outcome(run_dir, {"steps": 7, "checkpoint": "/c"}, stopped_by="SIGTERM")
    told = slurm_job.settle(run_dir)
    assert told == (
        "SLURM job 17 has ended (no longer known) before its script could say how; the ranks had"
    )
    result = read_result(run_dir)
    assert (result["status"], result["steps"]) == ("preempted", 7)
    slurm_job.begin(run_dir)
    write_failure(run_dir, 1, RunError("a defect"))
    assert "rank 1 on" in str(slurm_job.settle(run_dir))
    assert "a defect" in read_result(run_dir)["error"]


def test_a_validation_tells_of_a_job_that_was_killed(run_dir, tmp_path, monkeypatch):
    scontrol(tmp_path, monkeypatch, "echo JobState=NODE_FAIL")
    (run_dir / "slurm_job.txt").write_text("17\n")
    outputs = tmp_path / "outputs" / "monday"
    shutil.move(run_dir, outputs / "killed")
    words = ["mode=validate", *MODEL, "trainer.resume=auto", "hydra.run.dir=new"]
    done = launch_here(words, tmp_path).assert_done()
    assert f"{outputs / 'killed'}: SLURM job 17 has ended (NODE_FAIL)" in done.output
    assert read_result(outputs / "killed")["status"] == "failed"


def test_a_run_that_the_group_may_read_says_so_to_its_script_and_its_ranks(tmp_path):
    words = [
        *MODEL, "cluster=slurm", "cluster.submit=false", "pp=2", "output.group_readable=true",
        "hydra.run.dir=open/run",
    ]  # fmt: skip
    done = launch_here(words, tmp_path).assert_done()
    run = tmp_path / "open" / "run"
    assert "\numask 027\n" in (run / "job.sbatch").read_text()
    assert task_umask(json.loads((run / "resolved.json").read_text())) == 0o027
    for path in (run.parent, run, *run.rglob("*")):
        found = path.stat().st_mode & 0o777
        assert found == (0o750 if path.is_dir() else 0o640), path
    tmp_path.chmod(0o700)
    done = launch_here([*words[:-1], "hydra.run.dir=open/two"], tmp_path).assert_done()
    assert f"Try chmod g+rx {tmp_path}." in done.output
