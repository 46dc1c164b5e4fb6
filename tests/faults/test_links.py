"""Row 13: links between hosts that go down, for a while or for good, and one that swallows all."""

from __future__ import annotations

import time

import pytest

from tests.faults.hosts import NAMES, Job, job_on_hosts
from tests.faults.results import record
from tests.launcher.runs import MODEL, read_metrics, read_result

pytestmark = [pytest.mark.distributed, pytest.mark.faults]

RUN = (
    *MODEL, "pp=2", "trainer.max_steps=1000000", "trainer.val_check_interval=1000000",
)  # fmt: skip
TIMEOUT_S = 5


@pytest.mark.parametrize("seconds", [3, 10])
def test_a_link_that_is_down_for_a_while_is_survived(seconds, tmp_path):
    with job_on_hosts([*RUN, "cluster.timeout_s=60"], tmp_path) as job:
        job.wait_for_step(5)
        job.pull_cable(1)
        time.sleep(seconds)
        before = job.steps
        job.plug_cable(1)
        waited = job.wait_for_step(before + 5, timeout_s=40)
        code = job.stop()
    rows = read_metrics(job.folder)
    steps = read_result(job.folder)["steps"]
    whole = [row["step"] for row in rows] == list(range(1, steps + 1))
    survived = code == 85 and whole and steps > before
    what = f"link down for {seconds} s: survived (seconds until the next steps after it)"
    record(13, what, int(survived), 1, waited)
    assert survived, (code, steps, before, job.logs)


@pytest.mark.parametrize("how", ["link down for good", "black hole"])
def test_a_link_that_is_gone_is_reported_with_the_host(how, tmp_path):
    with job_on_hosts([*RUN, f"cluster.timeout_s={TIMEOUT_S}"], tmp_path) as job:
        job.wait_for_step(5)
        cut = Job.pull_cable if how == "link down for good" else Job.black_hole
        cut(job, 1)
        began = time.monotonic()
        code = job.finish()
        took = time.monotonic() - began
    error = read_result(job.folder)["error"]
    first = error.splitlines()[0]
    doing = next(line for line in error.splitlines() if line.startswith("It was at step "))
    # Whoever gives up first names itself, what it was doing, and who is at the other end.
    named = all(host in first + doing for host in NAMES) and "rank" in doing
    passed = code == 1 and named and took <= TIMEOUT_S + 2
    record(13, f"{how}: report names the hosts (time-out {TIMEOUT_S} s)", int(passed), 1, took)
    assert passed, (took, error)
