"""Which samples a replica sees: every stage of a pipeline the same ones, in a resumable order.

Lightning's own injection gives each process a share, and shuffles a training loader that was not
to be shuffled. Here the share is the replica's, the loader's own choice of order is kept, and after
a restart inside an epoch the batches that were seen are left out.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from copy import copy
from itertools import chain
from typing import Any

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from strategies.errors import DataError
from strategies.models.state import Generators


class ReplicaSampler(DistributedSampler[int]):
    """A replica's indices, a function of (seed, epoch) alone, after the first ``skip`` of them."""

    def __init__(
        self,
        length: int,
        *,
        num_replicas: int,
        replica: int,
        shuffle: bool,
        seed: int,
        epoch: int = 0,
        skip: int = 0,
    ) -> None:
        super().__init__(
            range(length),  # type: ignore[arg-type]  # only its length is used
            num_replicas=num_replicas,
            rank=replica,
            shuffle=shuffle,
            seed=seed,
        )
        self.epoch = epoch
        self._skip = {epoch: skip}

    def __iter__(self) -> Iterator[int]:
        indices = list(super().__iter__())
        yield from indices[self._skip.get(self.epoch, 0) :]


def shard(
    loader: Any,
    *,
    num_replicas: int,
    replica: int,
    training: bool,
    seed: int,
    epoch: int,
    batches_done: int,
) -> Any:
    """The loader with this replica's share.

    A sampler of the user's own is dealt out to the replicas; it must draw the same order on every
    rank, which is checked at every step inside a pipeline. What is no DataLoader is left alone.

    Raises:
        DataError: Several replicas would train on the same data.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.sampler, DistributedSampler):
        return loader
    sampler: Sampler[Any] | Any = loader.sampler
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        if training and num_replicas > 1:
            kind = "iterable dataset" if loader.batch_size is not None else "batch sampler"
            raise DataError(
                f"dp={num_replicas}: a loader with an {kind} of its own cannot be shared out, so "
                "every replica would train on the same data. Give each replica its own part (see "
                "trainer.distributed_sampler_kwargs) and set Trainer(use_distributed_sampler="
                "False), or use dp=1."
            )
        return loader
    if type(sampler) not in (RandomSampler, SequentialSampler):
        if num_replicas == 1:
            return loader
        dealt = DistributedSamplerWrapper(
            sampler, num_replicas=num_replicas, rank=replica, shuffle=False
        )
        return _update_dataloader(loader, dealt)
    own = ReplicaSampler(
        len(loader.dataset),  # type: ignore[arg-type]  # map-style: checked above
        num_replicas=num_replicas,
        replica=replica,
        shuffle=isinstance(sampler, RandomSampler),
        seed=seed,
        epoch=epoch,
        skip=batches_done * loader.batch_size,
    )
    resumable: Any = _update_dataloader(loader, own)
    # Lightning takes a loader with these two methods for resumable. This one is, by the batches
    # that the loop has counted (``skip``), so it has no state of its own to add.
    resumable.state_dict = dict
    resumable.load_state_dict = _nothing_to_load
    return resumable


def _nothing_to_load(state: dict[str, Any]) -> None:
    assert not state


# -- a look at the data before training ------------------------------------------------------------


class _Undisturbed:
    """What the process of a loader does first: from then on signals are for its rank alone.

    A scheduler sends SIGTERM to every process of a job, and torch's loaders die of it, so the rank
    that is to write a checkpoint would lose them first. They end with the rank, in any case.
    """

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self._inner = inner

    def __call__(self, worker: int) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        if self._inner is not None:
            self._inner(worker)


def undisturbed(loader: Any, *, rank: int) -> Any:
    """The loader, whose processes outlive a signal that asks their rank to stop."""
    if isinstance(loader, DataLoader) and loader.num_workers > 0:
        inner = loader.worker_init_fn
        if inner is None and int(os.environ.get("PL_SEED_WORKERS", "0")):
            # Lightning's own, which it sets only where there is none.
            inner = functools.partial(pl_worker_init_function, rank=rank)
        loader.worker_init_fn = _Undisturbed(inner)
    return loader


def first_batch(loaders: Any) -> Any:
    """One batch to probe a model with; the generators are left as they were."""
    states = Generators.now()
    try:
        return next(iter(loaders))
    finally:
        states.put_back()


class Looked:
    """Loaders of which a batch was taken before the loop: what they began is gone on with.

    A stream can be read once, and a sampler of the user's may count how often it was asked. So the
    loop's first iteration gives the batches that were taken, and then those of the same iterator.
    """

    def __init__(self) -> None:
        self._begun: dict[int, _Begun] = {}

    def first_batch(self, combined: CombinedLoader) -> tuple[Any, int]:
        """The first batch as the loop will have it, and the index of its loader.

        All generators are left as they were.
        """
        looking = copy(combined)
        states = Generators.now()
        own = [(g, g.get_state()) for loader in combined.flattened for g in _generators(loader)]
        begun = [_Begun(loader) for loader in combined.flattened]
        looking.flattened = begun
        try:
            batch, _, index = next(iter(looking))
        except StopIteration:
            raise DataError(
                "the data loaders have no batch, and a pipeline cuts the model by running its step "
                "on one. Give them at least one batch."
            ) from None
        finally:
            states.put_back()
            for generator, state in own:
                generator.set_state(state)
        self._begun = {id(item.loader): item for item in begun if item.rest is not None}
        return batch, index

    def resumed(self, loader: Any) -> Any:
        """The loader, which once gives again what was taken."""
        begun = self._begun.pop(id(loader), None)
        if begun is None:
            return loader
        if not isinstance(loader, DataLoader):
            return begun.again() if begun.rest is loader else loader
        if loader.persistent_workers:
            return loader
        make = "_get_iterator"  # what its __iter__ asks

        def once() -> Iterator[Any]:
            delattr(loader, make)
            return begun.again()

        setattr(loader, make, once)
        return loader

    def forget(self) -> None:
        """Lets iterators that nobody goes on with end, and their workers."""
        self._begun = {}


class _Begun:
    """A loader and how far it was read."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.rest: Iterator[Any] | None = None
        self._taken: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        self.rest = iter(self.loader)
        for item in self.rest:
            self._taken.append(item)
            yield item

    def again(self) -> Iterator[Any]:
        assert self.rest is not None
        return chain(self._taken, self.rest)


def _generators(loader: Any) -> Iterator[torch.Generator]:
    """Generators of their own that a loader and its samplers draw from."""
    inner = getattr(loader, "batch_sampler", None)
    for owner in (loader, getattr(loader, "sampler", None), inner, getattr(inner, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator
