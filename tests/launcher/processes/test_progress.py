"""The median rule by which jobs of a sweep are ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.processes.preempted import PrunedError
from launcher.processes.progress import ProgressView, Pruner


class Heard(ProgressView):
    def __init__(self):
        super().__init__(enabled=False)
        self.events = []

    def __call__(self, event):
        self.events.append(event)


def train(folder: Path, job: str, loss: float, *, steps=(10,), least=2, begin=0, last=20) -> int:
    """Feeds steps with one loss; the step at which the job was ended, or the last."""
    pruner = Pruner(Heard(), folder, job, steps, least)
    pruner({"kind": "start", "step": begin, "max_steps": last})
    for step in range(begin + 1, last + 1):
        try:
            pruner({"kind": "step", "step": step, "loss": loss})
        except PrunedError as error:
            assert error.figures == {"steps": step, "loss_last": loss}
            return step
    return last


def test_a_job_above_the_median_of_the_others_ends_at_that_step(tmp_path):
    assert [train(tmp_path, str(job), loss) for job, loss in enumerate((3.0, 5.0, 4.5, 3.5))] == [
        20, 20, 10, 20,
    ]  # fmt: skip
    assert (tmp_path / "pruning.csv").read_text().splitlines() == [
        "step,job,train_loss,median,verdict",
        "10,0,3,3,goes on",
        "10,1,5,3,goes on",
        "10,2,4.5,4,pruned",
        "10,3,3.5,4.5,goes on",
    ]


def test_nobody_is_judged_before_so_many_others_have_come_so_far(tmp_path):
    assert [train(tmp_path, str(job), loss, least=3) for job, loss in enumerate((1, 2, 3, 4))] == [
        20, 20, 20, 10,
    ]  # fmt: skip


def test_equal_jobs_go_on(tmp_path):
    assert [train(tmp_path, str(job), 2.0) for job in range(5)] == [20] * 5


def test_the_score_is_the_mean_over_the_last_tenth(tmp_path):
    pruner = Pruner(Heard(), tmp_path, "a", [20], 2)
    for step, loss in enumerate([9.0] * 18 + [2.0, 4.0, 100.0], start=1):
        pruner({"kind": "step", "step": step, "loss": loss})
    assert "20,a,3,3,goes on" in (tmp_path / "pruning.csv").read_text()


def test_steps_that_are_not_logged_are_judged_by_the_last_that_is(tmp_path):
    pruner = Pruner(Heard(), tmp_path, "a", [20], 2)
    for step, loss in ((8, 5.0), (16, 4.0), (24, 1.0)):
        pruner({"kind": "step", "step": step, "loss": loss})
    assert "20,a,4,4,goes on" in (tmp_path / "pruning.csv").read_text()


def test_a_job_that_goes_on_is_not_judged_for_what_is_behind_it(tmp_path):
    for job in range(3):
        train(tmp_path, str(job), 1.0, steps=(10, 15))
    assert train(tmp_path, "late", 9.0, steps=(10, 15), begin=12) == 15
    assert "10,late" not in (tmp_path / "pruning.csv").read_text()


def test_every_event_is_handed_on(tmp_path):
    view = Heard()
    pruner = Pruner(view, tmp_path, "a", [3], 2)
    events = [{"kind": "start", "step": 0}, {"kind": "note", "text": "x"},
              {"kind": "step", "step": 3, "loss": None}]  # fmt: skip
    for event in events:
        pruner(event)
    assert view.events == events


def test_the_message_names_the_figures(tmp_path):
    for job in range(2):
        train(tmp_path, str(job), 1.0)
    pruner = Pruner(Heard(), tmp_path, "z", [10], 2)
    with pytest.raises(PrunedError, match="train_loss 8 at step 10 is above 1, the median of 2"):
        pruner({"kind": "step", "step": 10, "loss": 8.0})
