"""What trackers get beside Lightning's own metrics: figures, memory, pictures, checkpoints.

Everything here is a copy of what lies in the run folder, where it is the ground truth: metrics.csv
is on disk before a tracker hears of its row.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from launcher.checkpoints import manifest_of
from launcher.config import LaunchConfig, dump
from launcher.config.decode import brings_own
from launcher.processes.task import run_id
from launcher.report.html import Panel, timeline_html
from launcher.report.predicted import predict
from launcher.report.sweep.picture import timeline_png
from launcher.resolve import Run
from launcher.secrets import has_wandb_key
from strategies.analysis.timeline import Timeline
from strategies.errors import CheckpointError, PlanError, install_words
from strategies.manifest import UNFINISHED, total_bytes
from strategies.plan import Plan

FIGURES = ("lr", "grad_norm", "step_time_s", "tokens_per_s", "mfu", "bubble_ratio",
         "exposed_grad_reduce_s", "peak_memory_bytes_max", "skipped_steps")  # fmt: skip
_LAYOUT = ("pp", "dp", "tp", "world_size")
_LISTED_FILES = 200


class Tracked:
    """Follows a training on rank 0, whose checkpoints lie in ``folder``."""

    def __init__(
        self,
        loggers: Sequence[Logger],
        folder: Path,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._loggers = list(loggers)
        self._tell = tell
        self._lost = False
        self._folder = folder
        self._known: set[Path] = set()
        self._files: Path | None = None
        self._page: str | None = None

    def place(self) -> str | None:
        """Where wandb keeps this run, in a line; None without it."""
        for logger in self._wandb():
            run = logger.experiment
            self._files = Path(run.settings.sync_dir)
            if run.offline:
                return f"wandb: offline, in {self._files}"
            self._page = run.url
            return f"wandb: online, {run.url}; its files are in {self._files}"
        return None

    def continued(self) -> str | None:
        """What brings this run to wandb's pages, or its page."""
        if self._files is None:
            return None
        return (
            f"wandb: {self._page}"
            if self._page
            else f"wandb: wandb sync {shlex.quote(str(self._files))}"
        )

    def row(self, row: Mapping[str, Any], peaks: Sequence[int]) -> None:
        """Hands on a row of metrics.csv."""
        figures = {name: float(row[name]) for name in FIGURES if row.get(name) is not None}
        for rank, peak in enumerate(peaks):
            figures[f"peak_memory_bytes/rank_{rank:05d}"] = float(peak)
        for logger in self._loggers if figures else ():
            # Lightning counts the steps of what it logs from 0.
            logger.log_metrics(figures, step=int(row["step"]) - 1)
        self._beside(self._checkpoints)

    def end(self, run: Run, measured: Timeline | None, plan: Plan) -> None:
        """Hands on the timeline and the last checkpoints, and ends wandb's run."""
        self._beside(self._checkpoints)
        for logger in self._wandb():
            self._beside(partial(_log_timeline, logger, run, measured, plan))
        if self._wandb():
            import wandb

            self._beside(wandb.finish)

    def _beside(self, hand_on: Callable[[], None]) -> None:
        """Does it unless wandb's folders take no more: a training does not end for a copy."""
        if self._lost:
            return
        try:
            hand_on()
        except OSError as error:
            self._lost = True
            self._tell(
                f"warning: wandb's folders take no more ({error}), and the run goes on without "
                "checkpoints and pictures there. Make room where WANDB_CACHE_DIR and WANDB_DIR are."
            )

    def _wandb(self) -> list[WandbLogger]:
        return [logger for logger in self._loggers if isinstance(logger, WandbLogger)]

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


def _log_manifest(logger: WandbLogger, path: Path, manifest: Mapping[str, Any]) -> None:
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


def _log_timeline(logger: WandbLogger, run: Run, measured: Timeline | None, plan: Plan) -> None:
    import wandb

    timeline, metrics = predict(run)
    panels = [Panel("predicted", timeline, metrics)]
    if measured is not None:
        panels.append(Panel("measured", measured))
    degrees = f"pp={run.config.pp} dp={run.dp} tp={run.config.tp}"
    title = f"{plan.schedule} {degrees} num_microbatches={plan.num_microbatches}"
    page = timeline_html(panels, title=title)
    with tempfile.TemporaryDirectory() as folder:
        # wandb copies them into the run's own files.
        shown, drawn = Path(folder) / "timeline.html", Path(folder) / "timeline.png"
        shown.write_text(page, encoding="utf-8")
        drawn.write_bytes(timeline_png(panels, title=title))
        media = {
            "timeline": wandb.Html(shown, inject=False),
            "timeline_image": wandb.Image(str(drawn)),
        }
        logger.experiment.log(media)


# Loggers beside metrics.csv: Weights & Biases (offline without a key) and TensorBoard.


def build_loggers(config: LaunchConfig, run_dir: Path) -> list[Logger]:
    """The loggers that ``tracking=`` asks for; metrics.csv needs none."""
    makers = {"wandb": _wandb, "tensorboard": _tensorboard}
    names = config.tracking.names
    found = [makers[name](config, run_dir) for name in names if name in makers]
    own = config.callbacks or brings_own("model", config.model.name)
    # Code of one's own may ask for a logger: LearningRateMonitor ends a run that has none.
    return [*found, RowLogger(run_dir)] if own and "none" not in names else found


class RowLogger(Logger):
    """Hands what somebody else's code logs to metrics.csv, where the launcher's own rows are.

    Attributes:
        sink: Gets the numbers by name, of the step that is being made.
    """

    sink: Callable[[Mapping[str, float]], None] | None = None

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self._folder = str(run_dir)

    @property
    def name(self) -> str:
        """Folder of what others keep beside it, such as Lightning's ModelCheckpoint."""
        return "own"

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return self._folder

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self.sink is not None:
            self.sink(metrics)

    def log_hyperparams(self, *_: object, **__: object) -> None:
        """They are in the run's folder."""


def _tensorboard(config: LaunchConfig, run_dir: Path) -> Logger:
    from lightning.pytorch.loggers import TensorBoardLogger

    try:
        return TensorBoardLogger(save_dir=run_dir, name="tensorboard", version="")
    except ModuleNotFoundError as error:
        raise PlanError(
            "tracking=tensorboard needs the package tensorboard. "
            f"Try {install_words('tensorboard')}, or tracking=csv."
        ) from error


def _wandb(config: LaunchConfig, run_dir: Path) -> Logger:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    tracking = config.tracking
    offline = not has_wandb_key() if tracking.offline == "auto" else bool(tracking.offline)
    settings: dict[str, Any] = {
        "entity": tracking.entity,
        "group": tracking.group or config.experiment_name,
        "tags": list(tracking.tags),
        "config": dump(config),
        # One run per training, also across requeues.
        "id": run_id(run_dir),
        # What a rank prints is in its own log, masked; wandb would keep a copy of its own.
        "settings": wandb.Settings(console="off"),
    }
    if not offline:
        settings["resume"] = "allow"
    return WandbLogger(
        name=run_dir.name, project=tracking.project, save_dir=run_dir, offline=offline, **settings
    )
