"""What a user's step leaves on its module: attributes, containers, metrics, small objects.

The step is run many times for one batch, per microbatch and stage, and stock Lightning runs it
once. So what such a run has changed is taken back behind it (``StepState.take_back``); a run for
the whole batch then does it for good (``whole``), and ``changed`` tells what there is to say to
others. Layers are not looked at: what they keep (running statistics) is their stage's own.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.replay.hole import Hole

ABSENT: Any = object()
CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
# What Lightning and torch keep on every module, and the doors that a replay puts there.
_BOOKKEEPING = frozenset(LightningModule().__dict__) | {"log", "log_dict", "forward"}
_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    "torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric", "numpy",
    "transformers", "omegaconf", "wandb", "tensorboard", "tokenizers", "strategies",
}  # fmt: skip
_DEPTH = 4
_MANY, _FEW = 64, 8  # dicts and lists of more items are compared as a whole, not looked into


@dataclass(frozen=True, slots=True)
class Slot:
    """A place of a module that has a value: an attribute, a buffer, or a container of its class."""

    module: str
    kind: str
    key: str

    @property
    def name(self) -> str:
        return f"{self.module}.{self.key}" if self.module else self.key


# A step may say that the training is to end (``self.trainer.should_stop = True``).
_STOP = Slot("", "trainer", "should_stop")


class StepState:
    """Watches a module's state around the forwards of a pass.

    Args:
        module: The LightningModule.
        layers: Modules that are left alone, with all that is in them.
    """

    def __init__(self, module: nn.Module, layers: Iterable[nn.Module]) -> None:
        self._module = module
        self._layers = [layer for layer in layers if layer is not module]
        self._tables: list[tuple[Slot, dict[str, Any]]] = []
        self._of_class: list[tuple[Slot, Any]] = []
        self._before: list[dict[str, Any]] = []
        self._begun: list[tuple[tuple[str, ...], tuple[int, ...]]] = []
        self._marks: list[tuple[int, ...]] = []
        self._containers: list[tuple[Slot, Any, Any]] = []
        self._tensors: list[_KeptTensor] = []
        self._stops: bool | None = None

    def forget(self) -> None:
        """Modules are looked for anew when the next pass begins: hooks may make some."""
        self._tables = []

    @property
    def is_known(self) -> bool:
        return bool(self._tables)

    def _look_for_modules(self) -> None:
        inside = {id(child) for layer in self._layers for child in layer.modules()}
        self._tables = []
        for name, child in self._module.named_modules():
            # Torch's own modules keep nothing besides buffers.
            library = (
                type(child).__module__.startswith("torch.nn.") and type(child) is not nn.Module
            )
            if (child._buffers or not library) and id(child) not in inside:
                self._tables.append((Slot(name, "attribute", ""), child.__dict__))
                self._tables.append((Slot(name, "buffer", ""), child._buffers))
        self._of_class = [
            (Slot("", "class", key), value)
            for kind in type(self._module).__mro__
            if kind.__module__.partition(".")[0] not in _LIBRARIES
            for key, value in vars(kind).items()
            if type(value) in CONTAINERS and not key.startswith("__")
        ]

    def begin(self) -> None:
        """Notes the state from which every forward of the pass is to start."""
        if not self._tables:
            self._look_for_modules()
        self._containers, self._tensors = [], []
        self._stops = self._stops_now()
        seen: set[int] = set()
        self._before = [
            {key: value for key, value in table.items() if key not in _BOOKKEEPING}
            for _, table in self._tables
        ]
        # All that a table holds, bookkeeping included: mostly nothing of it changes in a forward,
        # and that is seen without looking at one name after the other.
        self._begun = [(tuple(table), tuple(map(id, table.values()))) for _, table in self._tables]
        self._marks = [tuple(map(id, before.values())) for before in self._before]
        for (where, table), before in zip(self._tables, self._before, strict=True):
            for key, value in before.items():
                slot = Slot(where.module, where.kind, key)
                self._look(slot, (table, before), key, value, seen, _DEPTH)
        for slot, value in self._of_class:
            self._look(slot, None, None, value, seen, _DEPTH)

    def _look(
        self, slot: Slot, holders: Any, key: Any, value: Any, seen: set[int], depth: int
    ) -> None:
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter | Hole) and not value.is_meta:
                if value.is_inference() and holders is not None:
                    # Such a tensor does not count its changes; its copy does.
                    with torch.inference_mode(False):
                        value = value.clone()
                    for holder in holders:
                        holder[key] = value
                self._tensors.append(_KeptTensor(slot, holders, key, value))
            return
        items: Iterable[tuple[Any, Any]]
        inner = value
        if type(value) in CONTAINERS:
            if isinstance(value, dict):
                items = value.items()
            else:
                items = enumerate(value) if not isinstance(value, set) else ()
        elif is_record(value):
            inner = value.__dict__
            items = inner.items()
        else:
            return
        if id(inner) in seen:
            return
        seen.add(id(inner))
        before = inner.copy()
        self._containers.append((slot, inner, before))
        if depth and len(inner) <= (_MANY if isinstance(inner, dict) else _FEW):
            for name, item in items:
                self._look(slot, (inner, before), name, item, seen, depth - 1)

    def marks(self) -> list[Any]:
        """Something that is equal as long as nothing is changed."""
        tables = [
            begun
            if self._is_as_begun(place, table)
            else tuple(id(v) for k, v in table.items() if k not in _BOOKKEEPING)
            for place, ((_, table), begun) in enumerate(zip(self._tables, self._marks, strict=True))
        ]
        containers = [
            (len(c), id(next(reversed(c), None)) if isinstance(c, list | deque) else None)
            for _, c, _ in self._containers
        ]
        return [tables, containers, [kept.version for kept in self._tensors], self._stops_now()]

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
            if self._is_as_begun(place, table):
                continue
            for key, value in table.items():
                if key not in _BOOKKEEPING and not _is_same(value, before.get(key, ABSENT)):
                    found.add(Slot(where.module, where.kind, key))
            for key in before:
                if key not in table:
                    found.add(Slot(where.module, where.kind, key))
        for slot, container, before in self._containers:
            if not _equal(container, before):
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
            if self._is_as_begun(place, table):
                continue
            now = {key: value for key, value in table.items() if key not in _BOOKKEEPING}
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
        for _, container, before in self._containers:
            if not _equal(container, before):
                refill(container, before)
                touched = True
        for kept in self._tensors:
            touched = kept.take_back() or touched
        return touched

    def _is_as_begun(self, place: int, table: dict[str, Any]) -> bool:
        """Whether a table holds the same objects under the same names; those of then still live."""
        names, values = self._begun[place]
        return tuple(map(id, table.values())) == values and tuple(table) == names

    def value(self, slot: Slot) -> Any:
        """What is there now; ABSENT if nothing is."""
        if slot == _STOP:
            return self._stops_now()
        module = self._module.get_submodule(slot.module)
        if slot.kind == "class":
            return getattr(type(module), slot.key)
        table: dict[str, Any] = module._buffers if slot.kind == "buffer" else module.__dict__
        return table.get(slot.key, ABSENT)

    def put(self, slot: Slot, value: Any) -> None:
        if slot == _STOP:
            trainer: Any = self._module._trainer
            trainer.should_stop = value
            return
        module = self._module.get_submodule(slot.module)
        table: dict[str, Any] = module._buffers if slot.kind == "buffer" else module.__dict__
        if value is ABSENT:
            table.pop(slot.key, None)
        elif slot.kind != "class":
            table[slot.key] = value


class _KeptTensor:
    """A tensor of the state, with a copy of what it was."""

    def __init__(self, slot: Slot, holders: Any, key: Any, tensor: Tensor) -> None:
        self.slot = slot
        self._holders = holders  # where it is, and the copy from which that is filled again
        self._key = key
        self._tensor = tensor
        self._version = version_of(tensor)
        self._copy = tensor.detach().clone()

    @property
    def version(self) -> int:
        return version_of(self._tensor)

    def is_changed(self) -> bool:
        return self.version != self._version

    def take_back(self) -> bool:
        """Another object takes the place of a changed one, which a graph may still need."""
        if not self.is_changed():
            return False
        self._tensor = self._copy.clone()
        self._version = version_of(self._tensor)
        for holder in self._holders:
            holder[self._key] = self._tensor
        return True


def version_of(tensor: Tensor) -> int:
    if isinstance(tensor, Hole):
        return -2  # A tensor into which a probe has written becomes one.
    return -1 if tensor.is_inference() else tensor._version


def is_record(value: Any) -> bool:
    """Whether it is an object of somebody's own class, with attributes of its own."""
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, Tensor | nn.Module | type)
        and not callable(value)
        and kind.__module__.partition(".")[0] not in _LIBRARIES
        and not isinstance(value, BaseException)
    )


def refill(container: Any, content: Any) -> None:
    """Gives a container another content; it stays the same object."""
    if isinstance(container, list):
        container[:] = content
    elif isinstance(container, dict):
        # Past whatever a subclass forbids.
        dict.clear(container)
        dict.update(container, content)
    else:
        container.clear()
        container.extend(content) if isinstance(container, deque) else container.update(content)


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
    plain = int | float | str | bool | complex | None
    return type(value) is type(before) and isinstance(value, plain) and bool(value == before)


def _equal(container: Any, before: Any) -> bool:
    if len(container) != len(before):
        return False
    try:
        return bool(container == before)
    except Exception:
        return False  # Tensors answer for each of their elements.
