"""What ranks say with each step of the end of their epoch, and the refusals where it differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from strategies.errors import DataError
from strategies.models.stage_model import Mode
from strategies.runtime.messages.mesh import Coordinates

Ends = tuple[int | None, bool, int | None]
"""Batches of the epoch, None if unknown; whether this is the last; rows of the next one."""

DIVIDE = (
    "Divide data of your own by trainer.distributed_sampler_kwargs (the replica's rank and "
    "num_replicas, the same on all ranks of a pipeline) in place of trainer.global_rank and "
    "world_size."
)
KINDS: dict[Mode, str] = {
    "train": "training", "validate": "validation", "test": "test", "predict": "prediction",
}  # fmt: skip


def check_ends(replicas: Sequence[Sequence[Sequence[Any]]], where: Coordinates, mode: Mode) -> None:
    """Refuses that an epoch ends for one rank and goes on for another, which would wait for it.

    All ranks that look at the same answers raise alike.

    Args:
        replicas: By replica, the answers of its ranks, whose last entry is an ``Ends``; only this
            rank's replica, or all of them.
        where: This rank.
        mode: What the batch is for.
    """
    numbers = [where.dp_rank] if len(replicas) < where.dp else range(where.dp)
    for number, answers in zip(numbers, replicas, strict=True):
        _refuse_stages([answer[-1] for answer in answers], where.replica(number), KINDS[mode])
    if len(replicas) > 1:
        _refuse_replicas([answers[0][-1] for answers in replicas])


def _refuse_stages(ends: Sequence[Ends], ranks: Sequence[int], kind: str) -> None:
    done = [count or 0 for count, last, _ in ends if last]
    if len(done) not in (0, len(ends)):
        counts = [count or 0 if last else f"more than {max(done)}" for count, last, _ in ends]
        refuse_counts(f"{kind} batches", dict(zip(ranks, counts, strict=True)))
    rows = [following for _, _, following in ends if following is not None]
    if len(rows) == len(ends) and len(set(rows)) > 1:
        refuse_counts(f"rows in a {kind} batch", dict(zip(ranks, rows, strict=True)))


def refuse_counts(what: str, counts: Mapping[int, int | str]) -> NoReturn:
    """Names what each rank of a replica has.

    Raises:
        DataError: Always.
    """
    each = ", ".join(f"rank {rank} has {count}" for rank, count in sorted(counts.items()))
    raise DataError(
        f"the ranks of one pipeline have unequal numbers of {what}: {each}. They run each batch "
        "together, so one would wait for another in vain. Data must not depend on the process: "
        f"seed what chooses the samples, and sort files that are listed. {DIVIDE}"
    )


def _refuse_replicas(ends: Sequence[Ends]) -> None:
    done = [count or 0 for count, last, _ in ends if last]
    if len(done) in (0, len(ends)):
        return
    counts = [
        f"replica {number} has {count if last or count else f'more than {max(done)}'}"
        for number, (count, last, _) in enumerate(ends)
    ]
    raise DataError(
        f"replicas have unequal numbers of training batches in an epoch: {', '.join(counts)}. "
        "Each step adds up the gradients of all replicas, so one would wait for another in "
        "vain. Give all the same number (let the data set be divided by "
        "trainer.distributed_sampler_kwargs, or end with the shortest share), or set "
        f"Trainer(limit_train_batches={min(done)})."
    )
