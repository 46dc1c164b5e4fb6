"""Executing a part of a recording: what lies between the two cuts of a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from strategies.errors import ModelError
from strategies.models.nested import leaves, rebuild, tensors
from strategies.models.recording.recording import Entry, Fresh, Modes, Recording, Ref
from strategies.models.replay.hole import operation_name
from strategies.models.replay.path import Cut, Path, Position
from strategies.models.replay.stage_run import like_sent, never_computed
from strategies.models.stage_model import LogCall
from strategies.models.state import reseed

if TYPE_CHECKING:
    from strategies.models.selective.region import SelectiveLayer


@dataclass(slots=True)
class Execution:
    """Runs entries of one recording for one stage.

    Attributes:
        path: Which operations draw random numbers, and what is called how.
        seed: Of this step and microbatch; None leaves the generators alone.
        selective: Layers that recompute inside, by index.
        copies: Whether layers get copies of what the batch alone decides, since they write into it.
        whole: Makes a whole value of one that lies cut over tensor-parallel ranks.
        logs: The log calls of this part.
    """

    path: Path
    seed: int | None
    step: str
    selective: Mapping[int, SelectiveLayer]
    copies: bool = False
    whole: Callable[[Any], Any] = lambda value: value
    logs: list[LogCall] = field(default_factory=list)
    _modes: Modes | None = None
    _met: set[int] = field(default_factory=set)
    _lists: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    _copied: dict[int, Tensor] = field(default_factory=dict)

    @property
    def changed_its_copies(self) -> bool:
        """Whether a layer has written into what the batch alone decides."""
        return any(not t.is_inference() and t._version > 0 for t in self._copied.values())

    def between(
        self, recording: Recording, inputs: Sequence[Tensor], begin: Cut, end: Cut
    ) -> tuple[Tensor, ...]:
        """Runs what lies between two cuts, and gives the values that cross the second one."""
        if len(inputs) != len(begin.tensors):
            raise ModelError(
                f"a stage of {self.step} got {len(inputs)} tensors, its cut has "
                f"{len(begin.tensors)}."
            )
        numbers = recording.numbers
        env = {
            numbers[boundary.key]: like_sent(tensor, boundary)
            for tensor, boundary in zip(inputs, begin.tensors, strict=True)
        }
        wanted = [numbers[boundary.key] for boundary in end.tensors]
        self._run_part(recording, env, begin.position, end.position, set(wanted))
        return tuple(self.whole(env[number]) for number in wanted)

    def _run_part(
        self,
        recording: Recording,
        env: dict[int, Tensor],
        begin: Position,
        end: Position,
        wanted: set[int],
    ) -> None:
        """Runs the entries behind ``begin`` and up to ``end``.

        ``env`` has the values that are received, and then those that are ``wanted``.
        """
        entries = part_of(recording, begin, end)
        if self.seed is not None:
            reseed(self.seed, *self._last_draw(begin))
        self._modes = Modes.now()
        last: dict[int, int] = {}
        for index, entry in enumerate(entries):
            last.update(dict.fromkeys(entry.uses, index))
        index = 0
        for region, group in groupby(entries, lambda entry: entry.region):
            several = list(group)
            stop = index + len(several)
            if region is None:
                for entry in several:
                    self._run(entry, env)
                    for number in {*entry.uses, *_made(entry)}:
                        if last.get(number, -1) <= index and number not in wanted:
                            env.pop(number, None)
                    index += 1
            else:
                kept = [n for e in several for n in _made(e)]
                kept = [n for n in kept if last.get(n, -1) >= stop or n in wanted]
                self._run_region(several, env, kept)
                used = {number for entry in several for number in entry.uses}
                for number in used:
                    if last[number] < stop and number not in wanted:
                        env.pop(number, None)
                index = stop
        self._modes = None

    def _run_region(self, entries: list[Entry], env: dict[int, Tensor], kept: list[int]) -> None:
        """Runs what stands in one activation checkpoint under another one."""
        region = entries[0].region
        assert region is not None
        given = list(dict.fromkeys(n for entry in entries for n in entry.uses if n in env))

        def body(*values: Tensor) -> tuple[Tensor, ...]:
            inside = dict(zip(given, values, strict=True))
            before, self._modes = self._modes, Modes.now()
            self._met.clear()
            self._lists.clear()
            try:
                for entry in entries:
                    self._run(entry, inside)
            finally:
                self._modes = before
            return tuple(inside[number] for number in kept)

        with self._switched(entries[0].modes):
            options: dict[str, Any] = region.options
            values = checkpoint(body, *map(env.__getitem__, given), use_reentrant=False, **options)
        env.update(zip(kept, values, strict=True))

    def _run(self, entry: Entry, env: dict[int, Tensor]) -> None:
        if entry.log is not None:
            self._log(entry, env)
            return
        args, kwargs = rebuild((entry.args, entry.kwargs), lambda leaf: self._resolved(leaf, env))
        if entry.unit is not None:
            args, kwargs = self._shared(entry, args, kwargs)
            if entry.objects is not None and id(entry.objects) not in self._met:
                self._met.add(id(entry.objects))
                entry.objects.restore()
        if entry.modes == self._modes:
            produced = self._call(entry, args, kwargs)
        else:
            with self._switched(entry.modes):
                produced = self._call(entry, args, kwargs)
        if len(produced) != len(entry.numbers):
            raise ModelError(
                f"{self.step}: {self._name(entry)} gives {len(produced)} tensors, and gave "
                f"{len(entry.numbers)} when the step was recorded on shapes. Let it give the same "
                "for all rows of a batch, or use pp=1."
            )
        for number, tensor in zip(entry.numbers, produced, strict=True):
            if number is not None:
                env[number] = tensor
        if entry.written:
            given = list(leaves((args, kwargs)))
            env.update((number, given[place]) for place, number in entry.written)
        if self.seed is not None and entry.numbers:
            call, event = entry.position
            if event == 0 or self.path.events[call][event - 1].random:
                reseed(self.seed, call, event)

    def _call(self, entry: Entry, args: Any, kwargs: Any) -> list[Tensor]:
        layer = None if entry.unit is None else self.selective.get(entry.unit)
        if layer is None:
            result = entry.call(*args, **kwargs)
        else:
            result = layer.run(entry.call, args, kwargs)
        if entry.unit is None and operation_name(entry.call) == "__setitem__":
            return [args[0]]
        produced = tensors(result)
        for module, attribute in entry.effects:
            produced = produced + tensors(getattr(module, attribute))
        return produced

    def _resolved(self, leaf: Any, env: dict[int, Tensor]) -> Any:
        if isinstance(leaf, Ref):
            if leaf.number not in env:
                raise never_computed()
            return env[leaf.number]
        if isinstance(leaf, Fresh):
            return leaf.tensor.clone()
        if self.copies and type(leaf) is Tensor:
            if id(leaf) not in self._copied:
                self._copied[id(leaf)] = leaf.clone()
            return self._copied[id(leaf)]
        return leaf

    def _shared(self, entry: Entry, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A list that two layers are given is one list, to which the first one may have added."""
        if not entry.shared:
            return args, kwargs
        given = [*args]
        for place, identity in entry.shared.items():
            frozen = entry.args[place] if isinstance(place, int) else entry.kwargs[place]
            known = self._lists.get(identity)
            if known is not None and _is_alike(known[0], frozen):
                value = known[1]
            else:
                value = given[place] if isinstance(place, int) else kwargs[place]
            self._lists[identity] = frozen, value
            if isinstance(place, int):
                given[place] = value
            else:
                kwargs[place] = value
        return tuple(given), kwargs

    def _log(self, entry: Entry, env: dict[int, Tensor]) -> None:
        assert entry.log is not None
        value = rebuild(entry.log.value, lambda leaf: self._resolved(leaf, env))
        if isinstance(value, Tensor):
            value = self.whole(value).detach().clone().reshape(())
            value = value.item() if value.device.type == "cpu" else value
        elif value is not None:
            value = float(value)
        self.logs.append(LogCall(entry.log.name, value, entry.log.options, entry.log.metric))

    @contextmanager
    def _switched(self, modes: Modes) -> Iterator[None]:
        now = self._modes
        assert now is not None
        if modes == now:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(modes.grad))
            for (kind, enabled, dtype), before in zip(modes.autocast, now.autocast, strict=False):
                if (kind, enabled, dtype) != before:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            if modes.attention != now.attention:
                stack.enter_context(_attention(modes.attention))
            self._modes = modes
            try:
                yield
            finally:
                self._modes = now

    def _last_draw(self, position: Position) -> Position:
        """Where the generators were seeded last when a step comes to ``position``."""
        call, event = position
        events = self.path.events[call][:event]
        return call, max((n + 1 for n, seen in enumerate(events) if seen.random), default=0)

    def _name(self, entry: Entry) -> str:
        if entry.unit is not None:
            return self.path.units[entry.unit]
        return operation_name(entry.call)


def part_of(recording: Recording, begin: Position, end: Position) -> Sequence[Entry]:
    """The entries behind a position; a log call there belongs to what follows."""
    entries = recording.entries
    start, stop = _behind(entries, begin), _behind(entries, end)
    return entries[start:stop]


def _behind(entries: Sequence[Entry], position: Position) -> int:
    """Where what follows a position begins; a hook that is set on a value there does not."""
    if position == (0, 0):
        return 0
    index = next(i for i, entry in enumerate(entries) if entry.position == position) + 1
    while index < len(entries) and entries[index].is_hook:
        index += 1
    return index


@contextmanager
def _attention(kernels: tuple[bool, ...]) -> Iterator[None]:
    backend: Any = torch.backends.cuda
    switches = (
        (backend.flash_sdp_enabled, backend.enable_flash_sdp),
        (backend.mem_efficient_sdp_enabled, backend.enable_mem_efficient_sdp),
        (backend.math_sdp_enabled, backend.enable_math_sdp),
        (backend.cudnn_sdp_enabled, backend.enable_cudnn_sdp),
    )
    before = [get() for get, _ in switches]
    for (_, put), kernel in zip(switches, kernels, strict=True):
        put(kernel)
    try:
        yield
    finally:
        for (_, put), kernel in zip(switches, before, strict=True):
            put(kernel)


def _made(entry: Entry) -> Iterator[int]:
    yield from (number for number in entry.numbers if number is not None)
    yield from (number for _, number in entry.written)


def _is_alike(first: Any, second: Any) -> bool:
    one, other = list(leaves(first)), list(leaves(second))
    return len(one) == len(other) and all(
        a is b or (isinstance(a, Ref) and isinstance(b, Ref) and a.number == b.number)
        for a, b in zip(one, other, strict=True)
    )
