"""Where metrics go besides metrics.csv, read back from the files themselves."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from launcher.compose.job_start import grouped
from launcher.config import LaunchConfig
from launcher.rank.trackers import Tracked, build_loggers
from tests.launcher.runs import MODEL, Finished, launch, read_metrics
from tests.launcher.wandb_log import read_records, rows_and_run

pytestmark = pytest.mark.distributed

RUN = (
    *MODEL, "trainer.max_steps=6", "trainer.val_check_interval=3", "trainer.limit_val_batches=1",
    "experiment_name=tracked", "data.global_batch_size=2",
)  # fmt: skip
CANARY = "canary-5f1d20-do-not-copy-this-anywhere-"
OURS = ("lr", "grad_norm", "step_time_s", "tokens_per_s", "bubble_ratio", "peak_memory_bytes_max",
        "skipped_steps")  # fmt: skip


@pytest.fixture(scope="module")
def wandb_run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    words = [*RUN, "pp=2", "tracking=wandb", "tracking.project=mine", "tracking.tags=[a,b]",
             "tracking.offline=true", "trainer.checkpoint_every_n_steps=3"]  # fmt: skip
    secrets = {"WANDB_API_KEY": CANARY, "HF_TOKEN": CANARY}
    return launch(words, tmp_path_factory.mktemp("wandb"), **secrets).assert_done()


@pytest.fixture(scope="module")
def records(wandb_run: Finished) -> list[Any]:
    (file,) = wandb_run.folder.rglob("*.wandb")
    return read_records(file)


@pytest.fixture(scope="module")
def history(records: list[Any]) -> tuple[list[dict[str, Any]], Any]:
    return rows_and_run(records)


def test_the_terminal_says_where_wandb_keeps_a_run_and_how_to_bring_it_there(wandb_run):
    (folder,) = wandb_run.folder.rglob("offline-run-*")
    lines = [line for line in wandb_run.output.splitlines() if line.startswith("wandb: ")]
    assert lines == [f"wandb: offline, in {folder}", f"wandb: wandb sync {folder}"]


def test_a_training_goes_on_where_wandb_has_no_room(tmp_path, monkeypatch):
    said: list[str] = []
    tracked = Tracked([], tmp_path, said.append)
    row = {"step": 1, "lr": 0.1}

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tracked, "_checkpoints", full)
    tracked.row(row, [])
    tracked.row(row, [])  # told once
    assert len(said) == 1
    assert said[0].startswith("warning: wandb's folders take no more ([Errno 28] No space left")


def test_wandb_without_a_key_writes_every_step_locally(wandb_run, history):
    rows, _ = history
    written = {
        int(row["trainer/global_step"]): row["train_loss"] for row in rows if "train_loss" in row
    }
    losses = [row["train_loss"] for row in read_metrics(wandb_run.folder)]
    assert list(written.values()) == pytest.approx(losses, rel=1e-5)
    assert len(losses) == 6
    validated = [row["val_loss"] for row in rows if "val_loss" in row]
    known = [row["val_loss"] for row in read_metrics(wandb_run.folder) if row["val_loss"]]
    assert validated == pytest.approx(known, rel=1e-5)
    assert len(known) == 2


def test_wandb_knows_the_run(wandb_run, history):
    _, run = history
    assert run.project == "mine"
    assert list(run.tags) == ["a", "b"]
    assert run.run_group == "tracked"
    assert run.display_name == wandb_run.folder.name
    settings = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert settings["pp"] == 2
    assert settings["model"]["hidden"] == 16


def test_wandb_has_every_figure_of_every_step(wandb_run, history):
    rows, _ = history
    for name in OURS:
        found = {int(r["trainer/global_step"]) + 1: r[name] for r in rows if name in r}
        known = {int(r["step"]): r[name] for r in read_metrics(wandb_run.folder) if name in r}
        assert len(known) == 6
        assert found == pytest.approx(known, rel=1e-5), name


def test_wandb_has_the_memory_of_every_rank(wandb_run, history):
    rows, _ = history
    peaks = [
        [row[f"peak_memory_bytes/rank_{rank:05d}"] for rank in (0, 1)]
        for row in rows
        if "peak_memory_bytes_max" in row
    ]
    assert [max(pair) for pair in peaks] == [
        row["peak_memory_bytes_max"] for row in read_metrics(wandb_run.folder)
    ]


def test_wandb_has_the_timeline_as_a_page_and_as_a_picture(wandb_run, history):
    rows, _ = history
    (row,) = [row for row in rows if "timeline/path" in row]
    (folder,) = (wandb_run.folder / "wandb").glob("offline-run-*/files")
    page, picture = (
        (folder / row[f"{name}/path"]).read_bytes() for name in ("timeline", "timeline_image")
    )
    assert (row["timeline/_type"], row["timeline_image/_type"]) == ("html-file", "image-file")
    assert row["timeline/sha256"] == hashlib.sha256(page).hexdigest()
    assert re.findall("<section><h2>(.*?)</h2>", page.decode()) == ["predicted", "measured"]
    assert row["timeline_image/sha256"] == hashlib.sha256(picture).hexdigest()
    assert picture.startswith(b"\x89PNG")


def test_wandb_has_the_manifest_of_every_checkpoint(wandb_run, records):
    artifacts = {
        next(a for a in record.artifact.aliases if a != "latest"): json.loads(
            record.artifact.metadata
        )
        for record in records
        if record.WhichOneof("record_type") == "artifact"
    }
    assert sorted(artifacts) == ["step-00000003", "step-00000006"]
    for name, metadata in artifacts.items():
        path = wandb_run.folder / "checkpoints" / f"{name}.ckpt"
        manifest = json.loads((path / "manifest.json").read_text())
        assert metadata["path"] == str(path)
        assert metadata["files"] == manifest["files"]
        assert metadata["step"] == int(name[-8:])
        assert metadata["layout"] == {"pp": 2, "dp": 1, "tp": 1, "world_size": 2}


def test_a_key_in_the_environment_is_in_no_file(wandb_run):
    files = [path for path in wandb_run.cwd.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
    assert CANARY not in wandb_run.output + wandb_run.errors


def test_a_requeued_training_stays_one_run(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    config = replace(LaunchConfig(), tracking=replace(LaunchConfig().tracking, name="wandb"))
    (tmp_path / "resolved.json").write_text('{"run_id": "0badcafe"}')
    for offline in (True, False):
        given = replace(config, tracking=replace(config.tracking, offline=offline))
        (logger,) = build_loggers(given, tmp_path)
        options = logger._wandb_init
        assert options["id"] == "0badcafe"
        assert options["resume"] == "allow"
        assert options["settings"].console == "off"


def test_runs_of_a_sweep_are_a_group(tmp_path):
    folder = tmp_path / "2026-01-02" / "03-04-05"
    config = replace(LaunchConfig(), experiment_name="mine")
    assert grouped(config, folder).tracking.group == "mine 2026-01-02 03-04-05"
    given = replace(config, tracking=replace(config.tracking, group="theirs"))
    assert grouped(given, folder) is given


def test_wandb_files_are_private_and_in_the_run_folder(wandb_run):
    assert [path.name for path in wandb_run.cwd.iterdir() if not path.name.startswith(".")] == [
        "outputs"
    ]
    files = list((wandb_run.folder / "wandb").rglob("*"))
    assert files
    for path in files:
        assert path.is_symlink() or path.stat().st_mode & 0o077 == 0, path


@pytest.mark.full
def test_tensorboard_gets_every_step(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    done = launch([*RUN, "tracking=tensorboard"], tmp_path).assert_done()
    (file,) = (done.folder / "tensorboard").glob("events.out.tfevents.*")
    found: dict[str, list[float]] = {}
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            number = value.tensor.float_val[0] if value.tensor.float_val else value.simple_value
            found.setdefault(value.tag, []).append(number)
    rows = read_metrics(done.folder)
    assert found["train_loss"] == pytest.approx([row["train_loss"] for row in rows], rel=1e-5)
    known = [row["val_loss"] for row in rows if row["val_loss"]]
    assert found["val_loss"] == pytest.approx(known, rel=1e-5)
    for name in OURS:
        assert found[name] == pytest.approx([row[name] for row in rows], rel=1e-5), name
    assert len(found["peak_memory_bytes/rank_00000"]) == len(rows)
