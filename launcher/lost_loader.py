"""A process of a DataLoader that has died: torch names its pid, which tells nobody anything."""

from __future__ import annotations

import os
import re

import lightning.pytorch as pl

from strategies.errors import RunError

_WORD = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([0-9, ]+)\)")


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
    killed = "SIGKILL: " if "Killed" in str(error) else ""
    return LoaderProcessError(
        f"loader process {found[1].strip()} of rank {os.environ['RANK']} has died ({killed}"
        f"killed by somebody, or by the system for lack of memory) after {batch} batches of epoch "
        f"{trainer.current_epoch}, with batches {batch} to {batch + ahead - 1} under way. "
        "Try data.num_workers=0, which shows what a dataset raises."
    )
