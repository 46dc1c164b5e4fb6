"""Which samples a replica sees: every stage of a pipeline the same ones, in a resumable order.

Lightning's own injection gives each process a share, and shuffles a training loader that was not
to be shuffled. Here the share is the replica's, the loader's own choice of order is kept, and after
a restart inside an epoch the batches that were seen are left out. One replica shuffles as stock
Lightning does on one device, several as it does under DDP.
"""

from __future__ import annotations

import functools
import os
import signal
import zlib
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from itertools import chain, islice
from typing import Any

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from strategies.errors import DataError
from strategies.models.nested import replaced
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
        drawn: RandomSampler | None = None,
    ) -> None:
        """``drawn``: who draws some of the indices, or some of them twice; None for each once."""
        super().__init__(
            range(length if drawn is None else len(drawn)),  # type: ignore[arg-type]  # its length
            num_replicas=num_replicas,
            rank=replica,
            shuffle=shuffle and drawn is None,
            seed=seed,
        )
        self.epoch = epoch
        self._length = length
        self._drawn = drawn
        self._skip = {epoch: skip}

    def __iter__(self) -> Iterator[int]:
        indices = list(super().__iter__())
        if self._drawn is not None:
            source = torch.Generator().manual_seed(self.seed + self.epoch)
            order = list(_drawing(self._drawn, source))
            indices = [order[place] for place in indices]
        yield from indices[self._skip.get(self.epoch, 0) :]


def _drawing(sampler: RandomSampler, source: torch.Generator) -> Iterator[int]:
    """What it draws from a generator."""
    return iter(
        RandomSampler(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler.num_samples,
            generator=source,
        )
    )


class DeviceOrder(Sampler[int]):
    """The order in which stock Lightning shuffles a training loader on one device.

    It is drawn when the epoch begins, from the sampler's own generator or from torch's. Ranks whose
    generators stand elsewhere would draw other orders; they take that of ``otherwise``, for the
    epoch. A resumed run goes on with the order that was saved, and with the ones behind it.

    Args:
        given: The user's.
        loader: What the loader draws from when it is iterated; None for torch's own generator.
        otherwise: A function of the epoch.
        epoch: That is about to begin, or has begun.
        skip: How many of its indices were seen before a restart.
        agree: Whether a number is the same on all ranks that read this data.
        saved: What ``state_dict`` gave for a checkpoint that is gone on with; None for none.
        restore: Puts torch's generator where it stood when that was written.
    """

    def __init__(
        self,
        given: RandomSampler,
        loader: torch.Generator | None,
        *,
        otherwise: ReplicaSampler,
        epoch: int,
        skip: int,
        agree: Callable[[int], bool],
        saved: Mapping[str, Any] | None,
        restore: Callable[[], None],
    ) -> None:
        self._given = given
        self._loader = loader
        self._otherwise = otherwise
        self._agree = agree
        self._epoch = epoch
        self._skip = {epoch: skip}
        # Of the epoch: what its order was drawn from, a seed or where the generator stood.
        self._source: int | str | None = None
        self._saved = saved
        # Between two epochs: the loader is about to draw, and torch's generator is put back again.
        self._behind = saved is not None and not skip
        if saved is not None and not skip:
            restore()
            if given.generator is not None and saved["own"] is not None:
                given.generator.set_state(_state(saved["own"]))
        self._alike = self._stands_alike()

    def set_epoch(self, epoch: int) -> None:
        """Before an epoch, on all ranks."""
        self._otherwise.set_epoch(epoch)
        if epoch != self._epoch:
            self._epoch, self._source = epoch, None
            self._alike = self._stands_alike()

    def _stands_alike(self) -> bool:
        own = self._given.generator
        state = torch.get_rng_state() if own is None else own.get_state()
        return self._agree(zlib.crc32(state.numpy().tobytes()))

    def __len__(self) -> int:
        return len(self._given)

    def __iter__(self) -> Iterator[int]:
        skip = self._skip.get(self._epoch, 0)
        saved, self._saved = self._saved, None
        own = self._given.generator
        if skip and saved is not None and saved["epoch"] == self._epoch:
            self._source = saved["source"]
        elif skip or not self._alike:
            self._source = None
        elif own is None:
            self._source = int(torch.empty((), dtype=torch.int64).random_().item())
        else:
            self._source = own.get_state().numpy().tobytes().hex()
        if self._source is None:
            return iter(self._otherwise)
        if own is None:
            order = _drawing(self._given, torch.Generator().manual_seed(int(self._source)))
        else:
            order = _drawing(self._given, own)
            if skip:  # Past what this epoch draws; its order comes from where it has begun.
                assert saved is not None
                own.set_state(_state(saved["own"]))
                begun = torch.Generator()
                begun.set_state(_state(str(self._source)))
                order = _drawing(self._given, begun)
        return islice(order, skip, None)

    def state_dict(self) -> dict[str, Any]:
        """Of the epoch that was begun last."""
        own = self._given.generator
        now = None if own is None else own.get_state().numpy().tobytes().hex()
        return {"epoch": self._epoch, "source": self._source, "own": now}

    def catch_up(self) -> None:
        """Draws what a loader that was resumed between two epochs has drawn, once more."""
        if self._behind and self._loader is None:
            torch.empty((), dtype=torch.int64).random_()
        if self._behind and self._given.generator is None and self._source is not None:
            torch.empty((), dtype=torch.int64).random_()
        self._behind = False


def catch_up(combined: CombinedLoader | None) -> None:
    """Draws what loaders that do not shuffle draw when an epoch begins (for their workers)."""
    for loader in () if combined is None else combined.flattened:
        known = isinstance(loader, DataLoader) and loader.generator is None
        if known and not isinstance(loader.sampler, DeviceOrder | RandomSampler):
            torch.empty((), dtype=torch.int64).random_()


def is_order(state: Mapping[str, Any]) -> bool:
    """Whether a loader's state is that of a ``DeviceOrder``."""
    return state.keys() == {"epoch", "source", "own"}


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def shard(
    loader: Any,
    *,
    num_replicas: int,
    replica: int,
    training: bool,
    seed: int,
    epoch: int,
    batches_done: int,
    on_device: Callable[..., DeviceOrder] | None = None,
    asked: Callable[[Sampler[Any]], Sampler[Any]] = lambda sampler: sampler,
) -> Any:
    """The loader with this replica's share.

    A sampler of the user's own is dealt out to the replicas; it must draw the same order on every
    rank, which is checked at every step inside a pipeline. ``asked`` gives what stands for one that
    was asked before; ``on_device`` makes the order of a single replica's training. What is no
    DataLoader is left alone.

    Raises:
        DataError: Several replicas would train on the same data.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.sampler, DistributedSampler):
        return loader
    sampler: Sampler[Any] | Any = loader.sampler
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        if training and num_replicas > 1:
            kind = "an iterable dataset" if loader.batch_size is not None else "a batch sampler"
            raise DataError(
                f"dp={num_replicas}: a loader with {kind} of its own cannot be shared out, so "
                "every replica would train on the same data. Give each replica its own part (see "
                "trainer.distributed_sampler_kwargs) and set Trainer(use_distributed_sampler="
                "False), or use dp=1."
            )
        return loader
    if type(sampler) not in (RandomSampler, SequentialSampler):
        if num_replicas == 1:
            return loader
        dealt = DistributedSamplerWrapper(
            asked(sampler), num_replicas=num_replicas, rank=replica, shuffle=False
        )
        return _update_dataloader(loader, dealt)
    length = len(loader.dataset)  # type: ignore[arg-type]  # map-style: checked above
    random = sampler if isinstance(sampler, RandomSampler) else None
    whole = random is None or (not random.replacement and random.num_samples == length)
    skip = batches_done * loader.batch_size
    own = ReplicaSampler(
        length,
        num_replicas=num_replicas,
        replica=replica,
        shuffle=random is not None,
        seed=seed,
        epoch=epoch,
        skip=skip,
        drawn=None if whole else random,
    )
    # Lightning takes a loader with these two methods for resumable. This one is, by the batches
    # that the loop has counted (``skip``), so it has no state of its own to add.
    if random is None or not training or num_replicas > 1 or on_device is None:
        resumable: Any = _update_dataloader(loader, own)
        resumable.state_dict = dict
        resumable.load_state_dict = _nothing_to_load
        return resumable
    order = on_device(random, loader.generator, otherwise=own, epoch=epoch, skip=skip)
    resumable = _update_dataloader(loader, order)
    resumable.state_dict = order.state_dict
    resumable.load_state_dict = _nothing_to_load
    return resumable


def _nothing_to_load(state: dict[str, Any]) -> None:
    """What was kept of an order is known when the loader is made."""


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
    loop's first iteration gives the batches that were taken, and then those of the same iterator;
    the generators then go to where this has left them, unless something has drawn meanwhile. What
    torch's own samplers choose from is asked again.
    """

    def __init__(self) -> None:
        self._begun: dict[int, _Begun] = {}
        self._drawn: Callable[[], None] = _nothing
        self._orders: dict[int, _Order] = {}

    def first_batch(self, combined: CombinedLoader, *, dealt: bool = False) -> tuple[Any, int]:
        """The first batch as the loop will have it, and the index of its loader.

        All generators are left as they were. ``dealt``: each replica will get a share of it.
        """
        looking = copy(combined)
        states = Generators.now()
        own = [(g, g.get_state()) for loader in combined.flattened for g in _generators(loader)]
        begun = [_Begun(loader) for loader in combined.flattened]
        looking.flattened = begun
        own_samplers = filter(_is_own, combined.flattened if dealt else ())
        orders = [(loader.batch_sampler, _Order(loader.sampler)) for loader in own_samplers]
        try:
            with replaced([(vars(inner), "sampler", order) for inner, order in orders]):
                batch, _, index = next(iter(looking))
        except StopIteration:
            raise DataError(
                "the data loaders have no batch, and a pipeline cuts the model by running its step "
                "on one. Give them at least one batch."
            ) from None
        finally:
            behind = Generators.now()
            moved = [(g, before, g.get_state()) for g, before in own]
            states.put_back()
            for generator, state in own:
                generator.set_state(state)

        def draw() -> None:
            if states.are_now():
                behind.put_back()
            for generator, before, after in moved:
                if torch.equal(generator.get_state(), before):
                    generator.set_state(after)

        self._drawn = draw
        self._orders = {id(order.sampler): order for _, order in orders if order.drew is False}
        self._begun = {id(item.loader): item for item in begun if item.rest is not None}
        return batch, index

    def resumed(self, loader: Any) -> Any:
        """The loader, which once gives again what was taken."""
        begun = self._begun.pop(id(loader), None)
        if begun is None or (isinstance(loader, DataLoader) and _can_be_asked_again(loader)):
            return loader
        if not isinstance(loader, DataLoader):
            return self._again(begun) if begun.rest is loader else loader
        if loader.persistent_workers:
            return loader
        make = "_get_iterator"  # what its __iter__ asks

        def once() -> Iterator[Any]:
            delattr(loader, make)
            return self._again(begun)

        setattr(loader, make, once)
        return loader

    def asked(self, sampler: Sampler[Any]) -> Sampler[Any]:
        """What stands for a sampler of the user's: its first order is the one that it has given."""
        return self._orders.pop(id(sampler), sampler)

    def _again(self, begun: _Begun) -> Iterator[Any]:
        drawn, self._drawn = self._drawn, _nothing
        drawn()
        return begun.again()

    def forget(self) -> None:
        """Lets iterators that nobody goes on with end, and their workers."""
        self._begun = {}


class _Order(Sampler[Any]):
    """Asks a sampler for an order, and gives it a second time before it asks for another one."""

    def __init__(self, sampler: Sampler[Any]) -> None:
        self.sampler = sampler
        self.drew: bool | None = None  # from generators, which give the same again; None: not asked
        self._known: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if self.drew is None:
            before = Generators.now()
            self._known = list(self.sampler)
            self.drew = not before.are_now()
            return iter(self._known)
        known, self._known = self._known, None
        return iter(self.sampler if known is None else known)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)


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


def _nothing() -> None:
    pass


_OF_TORCH = (
    RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, BatchSampler,
    DistributedSampler,
)  # fmt: skip


def _can_be_asked_again(loader: DataLoader[Any]) -> bool:
    """Whether nothing but generators is behind the loader's order."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    inner = loader.batch_sampler
    samplers = (loader.sampler, inner, getattr(inner, "sampler", None))
    return all(
        type(sampler) in _OF_TORCH or _follows_epochs(sampler)
        for sampler in samplers
        if sampler is not None
    )


def _is_own(loader: Any) -> bool:
    """Whether a loader takes batches from a sampler of the user's, that may count how often."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
        and type(loader.sampler) not in _OF_TORCH
        and not _follows_epochs(loader.sampler)
    )


def _follows_epochs(sampler: Any) -> bool:
    """Whether a sampler's order is a function of the epoch, which it is told."""
    return callable(getattr(sampler, "set_epoch", None))


def _generators(loader: Any) -> Iterator[torch.Generator]:
    """Generators of their own that a loader and its samplers draw from."""
    inner = getattr(loader, "batch_sampler", None)
    for owner in (loader, getattr(loader, "sampler", None), inner, getattr(inner, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator
