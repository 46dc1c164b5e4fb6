"""What a forward changes in its module that runs twice for one microbatch: statistics, counters.

The second run must find this state as the first one found it, and must leave it as if the forward
had run once. Copying all of it for every microbatch would cost time and memory, and mostly nothing
changes: a snapshot around a stage's first forward shows what does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.contents import MISSING
from strategies.models.replay.hole import Hole
from strategies.models.snapshot import Snapshot, version_of

Before = list[tuple[dict[str, Any], str, Any]]
"""Tables and names of what changes, each with the value that the second run is to find there."""

_AS_IT_IS: Any = object()

_Change = Literal["inside", "value", "result"]
"""A tensor or container is changed in place, another value takes its place, or a fresh result does.

No forward reads a result of the one before, so it need not be kept, and it may be large.
"""


class ForwardState:
    """Keeps what a stage's forward changes in a module, for its second run."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: dict[int, list[tuple[dict[str, Any], str, _Change]]] = {}
        self._quiet: dict[int, list[tuple[str, dict[str, Any], str]]] = {}  # buffers that stay

    @contextmanager
    def kept(self, stage: int) -> Iterator[Before]:
        """Around a forward; the list is complete when it has ended.

        Raises:
            ModelError: A buffer changes that the stage's first forward left alone.
        """
        before: Before = []
        if stage not in self._changing:
            state = Snapshot(self._module, exact=True, bookkeeping=True).take()
            yield before
            before += self._learn(stage, state)
            return
        for table, key, how in self._changing[stage]:
            before.append((table, key, _taken(table.get(key, MISSING), how)))
        quiet = [
            (name, table, key, table.get(key), _version(table.get(key)))
            for name, table, key in self._quiet[stage]
        ]
        yield before
        for name, table, key, value, version in quiet:
            if table.get(key) is not value or _version(value) != version:
                raise ModelError(
                    f"buffer {name} was changed by a forward of stage {stage}, but not by the "
                    "stage's first one, so its value from before was not kept, and recomputing "
                    "needs it. Change it in every forward, or use recompute=none."
                )

    def _learn(self, stage: int, state: Snapshot) -> Before:
        changing: list[tuple[dict[str, Any], str, _Change]] = []
        before: Before = []
        for ref in sorted(state.changed()):
            table, now, old = state.table(ref), state.value(ref), state.before(ref)
            how: _Change = "inside" if now is old else "value"
            if how == "value" and isinstance(now, Tensor) and not state.is_buffer(ref):
                how = "result"
            first = _AS_IT_IS if how == "result" and old is not MISSING else state.copy(ref)
            changing.append((table, ref.key, how))
            before.append((table, ref.key, first))
        known = {(id(table), key) for table, key, _ in changing}
        self._changing[stage] = changing
        self._quiet[stage] = [
            (f"{name}.{key}" if name else key, child._buffers, key)
            for name, child in self._module.named_modules()
            for key, buffer in child._buffers.items()
            if (id(child._buffers), key) not in known and _is_data(buffer)
        ]
        return before


@contextmanager
def put_back(before: Before) -> Iterator[None]:
    """Inside, the module is what it was before a forward; afterwards what it is now."""
    now = [(table, key, table.get(key, MISSING)) for table, key, _ in before]
    _put(entry for entry in before if entry[2] is not _AS_IT_IS)
    try:
        yield
    finally:
        _put(now)


def _put(entries: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
    for table, key, value in entries:
        if value is MISSING:
            table.pop(key, None)
        else:
            table[key] = value


def _taken(value: Any, how: _Change) -> Any:
    if how == "result":
        return _AS_IT_IS
    if how == "inside" and _is_data(value):
        return value.detach().clone()
    return value.copy() if how == "inside" and type(value) in (list, dict, set) else value


def _version(value: Any) -> int:
    return version_of(value) if _is_data(value) else 0


def _is_data(value: Any) -> bool:
    real = isinstance(value, Tensor) and not isinstance(value, nn.Parameter | Hole)
    return real and not value.is_meta
