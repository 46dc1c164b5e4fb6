"""Where metrics go besides metrics.csv, read back from the files themselves."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.compose.job_start import tagged
from launcher.compose.session import compose_checked, hydra_session
from launcher.config import LaunchConfig
from launcher.processes.task import read_task, resolve_task
from launcher.rank.trackers import Tracked, WandbRows, build_loggers
from launcher.report.closing_report import closing_lines
from launcher.report.tracked import group_and_tags
from launcher.resolve import Run, resolve
from launcher.secrets import has_wandb_key
from tests.launcher.metric_names import ROWS, SUMMARY
from tests.launcher.runs import MODEL, Finished, launch, read_metrics, within
from tests.launcher.wandb_log import config_of, read_records, rows_and_run, summary_of

pytestmark = pytest.mark.distributed

RUN = (
    *MODEL, "trainer.max_steps=6", "trainer.val_check_interval=3", "trainer.limit_val_batches=1",
    "experiment_name=tracked",
)  # fmt: skip
CANARY = "canary-5f1d20-do-not-copy-this-anywhere-"


@pytest.fixture(scope="module")
def tracked_run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Four ranks that both trackers follow."""
    words = [*RUN, "pp=2", "dp=2", "data.global_batch_size=8", "tracking=[wandb,tensorboard]",
             "tracking.project=mine", "tracking.tags=[a,b]", "tracking.offline=true",
             "trainer.checkpoint_every_n_steps=3"]  # fmt: skip
    secrets = {"WANDB_API_KEY": CANARY, "HF_TOKEN": CANARY}
    return launch(words, tmp_path_factory.mktemp("wandb"), **secrets).assert_done()


@pytest.fixture(scope="module")
def records(tracked_run: Finished) -> list[Any]:
    (file,) = tracked_run.folder.rglob("*.wandb")
    return read_records(file)


@pytest.fixture(scope="module")
def history(records: list[Any]) -> tuple[list[dict[str, Any]], Any]:
    return rows_and_run(records)


@pytest.fixture(scope="module")
def board(tracked_run: Finished) -> Board:
    return Board(tracked_run.folder / "tensorboard")


class Board:
    """What TensorBoard's event files have.

    Attributes:
        points: By tag, the value of each step.
        table: Of the last text ``summary``.
        parameters: What the tab HPARAMS shows.
        charts: Of the tab CUSTOM SCALARS, the patterns of tags by title.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        self.points: dict[str, dict[int, float]] = {}
        self.table: dict[str, str] = {}
        self.parameters: dict[str, Any] = {}
        self.charts: dict[str, list[str]] = {}
        for file in sorted(folder.glob("events.out.tfevents.*")):
            for event in EventFileLoader(str(file)).Load():
                for value in event.summary.value:
                    plugin = value.metadata.plugin_data
                    if plugin.plugin_name == "hparams":
                        data = HParamsPluginData.FromString(plugin.content)
                        for name, item in data.session_start_info.hparams.items():
                            self.parameters[name] = getattr(item, item.WhichOneof("kind"))
                    elif plugin.plugin_name == "custom_scalars":
                        layout = Layout.FromString(value.tensor.string_val[0])
                        found = [chart for each in layout.category for chart in each.chart]
                        self.charts = {each.title: [*each.multiline.tag] for each in found}
                    elif plugin.plugin_name == "text":
                        lines = value.tensor.string_val[0].decode().splitlines()[2:]
                        cells = (line.strip("| ").split(" | ", 1) for line in lines)
                        self.table = {name: text for name, text in cells}
                    else:
                        points = self.points.setdefault(value.tag, {})
                        assert event.step not in points, value.tag
                        points[event.step] = value.tensor.float_val[0]


def run_of(*words: str) -> Run:
    with hydra_session():
        return resolve(compose_checked([*MODEL, *words])[0])


PER_RANK = "/rank_00000"


def as_result(summary: Mapping[str, Any], layout: Mapping[str, Any]) -> dict[str, Any]:
    """result.json as the page reads it off a tracker's summary."""
    found = dict(layout)
    for name, field in SUMMARY.items():
        if name.endswith(PER_RANK):
            head = name.removesuffix(PER_RANK)
            ranks = [f"{head}/rank_{rank:05d}" for rank in range(layout["pp"])]
            found[field] = [summary[each] for each in ranks if each in summary] or found.get(field)
        else:
            found[field] = summary.get(name)
    return found


def assert_same(found: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    for field in SUMMARY.values():
        known = result[field]
        words = known is None or isinstance(known, str)
        same = known if words else pytest.approx(known, rel=1e-5)
        assert found[field] == same, field


def test_the_closing_report_can_be_written_from_what_wandb_has(tracked_run, records, history):
    result = as_result(summary_of(records), config_of(history[1])["layout"])
    run = resolve_task(read_task(tracked_run.folder))
    with contextlib.chdir(tracked_run.cwd):
        lines = closing_lines(run, tracked_run.folder, result)
    printed = tracked_run.output.splitlines()
    first = printed.index(lines[0])
    assert printed[first : first + len(lines)] == lines
    assert len(lines) > 15


def test_every_figure_of_the_run_is_in_wandb_under_the_name_of_the_page(
    tracked_run, records, history
):
    found = as_result(summary_of(records), config_of(history[1])["layout"])
    assert found["status"] == "done"
    assert_same(found, tracked_run.result)
    # Nothing but what the page has, rows and wandb's own.
    given = {re.sub("rank_0000.", "rank_00000", name) for name in summary_of(records)}
    own = {"_timestamp", "_runtime", "_step", "_wandb/runtime", "trainer/global_step"}
    media = {name for name in given if name.startswith("timeline")}
    assert given - own - media <= {*ROWS, *SUMMARY, "val_perplexity"}


def test_every_figure_of_the_run_is_in_tensorboard_under_the_name_of_the_page(
    tracked_run, board, records
):
    last = {
        tag.removeprefix("summary/"): points
        for tag, points in board.points.items()
        if tag.startswith("summary/")
    }
    assert {step for points in last.values() for step in points} == {6}
    numbers = {name: points[6] for name, points in last.items()}
    words = {k: v for k, v in summary_of(records).items() if k in SUMMARY and isinstance(v, str)}
    assert {name: board.table[name] for name in words} == words
    assert_same(as_result(numbers | words, {"pp": 2}), tracked_run.result)


def test_both_trackers_have_the_request_and_its_layout(tracked_run, history, board):
    config = config_of(history[1])
    assert (config["dp"], config["num_microbatches"], config["model"]["hidden"]) == (2, 4, 16)
    assert config["layout"] == {
        "schedule": "1f1b", "pp": 2, "dp": 2, "tp": 1, "ep": 1, "stages_per_rank": 1,
        "num_microbatches": 4, "group": None, "split_backward": False, "recompute": "none",
        "overlap": "grad_reduce", "world_size": 4, "num_stages": 2, "layers_per_stage": [2.0, 0.0],
    }  # fmt: skip
    shown = {name: board.parameters[f"layout/{name}"] for name in ("schedule", "pp", "dp")}
    assert shown == {"schedule": "1f1b", "pp": 2, "dp": 2}
    assert board.parameters["model/hidden"] == 16
    heads = {name.partition("/")[0] for name in board.parameters}
    assert heads == {"layout", "model", "optimizer", "seed"}
    kept = yaml.safe_load((tracked_run.folder / "tensorboard" / "hparams.yaml").read_text())
    assert kept == {name: value for name, value in config.items() if name != "_wandb"}


def test_every_tracker_has_one_row_per_step_counted_from_1(tracked_run, history, board):
    rows, _ = history
    steps = [row["trainer/global_step"] for row in rows if "timeline/path" not in row]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in read_metrics(tracked_run.folder)] == steps
    assert list(board.points["train_loss"]) == steps
    assert list(board.points["val_loss"]) == [3, 6]


NET = """
import lightning.pytorch as pl
import torch
from torch import nn


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("score", self.net(batch).mean(), on_step=True, on_epoch=True)
        self.log("per_batch", self.net(batch).mean(), on_step=True, on_epoch=False)

    def on_train_epoch_end(self):
        self.log("epochs", float(self.current_epoch + 1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.eye(4).repeat(6, 1), self.batch_size)

    val_dataloader = train_dataloader
"""


def test_what_validations_and_epochs_log_is_in_the_row_of_its_step_alone(tmp_path):
    (tmp_path / "nets.py").write_text(NET)
    done = launch(
        ["model=class", "model.path=nets:Net", "data=class", "data.path=nets:Data", "pp=1",
         "data.global_batch_size=4", "data.microbatch_size=2", "trainer.max_steps=8",
         "trainer.val_check_interval=3", "tracking=wandb", "tracking.offline=true",
         "callbacks.rate.path=lightning.pytorch.callbacks:LearningRateMonitor"],
        tmp_path,
    ).assert_done()  # fmt: skip
    columns = read_metrics(done.folder)
    (file,) = done.folder.rglob("*.wandb")
    rows = [row for row in rows_and_run(read_records(file))[0] if "timeline/path" not in row]
    assert [row["step"] for row in columns] == [*range(1, 9)]
    assert [row["trainer/global_step"] for row in rows] == [*range(1, 9)]
    steps = {
        "lr-SGD": [*range(1, 9)], "score_epoch": [3, 6], "epochs": [6, 8],
        "train_loss_epoch": [6, 8],
    }  # fmt: skip
    for name, where in steps.items():
        assert [row["step"] for row in columns if row[name] is not None] == where, name
        assert [row["trainer/global_step"] for row in rows if name in row] == where, name
    assert not {"score", "per_batch"} & {*columns[0]}


def test_rows_are_those_of_metrics_csv_under_the_names_of_the_page(tracked_run, history, board):
    rows = [row for row in history[0] if "timeline/path" not in row]
    known = read_metrics(tracked_run.folder)
    for name, column in ROWS.items():
        if name.startswith("predicted/") or name.endswith(PER_RANK):
            continue
        values = {row["step"]: row[column] for row in known if row[column] is not None}
        found = {row["trainer/global_step"]: row[name] for row in rows if name in row}
        assert found == pytest.approx(values, rel=1e-5), name
        assert board.points[name] == pytest.approx(values, rel=1e-5), name
        assert values or name == "mfu", name


def test_rows_have_the_prediction_next_to_the_memory_of_every_rank(tracked_run, history, board):
    rows = [row for row in history[0] if "timeline/path" not in row]
    known = tracked_run.result
    for row, columns in zip(rows, read_metrics(tracked_run.folder), strict=True):
        measured = [row[f"measured/process_growth_bytes/rank_0000{rank}"] for rank in (0, 1)]
        assert max(measured) == columns["peak_memory_bytes_max"]
        predicted = [row[f"predicted/peak_memory_bytes/rank_0000{rank}"] for rank in (0, 1)]
        assert predicted == known["predicted_peak_memory_bytes"]
        assert row["predicted/step_time_s"] == known["predicted_step_time_s"]
        assert row["predicted/bubble_ratio"] == known["bubble_ratio"]
        assert row["predicted/exposed_grad_reduce_s"] == known["exposed_grad_reduce"]
    assert len(board.points["predicted/step_time_s"]) == 6


def test_the_terminal_says_where_wandb_keeps_a_run_and_how_to_upload_it(tracked_run):
    (folder,) = tracked_run.folder.rglob("offline-run-*")
    lines = [line for line in tracked_run.output.splitlines() if line.startswith("wandb: ")]
    sync = f"wandb: to upload this run: wandb sync {folder}"
    assert lines == [f"wandb: offline, in {folder}", sync]


def test_a_run_without_a_login_stays_offline_and_says_how_to_upload_it(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    (logger,) = build_loggers(run_of("tracking=wandb"), tmp_path)
    assert isinstance(logger, WandbRows)
    try:
        folder = logger.experiment.settings.sync_dir
        assert logger.place() == f"wandb: no login, so this run stays offline, in {folder}"
        sync = f"wandb login && wandb sync {folder}"
        assert logger.upload() == f"wandb: to upload this run: {sync}"
    finally:
        logger.experiment.finish()


def closed(folder: Path) -> tuple[int, str]:
    """Exit code and status of a run that wandb has closed in this process."""
    (file,) = folder.rglob("*.wandb")

    def codes() -> list[int]:
        found = (r for r in read_records(file) if r.WhichOneof("record_type") == "exit")
        return [record.exit.exit_code for record in found]

    # wandb's own process writes the end of the file.
    assert within(30, lambda: len(codes()) == 1)
    return codes()[0], summary_of(read_records(file))["status"]


def test_a_run_whose_pictures_have_no_room_is_closed_all_the_same(tmp_path, monkeypatch):
    run = run_of("tracking=wandb", "tracking.offline=true")
    said: list[str] = []
    tracked = Tracked(run, build_loggers(run, tmp_path), tmp_path / "checkpoints", said.append)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tracked, "_log_timeline", full)
    tracked.start()
    tracked.end({"steps": 3, "stopped_by": None}, None)
    assert [line.split()[1] for line in said][1:] == ["wandb's", "to"]
    assert closed(tmp_path) == (0, "done")


@pytest.mark.parametrize(
    ("stopped_by", "status"), [(None, "done"), ("SIGINT", "interrupted"), ("SIGTERM", "preempted")]
)
def test_a_training_that_was_stopped_has_the_status_of_result_json(stopped_by, status, tmp_path):
    run = run_of("tracking=tensorboard")
    tracked = Tracked(run, build_loggers(run, tmp_path), tmp_path / "checkpoints")
    tracked.start()
    assert Board(tmp_path / "tensorboard").table["status"] == "running"
    tracked.end({"steps": 3, "stopped_by": stopped_by}, None)
    assert Board(tmp_path / "tensorboard").table["status"] == status


def test_a_training_that_fails_says_so_in_both_trackers(tmp_path):
    run = run_of("tracking=[wandb,tensorboard]", "tracking.offline=true")
    said: list[str] = []
    tracked = Tracked(run, build_loggers(run, tmp_path), tmp_path / "checkpoints", said.append)
    tracked.start()
    tracked.fail(3)
    assert closed(tmp_path) == (1, "failed")
    assert Board(tmp_path / "tensorboard").table["status"] == "failed"
    assert "wandb sync" in said[-1]


def test_tensorboard_draws_every_measurement_with_its_prediction(board):
    pairs = {name for name in ROWS if name.startswith(("predicted/", "measured/"))}
    pairs -= {"measured/peak_memory_bytes/rank_00000"}  # on a GPU
    drawn = [pattern for patterns in board.charts.values() for pattern in patterns]
    for name, patterns in board.charts.items():
        alone = {"peak_memory_bytes": ["predicted"], "process_growth_bytes": ["measured"]}
        kinds = [pattern.partition("/")[0] for pattern in patterns]
        assert kinds == alone.get(name, ["measured", "predicted"])
    for name in pairs:
        assert any(re.fullmatch(pattern, name) for pattern in drawn), name
    for pattern in drawn:
        assert any(re.fullmatch(pattern, tag) for tag in board.points), pattern


def test_a_training_goes_on_where_wandb_has_no_room(tmp_path, monkeypatch):
    said: list[str] = []
    tracked = Tracked(run_of(), [], tmp_path, said.append)
    row = {"step": 1, "lr": 0.1}

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tracked, "_checkpoints", full)
    tracked.row(row, [])
    tracked.row(row, [])  # told once
    assert len(said) == 1
    assert said[0].startswith("warning: wandb's folders take no more ([Errno 28] No space left")


def test_wandb_knows_the_run(tracked_run, history):
    _, run = history
    assert run.project == "mine"
    assert run.run_group == "1f1b pp=2 dp=2 tp=1"
    assert list(run.tags) == ["1f1b", "pp=2", "dp=2", "tp=1", "tracked", "a", "b"]
    assert run.display_name == tracked_run.folder.name


def artifacts(records: list[Any], kind: str) -> list[Any]:
    found = [r.artifact for r in records if r.WhichOneof("record_type") == "artifact"]
    return [artifact for artifact in found if artifact.type == kind]


def test_wandb_has_the_timeline_as_an_artifact_and_as_a_picture(tracked_run, records, history):
    (artifact,) = artifacts(records, "timeline")
    (entry,) = artifact.manifest.contents
    assert entry.path == "timeline.html"
    page = (tracked_run.folder / "timeline.html").read_bytes()
    assert entry.size == pytest.approx(len(page), rel=0.05)
    (row,) = [row for row in history[0] if "timeline/path" in row]
    (folder,) = (tracked_run.folder / "wandb").glob("offline-run-*/files")
    picture = (folder / row["timeline/path"]).read_bytes()
    assert row["timeline/_type"] == "image-file"
    assert row["timeline/sha256"] == hashlib.sha256(picture).hexdigest()
    assert picture.startswith(b"\x89PNG")


def test_wandb_has_the_manifest_of_every_checkpoint(tracked_run, records):
    found = {
        next(alias for alias in artifact.aliases if alias != "latest"): json.loads(
            artifact.metadata
        )
        for artifact in artifacts(records, "checkpoint")
    }
    assert sorted(found) == ["step-00000003", "step-00000006"]
    for name, metadata in found.items():
        path = tracked_run.folder / "checkpoints" / f"{name}.ckpt"
        manifest = json.loads((path / "manifest.json").read_text())
        assert metadata["path"] == str(path)
        assert metadata["files"] == manifest["files"]
        assert metadata["step"] == int(name[-8:])
        assert metadata["layout"] == {"pp": 2, "dp": 2, "tp": 1, "world_size": 4}


def test_a_key_in_the_environment_is_in_no_file(tracked_run):
    files = [path for path in tracked_run.cwd.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
    assert CANARY not in tracked_run.output + tracked_run.errors


def test_a_requeued_training_stays_one_run(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (tmp_path / "resolved.json").write_text('{"run_id": "0badcafe"}')
    for offline in ("true", "false"):
        run = run_of("tracking=wandb", f"tracking.offline={offline}")
        (logger,) = build_loggers(run, tmp_path)
        assert isinstance(logger, WandbRows)
        options = logger._wandb_init
        assert options["id"] == "0badcafe"
        assert options["resume"] == "allow"
        assert options["settings"].console == "off"


def test_runs_of_a_sweep_have_its_tag_and_the_group_of_their_layout(tmp_path):
    folder = tmp_path / "2026-01-02" / "03-04-05"
    config = replace(LaunchConfig(), pp=4, experiment_name="mine")
    group, tags = group_and_tags(tagged(config, folder), dp=2)
    assert group == "1f1b pp=4 dp=2 tp=1"
    assert tags == ["1f1b", "pp=4", "dp=2", "tp=1", "mine", "sweep 2026-01-02 03-04-05"]
    given = replace(config, tracking=replace(config.tracking, group="theirs"))
    assert group_and_tags(given, dp=2)[0] == "theirs"


@pytest.mark.parametrize("host", ["", "https://wandb.example.org"])
def test_a_login_is_found_where_wandb_puts_it(host, tmp_path, monkeypatch):
    from wandb.sdk.lib import urls
    from wandb.sdk.lib.wbauth.wbnetrc import write_netrc_auth

    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if host:
        monkeypatch.setenv("WANDB_BASE_URL", host)
    assert not has_wandb_key()
    write_netrc_auth(host=host or urls.DEFAULT_BASE_URL, api_key="k" * 40)
    assert has_wandb_key()


def test_wandb_files_are_private_and_in_the_run_folder(tracked_run):
    assert [path.name for path in tracked_run.cwd.iterdir() if not path.name.startswith(".")] == [
        "outputs"
    ]
    files = list((tracked_run.folder / "wandb").rglob("*"))
    assert files
    for path in files:
        assert path.is_symlink() or path.stat().st_mode & 0o077 == 0, path
