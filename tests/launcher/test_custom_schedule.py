"""``schedule=custom schedule.file=...`` from the command line and in somebody's own script."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from launcher.config import from_dict
from launcher.resolve import resolve
from strategies.plan import read_schedule_file
from tests.launcher.command_line import launch_here, run_here
from tests.launcher.runs import MODEL, launch, read_metrics

PLAIN = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
CUSTOM = ("schedule=custom", "schedule.file=my.csv", "pp=2")
UNIFORM = ("mode=simulate", "costs=uniform")


def write(folder: Path, text: str = PLAIN, name: str = "my.csv") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text, encoding="utf-8", newline="")
    return path


def test_a_file_is_simulated_and_comes_out_as_it_went_in(tmp_path):
    write(tmp_path, "\ufeff" + PLAIN.replace("\n", ",,\r\n"))
    done = launch_here((*UNIFORM, *CUSTOM), tmp_path).assert_done()
    result = done.result
    assert (result["schedule"], result["num_microbatches"], result["makespan"]) == ("custom", 2, 9)
    assert (done.folder / "schedule.csv").read_text() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("schedule", "more"),
    [("interleaved_1f1b", ()), ("zb_v", ("costs.p2p=0.25",)), ("dualpipe", ("costs.fused=2.5",))],
)
def test_the_csv_of_a_run_runs_again_with_the_same_figures(schedule, more, tmp_path):
    words = (*UNIFORM, "pp=4", "num_microbatches=8", "costs.grad_reduce=2", *more)
    first = launch_here((*words, f"schedule={schedule}"), tmp_path / "a").assert_done()
    shutil.copy(first.folder / "schedule.csv", write(tmp_path / "b"))
    again = launch_here((*words, "schedule=custom", "schedule.file=my.csv"), tmp_path / "b")
    chosen = {"schedule": "custom", "group": None}
    assert again.assert_done().result == {**first.result, **chosen}
    name = "schedule.csv"
    assert (again.folder / name).read_text() == (first.folder / name).read_text()


def test_validate_checks_a_file_and_starts_nothing(tmp_path):
    write(tmp_path)
    done = launch_here(("mode=validate", *MODEL, *CUSTOM), tmp_path).assert_done()
    assert done.output.rstrip().endswith("valid: nothing was started")
    assert "schedule.file=my.csv" in done.output


REFUSED = [
    ((), "0F0,0Fgarbage\n", "my.csv, line 1, column 2: '0Fgarbage' is not an instruction."),
    ((), PLAIN + "2F0,2B0\n", "my.csv, line 3, column 1: a line is a rank, and pp=2 has none"),
    (("pp=3",), PLAIN, "my.csv, line 2, column 1: this is the last line, for rank 1, but pp=3"),
    ((), PLAIN.replace("1B1", "1B0"), "my.csv, line 2, column 5: 1B0 stands a second time on rank"),
    ((), PLAIN.replace("1B1", ""), "my.csv, line 2, column 4: 1F1 on rank 1 has no whole backw"),
    ((), PLAIN.replace("1F1", ""), "my.csv, line 2, column 5: 1B1, but no line runs 1F1."),
    ((), PLAIN.replace("F1", "F2").replace("B1", "B2"),
     "my.csv, line 1, column 2: no rank runs 0F1, and num_microbatches=3 go through every stage. "
     "Write 0F1, and 0B1, or 0I1 and 0W1."),
    ((), PLAIN.replace("0F1,", "0F1,0SEND_F1,"), "my.csv, line 1, column 3: 0SEND_F1 has no mat"),
    (("schedule.placement=bidirectional",), PLAIN, "my.csv, line 1, column 2: 0F1 stands on rank"),
    (("num_microbatches=6",), PLAIN, "num_microbatches=6, but my.csv has 2. "
     "Try num_microbatches=2, or num_microbatches=auto."),
    (("data.global_batch_size=12", "dp=2", "data.microbatch_size=2"), PLAIN,
     "data.global_batch_size=12 / (dp=2 * data.microbatch_size=2) makes 3 microbatches, but my.csv "
     "has 2. Try data.global_batch_size=8."),
    (("schedule.layers_per_stage=[1,1,1]",), PLAIN, "schedule.layers_per_stage=[1,1,1] has 3 cou"),
    (("schedule.stages_per_rank=2",), PLAIN, "schedule.stages_per_rank=2: custom runs 1 per rank"),
    (("schedule.group=2",), PLAIN, "schedule.group=2: custom has no groups"),
    (("schedule.group=auto",), PLAIN, "schedule.group=auto: custom does not choose its group"),
    (("schedule.split_backward=true",), PLAIN.replace("0B1", "0I1,0W1"),
     "schedule.split_backward=true: custom splits its backwards by itself."),
    (("schedule.placement=ring",), PLAIN, "schedule.placement=ring: expected loop or v or bid"),
    (("schedule.file=other.csv",), PLAIN, "schedule.file=other.csv does not exist in "),
    (("schedule.file=null",), PLAIN, "schedule=custom takes its order from a file. Try schedule="),
    (("schedule=gpipe",), PLAIN, "schedule.file=my.csv belongs to schedule=custom, but schedule=g"),
    (("schedule=gpipe", "schedule.file=null", "schedule.placement=v"), PLAIN,
     "schedule.placement=v says how to read schedule.file, and there is none."),
]  # fmt: skip


@pytest.mark.parametrize(("more", "text", "expected"), REFUSED)
def test_a_wrong_file_or_key_beside_it_is_refused(more, text, expected, tmp_path, monkeypatch):
    path = write(tmp_path, text)
    given = {word.partition("=")[0] for word in more}
    words = [*more, *(word for word in CUSTOM if word.partition("=")[0] not in given)]
    done = run_here(words, tmp_path, monkeypatch)
    path.unlink()
    done.assert_refused()
    assert done.errors.startswith(f"error: {expected}")


def test_an_order_that_cannot_run_is_refused_with_its_grid(tmp_path, monkeypatch):
    path = write(tmp_path, "0F0,0B0,0F1,0B1\n1B0,1F0,1F1,1B1\n")
    done = run_here(CUSTOM, tmp_path, monkeypatch)
    path.unlink()
    assert (done.code, done.calls, done.output) == (2, [], "")
    assert done.errors == (
        "error: my.csv, line 2, column 1: 1B0 on rank 1 stands before 1F0, which it needs: the "
        "program deadlocks.\n"
        "rank 0 | 0F0 [0B0] 0F1 0B1  <-- waits for step 1B0\n"
        "rank 1 | [1B0] 1F0 1F1 1B1  <-- waits for step 1F0\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_over_files_runs_each(tmp_path):
    write(tmp_path)
    write(tmp_path, "0F0,0B0\n1F0,1B0\n", "one.csv")
    words = ("-m", *UNIFORM, "schedule=custom", "schedule.file=my.csv,one.csv", "pp=2")
    launch_here(words, tmp_path).assert_done()
    results = sorted(tmp_path.rglob("result.json"))
    assert [json.loads(p.read_text())["num_microbatches"] for p in results] == [2, 1]


def test_a_rank_runs_the_text_that_its_parent_has_read(tmp_path):
    path = write(tmp_path)
    file = read_schedule_file(str(path))
    path.write_text("0F0,0Fgarbage\n")
    config = from_dict({"pp": 2, "schedule": {"name": "custom", "file": str(path)}})
    assert resolve(config, file).num_microbatches == 2


TRAIN = (
    *MODEL, "data.microbatch_size=2", "trainer.precision=64-true", "trainer.max_steps=4",
    "trainer.val_check_interval=4", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1",
    "seed=5",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.distributed
def test_training_and_evaluation_of_a_csv_are_those_of_its_schedule(tmp_path):
    words = (*TRAIN, "schedule=interleaved_1f1b", "pp=2", "num_microbatches=4")
    first = launch(words, tmp_path / "a").assert_done()
    shutil.copy(first.folder / "schedule.csv", write(tmp_path / "b"))
    again = launch((*TRAIN, *CUSTOM), tmp_path / "b").assert_done()

    def losses(folder):
        return [row["train_loss"] for row in read_metrics(folder)]

    assert losses(again.folder) == losses(first.folder)
    assert again.result["val_loss"] == first.result["val_loss"]
    assert again.result["num_microbatches"] == 4
    task = json.loads((again.folder / "resolved.json").read_text())
    assert task["schedule_file"]["text"] == (first.folder / "schedule.csv").read_text()
    words = ("schedule=custom", "schedule.file=../my.csv", "pp=2")
    words = ("mode=eval", *TRAIN, *words, f"checkpoint={again.result['checkpoint']}")
    evaluated = launch(words, tmp_path / "b" / "eval").assert_done()
    assert evaluated.result["val_loss"] == first.result["val_loss"]


@pytest.mark.distributed
@pytest.mark.full
def test_a_placement_of_ones_own_trains_like_any_other(tmp_path):
    """Three stages on two ranks, and two weight copies, against one rank."""
    words = (*TRAIN, "num_microbatches=2")
    known = launch((*words, "schedule=gpipe"), tmp_path / "known").assert_done().result
    texts = {
        "uneven": "0F0,0F1,2F0,2B0,2F1,2B1,0B0,0B1\n1F0,1F1,1B0,1B1\n",
        "copies": "0F0,1F1,1B1,0B0\n0F1,1F0,1B0,0B1\n",
    }
    for name, text in texts.items():
        write(tmp_path / name, text)
        result = launch((*words, *CUSTOM), tmp_path / name).assert_done().result
        assert result["loss_last"] == pytest.approx(known["loss_last"], abs=1e-12)
        assert result["val_loss"] == pytest.approx(known["val_loss"], abs=1e-12)
