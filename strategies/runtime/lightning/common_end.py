"""The end of a fit, the same on all ranks: what one of them raises, all raise.

A rank that fails says so in the store where the ranks meet, then it ends its connections. Whoever
waits for it is released, finds there what has happened, and raises the same; so a script that
catches it goes on with the next fit on all ranks, which meet again for that. A rank that waits in
vain for the time-out does likewise with the place at which it waits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch._C._distributed_c10d import Store

from strategies.errors import (
    CheckpointError,
    PipelineError,
    RunError,
    name_ranks,
    one_line,
    readable,
)
from strategies.heartbeat import Beat
from strategies.raised import has_lost, in_plain_data, is_late, rebuilt
from strategies.runtime.lightning.last_words import until
from strategies.runtime.messages.exchange import everybody
from strategies.runtime.messages.meeting import Meeting

_ANSWER_S = 5.0  # for ranks to be released, and to say that they have heard
# For all ranks to fail by themselves: what we refuse, mostly all of them do.
_TOGETHER_S, _REFUSED_S = 3.0, 10.0
_SAVING_S = 10.0  # for a checkpoint that is being written, and for all ranks to come to one


class ApartError(CheckpointError):
    """A collective call after the ranks have ended their connections."""


@dataclass(frozen=True)
class Rank:
    """Whose fit ends.

    Attributes:
        step: Optimizer steps that it has made.
        beat: What it has done last.
        place: Where it has failed, as other ranks know the place, too; None inside of the list of
            instructions, of which each rank has its own.
        watched: Whether a launcher decides how the run ends, and keeps the store.
    """

    rank: int
    world_size: int
    step: int
    beat: Beat
    place: int | None
    timeout_s: float
    watched: bool

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]


@dataclass(frozen=True)
class End:
    """How a fit has ended on this rank.

    Attributes:
        error: What to raise; the rank's own, or another's.
        why: In words, for what cannot be done any more; None where all ranks have failed alike:
            they stay connected.
        comes: Asked before each checkpoint that is saved then: whether all ranks come to it.
    """

    error: BaseException
    why: str | None
    comes: Callable[[], bool] | None = None


def end_together() -> None:
    """Returns when all ranks have come to the end of their fit; collective.

    Raises:
        RuntimeError: One of them has failed instead.
    """
    everybody().everyone(None)


def end_by(
    error: BaseException, here: Rank, met: Meeting, *, saves: bool, settle: Callable[[float], None]
) -> End:
    """Tells the other ranks that this one has raised an error, or finds out which one has.

    Args:
        error: What this rank has raised.
        here: This rank.
        met: Where the ranks have met.
        saves: Whether a callback is going to save now.
        settle: Waits so long for what this rank is writing to be written.
    """
    if not met.is_on:
        return End(error, None)
    store = met.store
    late, own = is_late(error), not has_lost(error)
    stays = False
    try:
        cause = None if own else _first(store, here)
        if cause is None and (own or (late and not here.watched)):
            record = {"late": late, "step": here.step, "place": here.place}
            _say(store, here, "failed", record | ({} if late else in_plain_data(error)))
        else:
            _say(store, here, "heard", {})
        if own and saves:
            _print(f"rank {here.rank} failed at step {here.step}: {one_line(error)}")
        most_s = _REFUSED_S if isinstance(error, PipelineError) else _TOGETHER_S
        stays = own and (saves or not here.watched) and _all_alike(store, here, most_s)
        if stays:
            met.stay()
            return End(error, None, partial(_come, store, here))
        settle(_SAVING_S)
        met.end()
        if cause is not None and not cause["late"]:
            again = rebuilt(cause, rank=cause["rank"], step=cause["step"])
            return End(again, f"rank {cause['rank']} has failed")
        if not here.watched:
            until(lambda: _have_answered(store, here), _ANSWER_S)
        if own:
            return End(error, f"{_who_failed(store, here)} ({one_line(error)})")
        if cause is None and (not late or here.watched):
            return End(error, "another rank has ended")
        return End(RunError(_in_vain(store, here)), "ranks have waited for each other in vain")
    except (RuntimeError, ValueError, LookupError):
        # The store has gone, with the rank or the parent that kept it, or says nothing readable.
        return End(error, "another rank has ended")
    finally:
        if not stays:
            met.end()


def _say(store: Store, here: Rank, what: str, record: dict[str, Any]) -> None:
    doing = here.beat.describe()
    place = {"rank": here.rank, "doing": doing, "waits": what == "heard" or record["late"]}
    number = store.add("count", 1)
    store.set(f"{what}/{here.rank}", json.dumps({**record, **place, "number": number}))


def _first(store: Store, here: Rank) -> dict[str, Any] | None:
    """What the first rank that has failed says; None where none has said anything."""
    failed = [f"failed/{rank}" for rank in here.others]
    found = [json.loads(store.get(key)) for key in failed if store.check([key])]
    return min(found, key=lambda record: record["number"], default=None)


def _have_answered(store: Store, here: Rank) -> bool:
    keys = ([f"failed/{rank}", f"heard/{rank}"] for rank in here.others)
    return all(any(store.check([key]) for key in either) for either in keys)


def _who_failed(store: Store, here: Rank) -> str:
    others = [rank for rank in here.others if store.check([f"failed/{rank}"])]
    if not others:
        return f"rank {here.rank} alone has failed"
    return f"{name_ranks(sorted([here.rank, *others]))} have failed, not at the same place"


def _all_alike(store: Store, here: Rank, most_s: float) -> bool:
    """Whether all ranks raise the same kind of error at one place: then they stay connected."""
    keys = [f"failed/{rank}" for rank in range(here.world_size)]
    same = False
    if here.place is not None and until(lambda: store.check(keys), most_s):
        records = [json.loads(store.get(key)) for key in keys]
        same = len({(one.get("kind"), one["step"], one["place"]) for one in records}) == 1
    return _agreed(store, "alike", same)


def _come(store: Store, here: Rank) -> bool:
    number = store.add(f"saves/{here.rank}", 1)
    store.set(f"saves/{number}/{here.rank}", "")
    keys = [f"saves/{number}/{rank}" for rank in range(here.world_size)]
    return _agreed(store, f"saves/{number}", until(lambda: store.check(keys), _SAVING_S))


def _agreed(store: Store, what: str, seen: bool) -> bool:
    """One rank may have given up waiting when another has just come: the first word counts."""
    return bool(store.compare_set(f"agreed/{what}", "", "yes" if seen else "no") == b"yes")


def _in_vain(store: Store, here: Rank) -> str:
    """Where each rank stands, of a wait that has lasted for the time-out."""
    lines = []
    for rank in range(here.world_size):
        key = next((k for k in (f"failed/{rank}", f"heard/{rank}") if store.check([k])), None)
        record = None if key is None else json.loads(store.get(key))
        if record is None:
            lines.append(f"rank {rank} waits for no other rank: its loader, a callback or a step")
        elif record["waits"]:
            lines.append(f"rank {rank} waits {record['doing']}")
        else:
            lines.append(f"rank {rank} has failed {record['doing']}")
    return (
        f"a rank has waited for another one for timeout_s={here.timeout_s:g} s. "
        f"{'; '.join(lines)}. Try a larger PipelineStrategy(timeout_s=...), if that may take so "
        "long."
    )


def _print(text: str) -> None:
    sys.stderr.write(f"{readable(text)}\n")
    sys.stderr.flush()


# ------------------------------------------------------------------------- callbacks that save now


def saves_now(trainer: pl.Trainer) -> bool:
    """Whether a callback saves a checkpoint where a fit fails, as far as one can see."""
    return any(_savers(trainer))


def _savers(trainer: pl.Trainer) -> list[Any]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [
        callback
        for callback in callbacks
        if is_overridden("on_exception", callback, pl.Callback)
        and getattr(callback, "save_on_exception", not isinstance(callback, ModelCheckpoint))
    ]


def save_what_can_be(trainer: pl.Trainer, *, aloud: bool) -> None:
    """Callbacks go on without the checkpoint that cannot be written; ``aloud``: and say why."""
    for callback in _savers(trainer):
        callback.on_exception = partial(_leave_out, callback, callback.on_exception, aloud)


def _leave_out(callback: Any, stock: Callable[..., object], aloud: bool, *given: Any) -> None:
    vars(callback).pop("on_exception")
    try:
        stock(*given)
    except ApartError as apart:
        if aloud:
            _print(str(apart))
