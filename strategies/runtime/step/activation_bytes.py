"""Bytes that one rank holds for backwards to come, measured at the boundaries of instructions.

Counted are the storages of tensors that autograd has saved, each once however many nodes save it or
a view of it, for as long as they are really alive; what weight gradients that wait hold, gradients
included; and the inputs that checkpointed forwards keep. Not counted are parameters and buffers,
the batch, and constants that microbatches share (masks, rotary tables, weights cast once).

Nothing is hooked into the forward: the graph is read when it is there, so what is measured is what
runs without measuring. It takes time, though; do not time a run that measures.
"""

from __future__ import annotations

import functools
import resource
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from strategies.models.split_backward.autograd_graph import Kind, Node, walk


@dataclass(frozen=True, slots=True)
class StageBytes:
    """What one microbatch holds on one stage."""

    full: int = 0  # from its forward, or its R, until its backward
    waiting: int = 0  # between its I and its W; 0 where no backward is split
    inputs: int = 0  # from a checkpointed forward until its R; 0 where no forward is


State = Literal["full", "waiting", "inputs"]


@dataclass(slots=True)
class _Stored:
    """A storage that something is saved in. Its number is its own while ``alive`` is there."""

    alive: Any
    num_bytes: int
    microbatch: int
    shared: bool = False


class ActivationBytes:
    """Measures the passes of one rank."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.held: list[int] = []  # after each place of the rank's list, in the latest pass
        self._excluded: set[int] = set()
        self._stored: dict[int, _Stored] = {}
        self._sets: dict[tuple[int, int], dict[State, list[_Stored]]] = {}

    def begin(self, length: int, batch: Iterable[Tensor]) -> None:
        self.held = [0] * length
        self._sets.clear()
        own = (*self._module.parameters(), *self._module.buffers(), *batch)
        self._excluded = {storage._cdata for tensor in own for storage in _storages(tensor)}

    def graph(
        self,
        stage: int,
        microbatch: int,
        inputs: Iterable[Tensor],
        outputs: Iterable[Tensor | None],
    ) -> None:
        """Notes what the graph between a forward's inputs and outputs holds."""
        roots = [output for output in outputs if output is not None and output.requires_grad]
        found = saved_tensors(walk(roots, ()).nodes) if roots else ()
        self.note("full", stage, microbatch, (*inputs, *found))

    def note(self, state: State, stage: int, microbatch: int, tensors: Iterable[Tensor]) -> None:
        entries: dict[int, _Stored] = {}
        for tensor in tensors:
            for storage in _storages(tensor):
                key = storage._cdata
                if key in self._excluded or key in entries:
                    continue
                known = self._stored.get(key)
                if known is None:
                    known = _Stored(_reference(storage), storage.nbytes(), microbatch)
                    self._stored[key] = known
                known.shared = known.shared or known.microbatch != microbatch
                entries[key] = known
        self._sets.setdefault((stage, microbatch), {})[state] = list(entries.values())

    def sample(self, place: int) -> None:
        """Notes what is alive after an instruction."""
        # A number is free for another storage once nothing holds the reference: not before here.
        gone = [key for key, entry in self._stored.items() if entry.alive.expired()]
        for key in gone:
            del self._stored[key]
        self.held[place] = sum(e.num_bytes for e in self._stored.values() if not e.shared)

    @property
    def peak(self) -> int:
        """The most that was held after any instruction of the latest pass."""
        return max(self.held, default=0)

    @property
    def stages(self) -> dict[int, StageBytes]:
        """Per stage what the largest microbatch of the latest pass held."""
        largest: dict[int, dict[State, int]] = {}
        for (stage, _), states in sorted(self._sets.items(), key=lambda item: item[0]):
            sizes = largest.setdefault(stage, {})
            for state, entries in states.items():
                size = sum(entry.num_bytes for entry in entries if not entry.shared)
                sizes[state] = max(size, sizes.get(state, 0))
        return {stage: StageBytes(**sizes) for stage, sizes in largest.items()}


def saved_tensors(nodes: Iterable[Node]) -> Iterator[Tensor]:
    """What nodes of an autograd graph have saved; of tensors packed elsewhere what is there."""
    for node in nodes:
        kind: Kind = type(node)
        for raw_name, name in _saved_names(kind):
            raw = getattr(node, raw_name)
            if raw is None:
                continue
            saved = raw if isinstance(raw, tuple) else (raw,)
            if all(entry is None or entry.unpack_hook is None for entry in saved):
                values = getattr(node, name)
                yield from _tensors(values if isinstance(values, tuple | list) else (values,))
                continue
            for entry in saved:
                if entry is not None:
                    yield from _tensors(_packed(entry.data))


def _packed(data: Any) -> Iterable[Any]:
    held: Callable[[], Iterable[Any]] | None = getattr(data, "held_tensors", None)
    return (data,) if held is None else held()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor))


@functools.cache
def _saved_names(kind: Kind) -> tuple[tuple[str, str], ...]:
    """Raw and plain name of each saved value of a type of node."""
    prefix = "_raw_saved_"
    names = [name for name in dir(kind) if name.startswith(prefix)]
    # A user's function has one list of all.
    return tuple(
        (name, "saved_tensors" if name == prefix + "tensors" else name.removeprefix("_raw"))
        for name in names
    )


def _reference(storage: torch.UntypedStorage) -> Any:
    make: Any = StorageWeakRef  # Untyped in torch.
    return make(storage)


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory behind a tensor; nothing for those that have none of their own."""
    try:
        yield tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return


class MemoryUse:
    """Peak of one rank since this object was made.

    On a GPU the peak of torch's allocator on that device (other processes on it do not count),
    which starts again here: an earlier training of this process may have had a higher one. On a
    CPU, where tensors share the heap with everything else, by how much the process's largest
    resident size has grown: the interpreter and its libraries do not count, pages that were given
    back still do.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call] # else there are no statistics yet
            torch.cuda.reset_peak_memory_stats(device)
        else:
            self._before = _largest_resident()

    @property
    def kind(self) -> Literal["allocator_peak", "resident_growth"]:
        """What its figure is."""
        return "allocator_peak" if self._device.type == "cuda" else "resident_growth"

    def peak_bytes(self) -> int:
        """Bytes; never falls."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return max(0, _largest_resident() - self._before)


def _largest_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
