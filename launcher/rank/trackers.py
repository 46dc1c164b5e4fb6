"""What W&B and TensorBoard get of a training: request, rows, summary, timeline, checkpoints.

Everything here is a copy of what is in the run folder, the ground truth: a row is in metrics.csv
before a tracker gets it.
"""

from __future__ import annotations

import contextlib
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from launcher.checkpoints import manifest_of
from launcher.config.decode import brings_own
from launcher.processes.task import run_id
from launcher.rank.callbacks import Progress, is_number, numbers_of
from launcher.report.html import Panel, write_timeline_html
from launcher.report.predicted import predict, run_title, with_memory
from launcher.report.sweep.picture import timeline_png
from launcher.report.tracked import (
    after_training,
    before_training,
    group_and_tags,
    repeated_metrics,
    request,
    row_metrics,
    summary_metrics,
)
from launcher.resolve import Run, uses_gpu
from launcher.secrets import has_wandb_key
from strategies.analysis.timeline import Timeline
from strategies.errors import CheckpointError, PlanError, install_words
from strategies.manifest import UNFINISHED, total_bytes

_LAYOUT = ("pp", "dp", "tp", "world_size")
_LISTED_FILES = 200


class Tracked:
    """Follows the training of ``run`` on rank 0, whose checkpoints are in ``folder``.

    W&B and TensorBoard get the request, then one row per optimizer step, counted from 1, then the
    metrics of the closing report.
    """

    def __init__(
        self,
        run: Run,
        loggers: Sequence[Rows],
        folder: Path,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._run = run
        self._loggers = list(loggers)
        self._tell = tell
        self._lost = False
        self._folder = folder
        self._known: set[Path] = set()
        self._predicted: dict[str, Any] = {}
        self._repeated: dict[str, float] = {}
        self._panel: Panel | None = None
        self._upload: str | None = None
        self._on_gpu = _on_gpu(run)

    def start(self) -> None:
        """Sends the prediction, and says where wandb keeps the run."""
        if not self._loggers:
            return
        timeline, metrics = predict(self._run)
        self._panel = Panel("predicted", timeline, metrics)
        self._predicted = {**before_training(self._run, metrics), "status": "running"}
        self._repeated = repeated_metrics(summary_metrics(self._predicted))
        for logger in self._loggers:
            logger.begin(summary_metrics(self._predicted))
        for ours in self._wandb():
            self._tell(ours.place())
            self._upload = ours.upload()

    def row(self, row: Mapping[str, Any], peaks: Sequence[int]) -> None:
        """Sends a row of metrics.csv; ``peaks``: bytes, per pipeline rank."""
        metrics = row_metrics(row, peaks, on_gpu=self._on_gpu) | self._repeated
        for logger in self._loggers:
            logger.log_row(metrics, int(row["step"]))
        self._beside(self._checkpoints)

    def end(self, outcome: Mapping[str, Any], measured: Timeline | None) -> None:
        """Sends the metrics of the closing report, the timeline and the last checkpoints."""
        if not self._loggers:
            return
        stopped_by = outcome["stopped_by"]
        status = "interrupted" if stopped_by == "SIGINT" else "preempted" if stopped_by else "done"
        self._beside(self._checkpoints)
        for ours in self._wandb():
            self._beside(partial(self._log_timeline, ours, measured, outcome["steps"]))
        result = after_training({**self._predicted, "status": status}, outcome, measured)
        for logger in self._loggers:
            close = partial(logger.close, summary_metrics(result), outcome["steps"])
            self._beside(close) if isinstance(logger, WandbRows) else close()
        self._tell_upload()

    def fail(self, step: int) -> None:
        """Sends that the training ended with an error after ``step``."""
        result = {**self._predicted, "status": "failed"}
        for logger in self._loggers:
            with contextlib.suppress(Exception):  # The error of the training is the one to report.
                logger.close(summary_metrics(result), step)
        self._tell_upload()

    def _tell_upload(self) -> None:
        if self._upload is not None:
            self._tell(self._upload)

    def _beside(self, hand_on: Callable[[], None]) -> None:
        """Does it unless wandb's folders take no more: a training does not end for a copy."""
        try:
            hand_on()
        except OSError as error:
            lost, self._lost = self._lost, True
            if not lost:
                self._tell(
                    f"warning: wandb's folders take no more ({error}), and the run goes on without "
                    "checkpoints and pictures there. Make room where WANDB_CACHE_DIR and WANDB_DIR "
                    "are."
                )

    def _wandb(self) -> list[WandbRows]:
        return [logger for logger in self._loggers if isinstance(logger, WandbRows)]

    def _log_timeline(self, logger: WandbRows, measured: Timeline | None, step: int) -> None:
        """The page as an artifact, a picture of it among the panels."""
        import wandb

        assert self._panel is not None
        panels = [self._panel]
        if measured is not None:
            panels.append(Panel("measured", measured))
        title = run_title(self._run)
        name = f"timeline-{run_id(self._folder.parent) or logger.version}"
        artifact = wandb.Artifact(name, type="timeline", description=title)
        with tempfile.TemporaryDirectory() as folder:
            # wandb copies them into the run's own files.
            page, picture = Path(folder) / "timeline.html", Path(folder) / "timeline.png"
            write_timeline_html(page, with_memory(panels, self._run), title=title)
            picture.write_bytes(timeline_png(panels, title=title))
            artifact.add_file(str(page))
            logger.experiment.log_artifact(artifact)
            shown = {"timeline": wandb.Image(str(picture)), "trainer/global_step": step}
            logger.experiment.log(shown)

    def _checkpoints(self) -> None:
        """Notes what has been committed since: which files, with which hashes, and not the data."""
        if not self._wandb() or not self._folder.is_dir():
            return
        for path in sorted(self._folder.glob("step-*.ckpt")):
            if path in self._known or path.suffix == UNFINISHED:
                continue
            try:
                manifest = manifest_of(path)
            except CheckpointError:
                continue  # not committed yet
            self._known.add(path)
            for logger in self._wandb():
                _log_manifest(logger, path, manifest)


def _log_manifest(logger: WandbRows, path: Path, manifest: Mapping[str, Any]) -> None:
    import wandb

    metadata = {k: v for k, v in manifest["metadata"].items() if k != "parameters"}
    files = manifest["files"]
    metadata |= {
        "path": str(path),
        "layout": {key: manifest[key] for key in _LAYOUT if key in manifest},
        "num_parameters_named": len(manifest["metadata"].get("parameters", ())),
        "num_files": len(files),
        "bytes": total_bytes(manifest),
        "files": dict(list(files.items())[:_LISTED_FILES]),
    }
    name = f"checkpoint-{run_id(path.parent.parent) or logger.version}"
    artifact = wandb.Artifact(name, type="checkpoint", metadata=metadata)
    artifact.add_reference(path.absolute().as_uri(), checksum=False)
    logger.experiment.log_artifact(artifact, aliases=[path.stem])


def track(run: Run, loggers: Sequence[Logger], progress: Progress, folder: Path) -> Tracked:
    """Has the trainer's loggers fed by rows, on rank 0; checkpoints are in ``folder``."""
    rows = [logger for logger in loggers if isinstance(logger, Rows)]
    for logger in rows:
        logger.sink = progress.collect
    on_first = progress.file is not None
    trackers = [each for each in rows if on_first and not isinstance(each, RowLogger)]
    tracked = Tracked(run, trackers, folder, progress.note)
    progress.follow = tracked.row
    return tracked


# Loggers next to metrics.csv: W&B (offline without a login) and TensorBoard.


def build_loggers(run: Run, run_dir: Path) -> list[Rows]:
    """The loggers that ``tracking=`` asks for; metrics.csv needs none."""
    makers = {"wandb": _wandb, "tensorboard": _tensorboard}
    config = run.config
    names = config.tracking.names
    found = [makers[name](run, run_dir) for name in names if name in makers]
    own = config.callbacks or brings_own("model", config.model.name)
    # The user's code may need a logger: LearningRateMonitor raises without one.
    return found or ([RowLogger(run_dir)] if own and "none" not in names else [])


_SHOWN = ("layout", "model", "optimizer", "seed")  # of the request, as columns of HPARAMS


class Rows(Logger):
    """Collects what Lightning, modules and callbacks log, for the row of its step.

    Lightning logs loss, validation and epoch by themselves, and counts steps from 0; a tracker
    gets all of it in one row, as metrics.csv does.

    Attributes:
        sink: Gets the numbers by name, and the step that they were logged with. Without it they
            are logged at once.
    """

    sink: Callable[[Mapping[str, float], int | None], None] | None = None

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        at_once = dict(metrics)
        if self.sink is not None:
            self.sink(numbers_of(metrics), step)
            at_once = {name: value for name, value in metrics.items() if not is_number(value)}
        if at_once:  # such as images and tables
            self.log_row(at_once, step)

    def log_row(self, metrics: Mapping[str, Any], step: int | None) -> None:
        """Logs one row at once; the rows of steps count from 1."""

    def begin(self, metrics: Mapping[str, Any]) -> None:
        """Keeps what is known of the run before step 1."""

    def close(self, metrics: Mapping[str, Any], step: int) -> None:
        """Keeps what is known once per run, after ``step``, and ends it."""


class RowLogger(Rows):
    """Without a tracker: what others log goes to metrics.csv alone."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self._folder = str(run_dir)

    @property
    def name(self) -> str:
        """Folder of what others keep next to it, such as Lightning's ModelCheckpoint."""
        return "own"

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return self._folder

    def log_hyperparams(self, *_: object, **__: object) -> None:
        """They are in the run's folder."""


class WandbRows(Rows, WandbLogger):
    """W&B, one row per optimizer step."""

    def log_row(self, metrics: Mapping[str, Any], step: int | None) -> None:
        WandbLogger.log_metrics(self, metrics, step)

    def begin(self, metrics: Mapping[str, Any]) -> None:
        self.experiment.summary.update(dict(metrics))

    def close(self, metrics: Mapping[str, Any], step: int) -> None:
        self.experiment.summary.update(dict(metrics))
        self.experiment.finish(int(metrics["status"] == "failed"))

    def place(self) -> str:
        """Where the run is, in one line."""
        run, folder = self.experiment, self._files
        if not run.offline:
            return f"wandb: online, {run.url}; its files are in {folder}"
        why = "offline" if has_wandb_key() else "no login, so this run stays offline"
        return f"wandb: {why}, in {folder}"

    def upload(self) -> str:
        """Where the run's page is, or the command that makes it."""
        run = self.experiment
        login = "" if has_wandb_key() else "wandb login && "
        sync = f"wandb: to upload this run: {login}wandb sync {shlex.quote(str(self._files))}"
        return sync if run.offline else f"wandb: {run.url}"

    @property
    def _files(self) -> Path:
        return Path(self.experiment.settings.sync_dir)


class TensorBoardRows(Rows, TensorBoardLogger):
    """TensorBoard, one point per optimizer step.

    Its tabs HPARAMS and TEXT have the summary, CUSTOM SCALARS what W&B's view has: predicted and
    measured metrics as lines of one chart.

    Attributes:
        request: What ``hparams.yaml`` has whole, and HPARAMS in part.
        on_gpu: Whether an allocator measures memory.
    """

    request: Mapping[str, Any] = MappingProxyType({})
    on_gpu = False

    def log_row(self, metrics: Mapping[str, Any], step: int | None) -> None:
        TensorBoardLogger.log_metrics(self, metrics, step)

    def begin(self, metrics: Mapping[str, Any]) -> None:
        self._add_table(metrics, 0)
        names = ["step_time_s", "bubble_ratio", "exposed_grad_reduce_s"]
        names += ["peak_memory_bytes/.*"] if self.on_gpu else []
        tags = {name: [f"measured/{name}", f"predicted/{name}"] for name in names}
        if not self.on_gpu:  # They count other bytes, so each has a chart.
            alone = ("predicted/peak_memory_bytes/.*", "measured/process_growth_bytes/.*")
            tags |= {name.partition("/")[2]: [name] for name in alone}
        charts = {name.partition("/")[0]: ["Multiline", tags[name]] for name in tags}
        self.experiment.add_custom_scalars({"predicted and measured": charts})
        self.experiment.flush()

    def close(self, metrics: Mapping[str, Any], step: int) -> None:
        self._add_table(metrics, step)
        self.sink = None
        hidden = self.request.keys() - _SHOWN
        shown = {name: value for name, value in self.hparams.items() if name not in hidden}
        numbers = {f"summary/{name}": value for name, value in metrics.items() if is_number(value)}
        self.log_hyperparams(shown, numbers, step)
        self.save()

    def _add_table(self, metrics: Mapping[str, Any], step: int) -> None:
        lines = [f"| {name} | {value} |" for name, value in metrics.items()]
        text = "\n".join(["| metric | value |", "|---|---|", *lines])
        self.experiment.add_text("summary", text, step)


def _on_gpu(run: Run) -> bool:
    return uses_gpu(run.config) and torch.cuda.is_available()


def _tensorboard(run: Run, run_dir: Path) -> Rows:
    try:
        logger = TensorBoardRows(
            save_dir=run_dir, name="tensorboard", version="", default_hp_metric=False
        )
    except ModuleNotFoundError as error:
        raise PlanError(
            "tracking=tensorboard needs the package tensorboard. "
            f"Try {install_words('tensorboard')}, or tracking=csv."
        ) from error
    logger.hparams = request(run)
    logger.request = dict(logger.hparams)
    logger.on_gpu = _on_gpu(run)
    return logger


def _wandb(run: Run, run_dir: Path) -> Rows:
    import wandb

    config, tracking = run.config, run.config.tracking
    offline = not has_wandb_key() if tracking.offline == "auto" else bool(tracking.offline)
    group, tags = group_and_tags(config, run.dp)
    settings: dict[str, Any] = {
        "entity": tracking.entity,
        "group": group,
        "tags": tags,
        "config": request(run),
        # One run per training, also across requeues.
        "id": run_id(run_dir),
        # What a rank prints is in its own log, masked; wandb would keep a copy of its own.
        "settings": wandb.Settings(console="off"),
    }
    if not offline:
        settings["resume"] = "allow"
    return WandbRows(
        name=run_dir.name, project=tracking.project, save_dir=run_dir, offline=offline, **settings
    )
