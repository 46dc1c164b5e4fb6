"""Where metrics go besides metrics.csv, read back from the files themselves."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from .runs import MODEL, Finished, launch, read_metrics

pytestmark = pytest.mark.distributed

RUN = (
    *MODEL, "trainer.max_steps=6", "trainer.val_check_interval=3", "trainer.limit_val_batches=1",
    "experiment_name=tracked", "data.global_batch_size=2",
)  # fmt: skip
_BLOCK = 32768


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of a ``.wandb`` file: a 7-byte header, then blocks of LevelDB's log format."""
    data = file.read_bytes()
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.fixture(scope="module")
def wandb_run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    words = [*RUN, "pp=2", "tracking=wandb", "tracking.project=mine", "tracking.tags=[a,b]"]
    return launch(words, tmp_path_factory.mktemp("wandb")).assert_done()


@pytest.fixture(scope="module")
def history(wandb_run: Finished) -> tuple[list[dict[str, float]], object]:
    """Rows as logged, and the record that describes the run."""
    from wandb.proto import wandb_internal_pb2

    (file,) = wandb_run.folder.rglob("*.wandb")
    rows, run = [], None
    for content in wandb_records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "run":
            run = record.run
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
            )
    return rows, run


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
