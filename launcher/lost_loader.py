"""A process of a DataLoader that has died: torch names its pid, which tells nobody anything."""

from __future__ import annotations

import os
import re
import signal
from types import TracebackType
from typing import Any

import lightning.pytorch as pl

from strategies.errors import RunError

_WORD = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([0-9, ]+)\)")
_KILLED = "SIGKILL: killed by somebody, or by the system for lack of memory"


class LoaderProcessError(RunError):
    """A loader process of a rank that has ended by itself, or was killed."""


def as_lost_loader(error: BaseException, trainer: pl.Trainer) -> LoaderProcessError | None:
    """The same failure with rank and batch; None if it is another one.

    torch raises it wherever the rank is at that moment, be it in the middle of a step.

    Args:
        error: What ended the training.
        trainer: Knows how far its loops are.
    """
    found = _WORD.search(str(error))
    if found is None:
        return None
    loop = trainer.fit_loop
    batch = loop.epoch_loop.batch_progress.current.ready
    loaders = loop._combined_loader
    loader = loaders.flattened[0] if loaders is not None and loaders.flattened else None
    ahead = (loader.num_workers * (loader.prefetch_factor or 1)) if loader is not None else 1
    return LoaderProcessError(
        f"loader process {found[1].strip()} of rank {os.environ['RANK']} has died "
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
    codes = [process.exitcode for process in _failed(error.__traceback__)]
    code = next((code for code in codes if code), None)
    if code is None:
        return "killed by somebody, or by the system for lack of memory"
    if code > 0:
        return f"exit code {code}"
    return _KILLED if -code == signal.SIGKILL else f"signal {-code}: {signal.strsignal(-code)}"


def _failed(frame: TracebackType | None) -> list[Any]:
    """The processes that torch's loader found dead: a local of the function that raised."""
    last: list[Any] = []
    while frame is not None:
        last = frame.tb_frame.f_locals.get("failed_workers", last)
        frame = frame.tb_next
    return last
