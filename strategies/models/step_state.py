"""What a user's step leaves on its module: attributes, containers, metrics, small objects.

The step is run many times for one batch, per microbatch and stage, and stock Lightning runs it
once. So what such a run has changed is taken back behind it (``StepState.take_back``); a run for
the whole batch then does it for good (``whole``), and ``changed`` tells what there is to say to
others. Layers are not looked at: what they keep (running statistics) is their stage's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.contents import PLAIN, Kind, item_mark, kind_of
from strategies.models.replay.hole import Hole
from strategies.models.step_places import (
    ABSENT,
    BOOKKEEPING,
    Place,
    Slot,
    of_class,
    of_files,
    of_trainer,
    speaks_of,
)

_DEPTH = 12
_MOST = 20_000  # objects that are looked into
_COPIED_BYTES = 256 << 20  # of tensors that lie deeper than in an attribute of a module


# A step may say that the training is to end (``self.trainer.should_stop = True``).
_STOP = Slot("", "trainer", "should_stop")
_TABLES = ("attribute", "buffer")


class StepState:
    """Watches a module's state around the forwards of a pass.

    Besides the module's attributes and buffers that is what its code keeps elsewhere: in its
    class, in variables of its file, in the trainer's callbacks and data module.

    Args:
        module: The LightningModule.
        layers: Modules that are left alone, with all that is in them.
        elsewhere: Whether only what lies outside of the module is looked at.
    """

    def __init__(
        self, module: nn.Module, layers: Iterable[nn.Module], *, elsewhere: bool = False
    ) -> None:
        self._module = module
        self._layers = [layer for layer in layers if layer is not module]
        self._elsewhere = elsewhere
        self._known = False
        self._tables: list[tuple[Slot, dict[str, Any]]] = []
        self._places: list[Place] = []
        self._befores: list[Any] = []
        self._before: list[dict[str, Any]] = []
        self._begun: list[tuple[tuple[str, ...], tuple[int, ...]]] = []
        self._marks: list[tuple[Any, ...]] = []
        self._containers: list[tuple[Slot, Any, Kind, Any]] = []
        self._tensors: list[_KeptTensor] = []
        self._stops: bool | None = None

    def forget(self) -> None:
        """Modules are looked for anew when the next pass begins: hooks may make some."""
        self._known = False

    @property
    def is_known(self) -> bool:
        return self._known

    def _look_for_modules(self) -> None:
        self._known = True
        self._tables = []
        inside = {id(child) for layer in self._layers for child in layer.modules()}
        for name, child in () if self._elsewhere else self._module.named_modules():
            # Torch's own modules keep nothing besides buffers.
            library = (
                type(child).__module__.startswith("torch.nn.") and type(child) is not nn.Module
            )
            if (child._buffers or not library) and id(child) not in inside:
                self._tables.append((Slot(name, "attribute", ""), child.__dict__))
                self._tables.append((Slot(name, "buffer", ""), child._buffers))
        trainer: Any = getattr(self._module, "_trainer", None)
        self._places = [*of_class(type(self._module)), *of_files(type(self._module))]
        self._places += of_trainer(trainer, callbacks=speaks_of(type(self._module), "callbacks"))

    def begin(self) -> None:
        """Notes the state from which every forward of the pass is to start."""
        if not self._known:
            self._look_for_modules()
        self._containers, self._tensors = [], []
        self._stops = self._stops_now()
        looked = _Looked()
        self._before = [
            {key: value for key, value in table.items() if key not in BOOKKEEPING}
            for _, table in self._tables
        ]
        # All that a table holds, bookkeeping included: mostly nothing of it changes in a forward,
        # and that is seen without looking at one name after the other.
        self._begun = [(tuple(table), tuple(map(id, table.values()))) for _, table in self._tables]
        self._marks = [tuple(map(item_mark, before.values())) for before in self._before]
        for (where, table), before in zip(self._tables, self._before, strict=True):
            for key, value in before.items():
                if type(value) not in PLAIN:
                    slot = Slot(where.module, where.kind, key)
                    self._look(slot, (table, before), key, value, looked, 0)
        self._befores = [place.get() for place in self._places]
        for place, value in zip(self._places, self._befores, strict=True):
            if type(value) not in PLAIN and not isinstance(value, Tensor):
                self._look(place.slot, None, None, value, looked, 0)

    def _look(
        self, slot: Slot, holders: Any, key: Any, value: Any, looked: _Looked, depth: int
    ) -> None:
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter | Hole) and not value.is_meta:
                if value.is_inference() and holders:
                    # Such a tensor does not count its changes; its copy does.
                    with torch.inference_mode(False):
                        value = value.clone()
                    for holder in holders:
                        holder[key] = value
                copies = slot.kind != "callback" and (depth == 0 or looked.may_copy(value))
                self._tensors.append(_KeptTensor(slot, holders or (), key, value, copies=copies))
            return
        kind = kind_of(value)
        if kind is None or not looked.first_time(value):
            return
        before = kind.read(value)
        self._containers.append((slot, value, kind, before))
        if depth < _DEPTH:
            inner = () if isinstance(value, tuple | set) else (_Holder(kind, value), before)
            for name, item in kind.items(before):
                if type(item) not in PLAIN:
                    self._look(slot, inner, name, item, looked, depth + 1)

    def marks(self) -> list[Any]:
        """Something that is equal as long as nothing is changed."""
        tables = [
            begun
            if self._holds_the_same(place, table)
            else tuple(item_mark(v) for k, v in table.items() if k not in BOOKKEEPING)
            for place, ((_, table), begun) in enumerate(zip(self._tables, self._marks, strict=True))
        ]
        containers = [kind.mark(value) for _, value, kind, _ in self._containers]
        places = [item_mark(place.get()) for place in self._places]
        versions = [kept.version for kept in self._tensors]
        return [tables, containers, places, versions, self._stops_now()]

    def _stops_now(self) -> bool | None:
        """Whether the step's trainer is to stop; None where it has none."""
        trainer = getattr(self._module, "_trainer", None)
        return getattr(trainer, "should_stop", None)

    def changed(self) -> set[Slot]:
        """Places whose value is another one than when the pass began, on the surface or inside."""
        found: set[Slot] = set()
        for place, ((where, table), before) in enumerate(
            zip(self._tables, self._before, strict=True)
        ):
            if self._holds_the_same(place, table):
                continue
            for key, value in table.items():
                if key not in BOOKKEEPING and not _is_same(value, before.get(key, ABSENT)):
                    found.add(Slot(where.module, where.kind, key))
            for key in before:
                if key not in table:
                    found.add(Slot(where.module, where.kind, key))
        for held, value in zip(self._places, self._befores, strict=True):
            if not _is_same(held.get(), value):
                found.add(held.slot)
        for slot, container, kind, content in self._containers:
            if not kind.same(container, content):
                found.add(slot)
        if self._stops_now() != self._stops:
            found.add(_STOP)
        return found | {kept.slot for kept in self._tensors if kept.is_changed()}

    def take_back(self) -> bool:
        """Puts the state of the pass's beginning back; tells whether it was another one."""
        touched = self._stops_now() != self._stops
        if touched:
            self.put(_STOP, self._stops)
        for place, ((_, table), before) in enumerate(zip(self._tables, self._before, strict=True)):
            if self._holds_the_same(place, table):
                continue
            now = {key: value for key, value in table.items() if key not in BOOKKEEPING}
            for key, value in now.items():
                if value is not before.get(key, ABSENT):
                    touched = touched or not _is_same(value, before.get(key, ABSENT))
                    if key in before:
                        table[key] = before[key]
                    else:
                        del table[key]
            for key in before:
                if key not in now:
                    table[key], touched = before[key], True
        for held, value in zip(self._places, self._befores, strict=True):
            if held.get() is not value:
                touched = touched or not _is_same(held.get(), value)
                held.put(value)
        for _, container, kind, content in self._containers:
            if not kind.same(container, content):
                kind.fill(container, content)
                touched = True
        for kept in self._tensors:
            touched = kept.take_back() or touched
        return touched

    def is_as_begun(self) -> bool:
        """Whether nothing is another object than when the pass began, and nothing in it changed."""
        return (
            self._stops_now() == self._stops
            and all([self._holds_the_same(at, table) for at, (_, table) in enumerate(self._tables)])
            and all([p.get() is v for p, v in zip(self._places, self._befores, strict=True)])
            and all([kind.same(value, content) for _, value, kind, content in self._containers])
            and not any([kept.is_changed() for kept in self._tensors])
        )

    def _holds_the_same(self, place: int, table: dict[str, Any]) -> bool:
        """Whether a table holds the same objects under the same names; those of then still live."""
        names, values = self._begun[place]
        return tuple(map(id, table.values())) == values and tuple(table) == names

    def value(self, slot: Slot) -> Any:
        """What is there now; ABSENT if nothing is."""
        if slot == _STOP:
            return self._stops_now()
        if slot.kind in _TABLES:
            return self._table(slot).get(slot.key, ABSENT)
        return self._place(slot).get()

    def put(self, slot: Slot, value: Any) -> None:
        if slot == _STOP:
            trainer: Any = self._module._trainer
            trainer.should_stop = value
        elif slot.kind not in _TABLES:
            self._place(slot).put(value)
        elif value is ABSENT:
            self._table(slot).pop(slot.key, None)
        else:
            self._table(slot)[slot.key] = value

    def _table(self, slot: Slot) -> dict[str, Any]:
        module = self._module.get_submodule(slot.module)
        return module._buffers if slot.kind == "buffer" else module.__dict__

    def _place(self, slot: Slot) -> Place:
        if not self._known:
            self._look_for_modules()
        return next(place for place in self._places if place.slot == slot)


class _Looked:
    """What has been looked into, and how much of it may still be copied."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._bytes = 0

    def first_time(self, value: Any) -> bool:
        if id(value) in self._seen or len(self._seen) > _MOST:
            return False
        self._seen[id(value)] = value
        return True

    def may_copy(self, tensor: Tensor) -> bool:
        self._bytes += tensor.numel() * tensor.element_size()
        return self._bytes <= _COPIED_BYTES


class _Holder:
    """Where a tensor lies inside of something, which another one may take the place of."""

    def __init__(self, kind: Kind, value: Any) -> None:
        self._kind = kind
        self._value = value

    def __setitem__(self, key: Any, item: Any) -> None:
        self._kind.put(self._value, key, item)


class _KeptTensor:
    """A tensor of the state, with a copy of what it was."""

    def __init__(self, slot: Slot, holders: Any, key: Any, tensor: Tensor, *, copies: bool) -> None:
        self.slot = slot
        self._holders = holders  # where it is, and the copy from which that is filled again
        self._key = key
        self._tensor = tensor
        self._version = version_of(tensor)
        self._copy = tensor.detach().clone() if copies else None

    @property
    def version(self) -> int:
        return version_of(self._tensor)

    def is_changed(self) -> bool:
        return self.version != self._version

    def take_back(self) -> bool:
        """Another object takes the place of a changed one, which a graph may still need.

        Raises:
            ModelError: There is no copy of it.
        """
        if not self.is_changed():
            return False
        if self._copy is None:
            raise ModelError(
                f"a step changes a tensor in {self.slot.name} in place, which is too large, or too "
                "far from the module, to be copied for each batch. Make it a buffer "
                "(register_buffer)."
            )
        if not self._holders:
            with torch.no_grad():
                self._tensor.copy_(self._copy)
        else:
            self._tensor = self._copy.clone()
        self._version = version_of(self._tensor)
        for holder in self._holders:
            holder[self._key] = self._tensor
        return True


def version_of(tensor: Tensor) -> int:
    if isinstance(tensor, Hole):
        return -2  # A tensor into which a probe has written becomes one.
    return -1 if tensor.is_inference() else tensor._version


def join_parts(parts: Sequence[Tensor], shares: Sequence[float], shape: tuple[int, ...]) -> Tensor:
    """Microbatches' tensors as the whole batch's, of ``shape``.

    They are joined along the dimension in which they are shorter; where none is (a loss on the
    way, a table of positions), their mean by shares counts, or the first one's word.

    Raises:
        ModelError: Their shapes do not add up to it.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if all(tuple(part.shape) == tuple(shape) for part in parts):
        if first.is_floating_point() or first.is_complex():
            return sum(
                (part * share for part, share in zip(parts[1:], shares[1:], strict=True)),
                first * shares[0],
            )
        return first
    for dim in range(first.dim()):
        total = sum(part.shape[dim] for part in parts if part.dim() == first.dim())
        rest = [tuple(p.shape[:dim]) + tuple(p.shape[dim + 1 :]) for p in parts]
        wanted = tuple(shape[:dim]) + tuple(shape[dim + 1 :])
        if total == shape[dim] and all(other == wanted for other in rest):
            return torch.cat(list(parts), dim)
    shapes = [str(list(part.shape)) for part in parts]
    raise ModelError(
        f"what the last layer gives for microbatches ({', '.join(shapes)}) does not add up to what "
        f"it gives for the batch ({list(shape)})."
    )


def _is_same(value: Any, before: Any) -> bool:
    """Whether nothing has happened; equal numbers and texts are the same, tensors are not."""
    if value is before:
        return True
    return type(value) is type(before) and type(value) in PLAIN and bool(value == before)
