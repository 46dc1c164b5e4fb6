"""Jobs of a sweep side by side that train a user's class, with ranks, to their end or stopped."""

from __future__ import annotations

import contextlib
import csv
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.own_project import OWN, write_project
from tests.launcher.runs import Started, launch, started, within

# The class is imported by a process of the sweep before the jobs' processes are forked.
WORDS = (
    "-m", *OWN, "model.args.width=4,8", "sweep.parallel=2", "hydra.sweep.dir=s",
    "trainer.val_check_interval=null", "trainer.enable_progress_bar=false",
)  # fmt: skip

pytestmark = pytest.mark.distributed


def statuses(folder: Path) -> list[str]:
    with (folder / "s" / "sweep.csv").open(newline="") as stream:
        return [row["status"] for row in csv.DictReader(stream)]


@contextlib.contextmanager
def training(folder: Path) -> Iterator[Started]:
    """A sweep of two jobs, both of which have made some steps."""
    with started([*WORDS, "trainer.max_steps=100000"], folder) as sweep:
        both = [folder / "s" / name / "metrics.csv" for name in "01"]
        assert within(150, lambda: all(f.is_file() and f.read_text().count("\n") > 2 for f in both))
        yield sweep


def test_jobs_side_by_side_train_a_class_of_the_users(tmp_path):
    write_project(tmp_path)
    launch([*WORDS, "trainer.max_steps=4"], tmp_path, timeout_s=250).assert_done()
    assert statuses(tmp_path) == ["done", "done"]


@pytest.mark.full  # Every day: compose/test_job_pool for the jobs, rank/test_stopping for a run.
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 85)],
)
def test_a_signal_ends_them_with_their_checkpoints(number, code, tmp_path):
    write_project(tmp_path)
    with training(tmp_path) as sweep:
        sweep.process.send_signal(number)
        assert sweep.finish(60).code == code
    status = {130: "interrupted", 85: "preempted"}[code]
    assert statuses(tmp_path) == [status, status]
    assert all(list((tmp_path / "s" / name / "checkpoints").glob("step-*.ckpt")) for name in "01")


@pytest.mark.full  # test_processes.py interrupts a single run twice.
def test_ctrl_c_twice_ends_them_at_once_and_leaves_the_table(tmp_path):
    write_project(tmp_path)
    with training(tmp_path) as sweep:
        sweep.process.send_signal(signal.SIGINT)
        sweep.process.send_signal(signal.SIGINT)
        done = sweep.finish(60)
    assert done.code == 130
    assert statuses(tmp_path) == ["interrupted", "interrupted"]
    assert "Traceback" not in done.errors
