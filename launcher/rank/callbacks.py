"""Lightning callbacks of the launcher: metrics for file and parent, and signals left alone."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from launcher.report.result import inert, write_atomically
from strategies.errors import RunError
from strategies.runtime.lightning.strategy import PipelineStrategy
from strategies.runtime.step.recorder import StepStats

_MOST_NAME = 200
_SYNC_S = 1.0  # between two times that rows are sure to be on the disk
_FIRST_COLUMNS = ("step", "epoch", "train_loss", "val_loss", "lr", "grad_norm", "step_time_s",
                  "elapsed_s", "tokens_per_s", "mfu", "bubble_ratio", "exposed_grad_reduce_s",
                  "peak_memory_bytes_max", "skipped_steps")  # fmt: skip


def pipeline(trainer: pl.Trainer) -> PipelineStrategy:
    """The trainer's strategy, which the launcher always sets."""
    strategy = trainer.strategy
    assert isinstance(strategy, PipelineStrategy)
    return strategy


@dataclass
class MetricsFile:
    """``metrics.csv``: a row per logged step.

    What ``write`` has written stays when the process is killed; a machine that loses its power
    loses the last second. The first rank does not wait for its disk in every step.
    """

    path: Path
    _columns: list[str] = field(default_factory=list)
    _rows: list[dict[str, Any]] = field(default_factory=list)
    _last: int | None = None  # where the row begins that is to be replaced
    _synced: float = -math.inf  # when the disk had all rows

    def write(self, row: Mapping[str, Any], *, complete: bool = True) -> None:
        """Appends a row; a name not seen before adds a column to the whole file.

        ``complete``: whether no more is to come; otherwise the next call replaces it. A run that is
        killed leaves what is known of its last step.
        """
        row = {inert(name)[:_MOST_NAME]: value for name, value in row.items()}
        before = self._rows[-1].get("step") if self._rows and self._last is None else None
        if before is not None and str(before) == str(row.get("step")):
            # The validation of the step from which a run goes on has come late.
            known = {k: v for k, v in self._rows.pop().items() if v not in (None, "")}
            row = {**row, **{k: v for k, v in known.items() if row.get(k) is None}}
            write_atomically(self.path, "".join(self._lines([{}, *self._rows])))
        new = [name for name in row if name not in self._columns]
        if self._last is not None:
            self._rows.pop()
        self._rows.append(dict(row))
        if new:
            self._columns += new
            *before, last = self._lines([{}, *self._rows])
            write_atomically(self.path, "".join([*before, last]))
            at = self.path.stat().st_size - len(last.encode())
        else:
            with self.path.open("r+b") as stream:
                at = stream.seek(0, os.SEEK_END) if self._last is None else self._last
                stream.seek(at)
                stream.write("".join(self._lines([row])).encode())
                stream.truncate()
                stream.flush()
                if complete and time.monotonic() > self._synced + _SYNC_S:
                    os.fsync(stream.fileno())
                    self._synced = time.monotonic()
        self._last = None if complete else at

    def go_on(self, step: int) -> float:
        """Keeps the rows up to a step of a run that goes on in its own folder; their seconds."""
        if not self.path.is_file():
            return 0.0
        with self.path.open(newline="") as stream:
            reader = csv.DictReader(stream)
            self._columns = list(reader.fieldnames or ())
            # A machine that lost its power may have left half a row, or zeros.
            rows = [row for row in reader if 0 < _number(row.get("step")) <= step]
            self._rows = [row for row in rows if None not in row]
        write_atomically(self.path, "".join(self._lines([{}, *self._rows])))
        return max((_number(row.get("elapsed_s")) for row in self._rows), default=0.0)

    def _lines(self, rows: list[Any]) -> list[str]:
        lines: list[str] = []

        class _Sink:
            def write(self, text: str) -> None:
                lines.append(text)

        writer = csv.DictWriter(_Sink(), self._columns, lineterminator="\n")
        for row in rows:
            if row:
                writer.writerow(row)
            else:
                writer.writeheader()
        return lines


def _number(cell: str | None) -> float:
    """A cell's number; 0 where it has none."""
    try:
        found = float(cell or 0.0)
    except ValueError:
        return 0.0
    return found if math.isfinite(found) else 0.0


@dataclass
class Progress(pl.Callback):
    """Collects a row per logged step, on rank 0, and tells the parent.

    Bubble and gradient norm of a step come with the next step's messages, so a row is completed
    when they are there; the collective that would bring them at once would stall the pipeline.

    Attributes:
        file: Where rows go; None on all ranks but the first.
        tokens_per_step: Tokens of one optimizer step over all replicas; None if unknown.
        peak_share_s: Seconds that a step would take at the hardware's peak; None if unknown.
        follow: Gets every written row, and the peak bytes of each pipeline rank.
    """

    reads_weights: ClassVar[bool] = False
    file: MetricsFile | None
    tokens_per_step: int | None
    peak_share_s: float | None = None
    step_times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    val_loss: float | None = None
    follow: Callable[[Mapping[str, Any], Sequence[int]], None] | None = None
    _peaks: Sequence[int] = ()
    _pending: dict[str, Any] | None = None
    _pending_pass: int = -1
    _last: float | None = None
    _begun: float = 0.0  # when training began, less what an earlier process has taken
    _rate: float | None = None
    _events: int | None = None
    _beside: dict[str, float] = field(default_factory=dict)
    _trainer: pl.Trainer | None = None
    _index: int | None = None  # under which Lightning logs the last step: it counts from 0

    def __post_init__(self) -> None:
        descriptor = os.environ.get("FOLDPIPE_EVENTS")
        self._events = None if descriptor is None else int(descriptor)

    def collect(self, numbers: Mapping[str, float], step: int | None) -> None:
        """Puts what was sent to the loggers into the row of its step.

        ``step``: as Lightning counts, from 0; None and steps to come go to the next row.
        """
        trainer = self._trainer
        if trainer is not None and trainer.validating:
            connector: Any = trainer._logger_connector
            if connector._first_loop_iter is not None:
                return  # What an evaluation logs of each batch belongs to no step.
        numbers = {name: value for name, value in numbers.items() if name != "epoch"}
        if trainer is None or step is None or step != self._index:
            self._beside |= numbers
        elif numbers:
            row = self._pending = self._pending or self._empty_row(trainer)
            row |= {name: value for name, value in numbers.items() if row.get(name) is None}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trainer = trainer
        if self.file is not None and trainer.global_step:
            self._begun -= self.file.go_on(trainer.global_step)
        self._last = time.perf_counter()
        self._begun += self._last
        self._tell({"kind": "start", "step": trainer.global_step, "max_steps": trainer.max_steps})

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, *_: object
    ) -> None:
        self.note_undeleted(trainer)
        if trainer.fit_loop._should_accumulate():
            return
        now = time.perf_counter()
        assert self._last is not None
        took, self._last = now - self._last, now
        self.step_times.append(took)
        self._complete(pipeline(trainer).stats)
        self._index = trainer.fit_loop.epoch_loop._batches_that_stepped
        # What this step has logged, and not what a validation before it has.
        connector: Any = trainer._logger_connector
        current = connector.metrics
        logged = numbers_of(current["log"]) | numbers_of(current["pbar"])
        beside, self._beside = self._beside, {}
        if "train_loss" not in logged:
            logged |= numbers_of({"train_loss": _loss_of(outputs)})
        loss = logged.get("train_loss")
        skipped = pipeline(trainer).skipped_steps
        left_out = bool(skipped) and skipped[-1] == trainer.global_step - 1
        if left_out:
            self._tell({"kind": "skipped", "step": trainer.global_step, "count": len(skipped)})
        elif loss is not None:
            self.losses.append(loss)
        if trainer.global_step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        rate = None if self.tokens_per_step is None else self.tokens_per_step / took
        row = self._empty_row(trainer) | {
            "step_time_s": took,
            "elapsed_s": now - self._begun,
            "tokens_per_s": rate,
            "mfu": None if self.peak_share_s is None else self.peak_share_s / took,
            "lr": self._rate,
            "skipped_steps": len(pipeline(trainer).skipped_steps),
        }
        row |= {k: v for k, v in logged.items() if not k.startswith("val_") and k != "epoch"}
        row |= {k: v for k, v in beside.items() if row.get(k) is None}
        self._pending = row
        self._pending_pass = trainer.fit_loop.total_batch_idx
        if self.file is not None:
            self.file.write(row, complete=False)
        stats = pipeline(trainer).stats
        self._tell(
            {
                "kind": "step",
                "step": trainer.global_step,
                "loss": loss,
                "tokens_per_s": rate,
                "bubble_ratio": None if stats is None else stats.bubble_ratio,
            }
        )

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Notes the rate that this step uses; the scheduler moves on before the batch ends."""
        self._rate = float(optimizer.param_groups[0]["lr"])

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.limit_val_batches == 0:
            return  # Ended by a signal: what it gives is of some batches only.
        found = {k: v for k, v in numbers_of(trainer.callback_metrics).items() if k[:4] == "val_"}
        self.val_loss = found.get("val_loss", self.val_loss)
        self._pending = (self._pending or self._empty_row(trainer)) | found
        self._tell({"kind": "validation", "step": trainer.global_step, **found})
        self._last = time.perf_counter()

    def _empty_row(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Of the last step; one that is not logged by itself has no statistics."""
        self._pending_pass = -1
        row: dict[str, Any] = dict.fromkeys(_FIRST_COLUMNS)
        return row | {"step": trainer.global_step, "epoch": trainer.current_epoch}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the last row; collective."""
        self._complete(pipeline(trainer).last_stats())
        self._write()

    def _complete(self, stats: StepStats | None) -> None:
        if self._pending is None:
            return
        if stats is not None and stats.step == self._pending_pass:
            self._pending["bubble_ratio"] = stats.bubble_ratio
            self._pending["grad_norm"] = stats.gradient_norm
            self._pending["exposed_grad_reduce_s"] = stats.exposed_grad_reduce_s
            self._pending["peak_memory_bytes_max"] = max(stats.peak_memory_bytes, default=None)
            self._peaks = stats.peak_memory_bytes
        self._write()

    def _write(self) -> None:
        if self._pending is not None and self.file is not None:
            self.file.write(self._pending)
            if self.follow is not None:
                self.follow(self._pending, self._peaks)
        self._pending = None

    def note(self, text: str | None) -> None:
        """A line for the terminal of whoever has started the run."""
        if text is not None:
            self._tell({"kind": "note", "text": text})

    def note_undeleted(self, trainer: pl.Trainer) -> None:
        """Old checkpoints that stay, which the log of rank 0 names, too."""
        undeleted = pipeline(trainer).saver.undeleted
        while undeleted:
            self.note(undeleted.pop(0))

    def _tell(self, event: dict[str, Any]) -> None:
        if self._events is not None:
            os.write(self._events, (json.dumps(event) + "\n").encode())


class KeepSignal(pl.Callback):
    """Puts SIGTERM's handler back after Lightning has put its own around it.

    Lightning's would start a collective inside the handler, for which no other rank is ready.
    """

    def __init__(self) -> None:
        self._handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Runs after Lightning has registered its handlers, as the other hooks here."""
        signal.signal(signal.SIGTERM, self._handler)

    on_validation_start = on_test_start = on_predict_start = on_train_start


def _loss_of(outputs: object) -> object:
    """What a step returned: a loss, or a dict that has one."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs


def is_number(value: object) -> bool:
    return (isinstance(value, Tensor) and value.numel() == 1) or isinstance(value, int | float)


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among logged values; Lightning's suffix for those of a step is dropped."""
    return {k.removesuffix("_step"): float(v) for k, v in metrics.items() if is_number(v)}


# A process of a DataLoader that has died: torch names its pid, which tells nobody anything.

_WORD = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([0-9, ]+)\)")
_KILLED = "SIGKILL: killed by somebody, or by the system for lack of memory"


class LoaderProcessError(RunError):
    """A loader process of a rank that has ended by itself, or was killed."""


def as_lost_loader(error: BaseException, trainer: pl.Trainer) -> LoaderProcessError | None:
    """The same failure with rank and batch; None if it is another one.

    torch raises it wherever the rank is at that moment, be it in the middle of a step. If a batch
    that the process had announced is being fetched from it just then, all there is to see is a
    connection that ends.
    """
    said = _WORD.search(str(error))
    found = said[1].strip() if said is not None else _dead_loader(error)
    if found is None:
        return None
    loop = trainer.fit_loop
    batch = loop.epoch_loop.batch_progress.current.ready
    loaders = loop._combined_loader
    loader = loaders.flattened[0] if loaders is not None and loaders.flattened else None
    ahead = (loader.num_workers * (loader.prefetch_factor or 1)) if loader is not None else 1
    return LoaderProcessError(
        f"loader process {found} of rank {os.environ['RANK']} has died "
        f"({how_it_ended(error)}) after {batch} batches of epoch {trainer.current_epoch}, "
        f"with batches {batch} to {batch + ahead - 1} under way. "
        "Try data.num_workers=0, which shows what a dataset raises."
    )


def how_it_ended(error: BaseException) -> str:
    """What is known of the end of the process that torch's error speaks of, in words.

    Either torch's handler of SIGCHLD sees the end first and says the signal, or the loader asks its
    processes one by one, which takes their exit codes from the kernel, and says nothing of them.
    """
    if "Killed" in str(error):
        return _KILLED
    trace = error.__traceback__
    codes = [process.exitcode for process in (_failed(trace) or _loaders(trace))]
    code = next((code for code in codes if code), None)
    if code is None:
        return "killed by somebody, or by the system for lack of memory"
    if code > 0:
        return f"exit code {code}"
    return _KILLED if -code == signal.SIGKILL else f"signal {-code}: {signal.strsignal(-code)}"


def _dead_loader(error: BaseException) -> str | None:
    """The pids of a loader's processes that have ended, where its connection is what failed."""
    if not isinstance(error, ConnectionError | EOFError | FileNotFoundError):
        return None
    dead = [process for process in _loaders(error.__traceback__) if _has_ended(process)]
    return ", ".join(str(process.pid) for process in dead) or None


def _loaders(frame: TracebackType | None) -> list[BaseProcess]:
    """The processes of the loader that was asked for a batch when the error came."""
    while frame is not None:
        asked = frame.tb_frame.f_locals.get("self")
        if isinstance(asked, _MultiProcessingDataLoaderIter):
            return list(asked._workers)
        frame = frame.tb_next
    return []


def _has_ended(process: BaseProcess) -> bool:
    process.join(0.5)  # The kernel may close its connections before it is gone.
    return not process.is_alive()


def _failed(frame: TracebackType | None) -> list[Any]:
    """The processes that torch's loader found dead: a local of the function that raised."""
    last: list[Any] = []
    while frame is not None:
        last = frame.tb_frame.f_locals.get("failed_workers", last)
        frame = frame.tb_next
    return last
