"""Whether the ranks of a replica have the same number of batches, so that none waits in vain.

What loaders know of their length is compared when they are made. Which batch is the last travels
with each step, where it is known in it. Where a length is only promised, one replica fetches no
batch before stock Lightning does: there each step leaves its number in the store where the ranks
meet, and a rank whose loader ends looks there for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from math import isfinite, isinf
from typing import Any
from weakref import finalize

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from torch.utils.data import DataLoader, IterableDataset

from strategies.errors import DataError
from strategies.models.nested import replaced
from strategies.models.stage_model import Mode
from strategies.runtime.engine.last_batches import KINDS, Ends, refuse_counts
from strategies.runtime.engine.rank_engine import Engine
from strategies.runtime.lightning.last_words import until
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.messages.meeting import meeting
from strategies.runtime.step.microbatch import count_rows


class EpochEnds:
    """What this rank knows of the ends of its epochs, of training and of evaluation."""

    def __init__(self, engine: Callable[[], Engine]) -> None:
        self._engine = engine
        # Of the epochs under way: the newest batch, and whether all ranks know it for the last.
        self._newest: dict[Mode, tuple[int, bool]] = {}

    @property
    def _rank(self) -> int:
        where = self._engine().coordinates
        return where.global_rank(where.pp_rank, where.dp_rank)

    @property
    def _ranks(self) -> Sequence[int]:
        """Those that run the same batches."""
        where = self._engine().coordinates
        return where.replica(where.dp_rank)

    def compare(self, loader: Any, trainer: pl.Trainer) -> None:
        """Refuses a loader that knows of other batches on another rank of the replica; collective.

        Raises:
            DataError: On all of them.
        """
        if len(self._ranks) == 1:
            return
        mode = _mode_of(trainer)
        exchange = Exchange(self._engine().control_group)
        each = exchange.everyone([*_known_of(loader, trainer, mode)])
        for what, said in zip(("batches", "rows"), zip(*each, strict=True), strict=True):
            if len(set(said)) > 1:
                counts = ["an unknown number" if count is None else count for count in said]
                refuse_counts(f"{KINDS[mode]} {what}", dict(zip(self._ranks, counts, strict=True)))

    def now(self, trainer: pl.Trainer, *, ahead: bool) -> Ends:
        """What the others hear with this step.

        Args:
            trainer: In a step.
            ahead: Whether to fetch the next batch where a loader's length is a promise only.
        """
        loop: Any = trainer.fit_loop if trainer.training else trainer._active_loop
        loaders = loop._combined_loader.flattened
        measured = all(map(_is_measured, loaders))
        if trainer.training:
            progress = loop.epoch_loop.batch_progress
            ends = _training_ends(trainer, ahead=ahead, measured=measured)
        else:
            progress = loop.batch_progress
            last = bool(progress.is_last_batch)
            ends = progress.current.ready if last else None, last, _next_rows(loop)
        mode = _mode_of(trainer)
        if len(self._ranks) > 1 and (mode not in self._newest or not measured):
            self._say("begun", mode, progress.current.ready)
        self._newest[mode] = progress.current.ready, ends[1]
        return ends

    def untold(self, trainer: pl.Trainer) -> None:
        """The step sends no message, so no rank gets what ``now`` has returned."""
        mode = _mode_of(trainer)
        self._newest[mode] = self._newest[mode][0], False

    def end(self, trainer: pl.Trainer) -> None:
        """At an epoch's end: asks the other ranks where they may have more batches.

        Raises:
            DataError: They have.
        """
        engine, mode, ranks = self._engine(), _mode_of(trainer), self._ranks
        if trainer.training and engine.coordinates.dp > 1:
            _refuse_no_batch(trainer, engine)
        number, known = self._newest.pop(mode, (0, False))
        if len(ranks) > 1 and not known:
            self._say("ended", mode, number)
            counts: dict[int, int | str] = {self._rank: number}

            def answered() -> bool:
                counts.update(self._heard(mode, number))
                failed = any(meeting().store.check([f"failed/{rank}"]) for rank in ranks)
                return failed or len(counts) == len(ranks) or len({*counts.values()}) > 1

            until(answered, engine.options.timeout_s)
            if len({*counts.values()}) > 1:
                refuse_counts(f"{KINDS[mode]} batches", counts)
        meeting().epochs[mode] += 1

    def _say(self, what: str, mode: Mode, number: int) -> None:
        met = meeting()
        met.store.set(f"{what}/{mode}/{self._rank}", f"{met.epochs[mode]} {number}")

    def _heard(self, mode: Mode, number: int) -> dict[int, int | str]:
        """With how many batches ranks have ended this epoch, or that they have begun more."""
        met, found = meeting(), dict[int, int | str]()
        for rank in self._ranks:
            for what in ("begun", "ended"):
                key = f"{what}/{mode}/{rank}"
                if met.store.check([key]):
                    epoch, count = map(int, met.store.get(key).split())
                    if epoch > met.epochs[mode]:
                        found[rank] = number
                    elif epoch == met.epochs[mode] and what == "ended":
                        found[rank] = count
                    elif epoch == met.epochs[mode] and count > number:
                        found[rank] = f"more than {number}"
        return found


def _mode_of(trainer: pl.Trainer) -> Mode:
    if trainer.training:
        return "train"
    return "test" if trainer.testing else "predict" if trainer.predicting else "validate"


def _known_of(loader: Any, trainer: pl.Trainer, mode: Mode) -> tuple[int | None, int | None]:
    """Batches and rows that an epoch takes of a loader, as far as that is known of them."""
    length = sized_len(loader)
    if length is None:
        return None, None
    limit = {
        "train": trainer.limit_train_batches, "validate": trainer.limit_val_batches,
        "test": trainer.limit_test_batches, "predict": trainer.limit_predict_batches,
    }[mode]  # fmt: skip
    batches = int(_parse_num_batches(trainer.state.stage, length, limit))  # type: ignore[arg-type]
    if mode == "train" and trainer.max_steps > 0:
        left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        batches = min(batches, left)
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if size is None or not _is_measured(loader):
        return batches, None
    full = batches * size
    return batches, full if loader.batch_sampler.drop_last else min(full, len(loader.sampler))


def _next_rows(loop: Any) -> int | None:
    """Rows of the next batch, where Lightning has fetched it: where a loader has no length."""
    fetched = getattr(loop._data_fetcher, "batches", None)
    combined = loop._combined_loader
    if not fetched or (combined._mode != "sequential" and len(combined.flattened) > 1):
        return None
    try:
        return count_rows(fetched[0][0])
    except DataError:
        return None


def _training_ends(trainer: pl.Trainer, *, ahead: bool, measured: bool) -> Ends:
    """As ``EpochEnds.now``; the step that ends the training ends the epoch, too."""
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    steps = trainer.global_step + (not loop._should_accumulate())
    if (
        loop._num_ready_batches_reached()
        or 0 < loop.max_steps <= steps
        or (ahead and not measured and _nothing_follows(fetcher))
    ):
        return int(loop.batch_progress.current.ready), True, None
    known = trainer.num_training_batches
    count = int(known) if isfinite(known) and measured else None
    return count, False, _next_rows(trainer.fit_loop)


def _is_measured(loader: Any) -> bool:
    """Whether a loader's length is that of its data; else it is a promise of the user's code."""
    own = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    samplers = (loader.sampler, loader.batch_sampler) if own else ()
    return own and all(type(each).__module__.startswith(_KNOWN) for each in samplers)


_KNOWN = ("torch.", "lightning.", "strategies.", "builtins")


def _nothing_follows(fetcher: Any) -> bool:
    """Whether this batch is the last one; fetches the next one for that, which Lightning gets."""
    if fetcher.length is None:
        return bool(fetcher.done)
    if not isinstance(fetcher.iterator, _Ahead):
        fetcher.iterator = _Ahead(fetcher.iterator, fetcher.combined_loader.flattened)
    return fetcher.iterator.nothing_follows


class _Ahead:
    """An iterator that knows whether something follows.

    Loaders with a state keep the one from before the batch that is fetched ahead, as long as the
    loop has not got that: a run that resumes from it begins with this batch.
    """

    def __init__(self, iterator: Iterator[Any], loaders: Sequence[Any]) -> None:
        self._iterator = iterator
        self._stateful = [loader for loader in loaders if hasattr(loader, "state_dict")]
        self._kept = ExitStack()
        finalize(self, self._kept.close)  # An epoch may end before the batch.
        self._next: list[Any] = []
        self._ended = False

    @property
    def nothing_follows(self) -> bool:
        if not self._next and not self._ended:
            states = [(vars(each), deepcopy(each.state_dict())) for each in self._stateful]
            kept = [(own, "state_dict", partial(deepcopy, state)) for own, state in states]
            self._kept.enter_context(replaced(kept))
            try:
                self._next.append(next(self._iterator))
            except StopIteration:
                self._ended = True
        return self._ended

    def __next__(self) -> Any:
        self._kept.close()
        if self._ended:
            raise StopIteration
        return self._next.pop() if self._next else next(self._iterator)


def _refuse_no_batch(trainer: pl.Trainer, engine: Engine) -> None:
    """Of a replica whose loader is empty, while others may wait for it in their first step."""
    loop = trainer.fit_loop.epoch_loop
    if loop.batch_progress.current.ready or trainer.should_stop or loop._is_training_done:
        return
    raise DataError(
        f"replica {engine.coordinates.dp_rank} has 0 training batches in this epoch, and every "
        "step adds up the gradients of all replicas. Give all of them the same number (let the "
        "data set be divided by trainer.distributed_sampler_kwargs)."
    )


def ends_loader(trainer: pl.Trainer, loader: Sequence[int]) -> bool:
    """Whether this evaluation batch is the last of its loader, or may be."""
    loop: Any = trainer._active_loop
    progress = loop.batch_progress
    if progress.is_last_batch:
        return True
    counts = loop.max_batches
    if not isinstance(counts, list) or len(counts) < 2:
        return False
    through = sum(counts[: (loader[0] if loader else 0) + 1])
    return bool(isinf(through) or progress.current.ready >= through)
