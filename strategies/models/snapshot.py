"""What a module holds besides its parameters, as it was at one moment; and back to it.

A pipeline runs a user's step many times where stock Lightning runs it once: on shapes, per
microbatch and stage, again for the backward. A ``Snapshot`` knows what such a run has changed and
restores it. It follows attributes and buffers of modules, tensors, containers, arrays and objects
of the user's classes in them, containers of the LightningModule's class, and
``trainer.should_stop``. It does not follow other variables of classes, globals, closures,
attributes of functions, or callbacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from strategies.errors import ModelError
from strategies.models.contents import (
    CONTAINERS,
    MISSING,
    PLAIN,
    Adapter,
    adapter_of,
    is_library,
    is_same,
    item_mark,
)
from strategies.models.replay.hole import Hole, exchange
from strategies.models.state import Generators

_DEPTH = 12
_MOST = 20_000  # objects that are looked into for each batch
_MANY = 10_000  # items of one container that a trial run looks through
_COPIED_BYTES = 256 << 20  # of tensors that lie deeper than in an attribute of a module
# What Lightning and torch keep on every module, and what a replay replaces there.
_BOOKKEEPING = frozenset(LightningModule().__dict__) | {"log", "log_dict", "forward"}


@dataclass(frozen=True, slots=True, order=True)
class StateRef:
    """A place in a module's state: a submodule's name, and that of an attribute or buffer."""

    module: str
    key: str

    @property
    def name(self) -> str:
        return f"{self.module}.{self.key}" if self.module else self.key


_STOP = StateRef("trainer", "should_stop")


class Snapshot:
    """A module's state at the moment of ``take``.

    Args:
        module: The LightningModule, or a layer.
        skip: Modules that are left alone, with all that is in them: layers are their stage's own.
        exact: Whether tensors are compared by their numbers, since batch norm updates its
            statistics without counting that, and restored in place. Otherwise versions are
            compared, and a copy takes the place of a changed tensor, which a graph may need.
        bookkeeping: Whether it includes what torch and Lightning keep on each module (hooks,
            tables of parameters), and the module's torch generators.

    Attributes:
        knows_modules: Whether the next ``take`` looks at the same modules as the last one.
    """

    def __init__(
        self,
        module: nn.Module,
        skip: Iterable[nn.Module] = (),
        *,
        exact: bool = False,
        bookkeeping: bool = False,
    ) -> None:
        self._module = module
        self._skip = [layer for layer in skip if layer is not module]
        self._exact = exact
        self._bookkeeping = bookkeeping
        self.knows_modules = False
        self._tables: list[_Table] = []
        self._containers: list[tuple[StateRef, Any, Adapter, Any]] = []
        self._tensors: list[_KeptTensor] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._seen: dict[int, Any] = {}
        self._bytes = 0

    def forget_modules(self) -> None:
        """The next ``take`` looks for modules again: hooks may make some."""
        self.knows_modules = False

    def _find_tables(self) -> None:
        self.knows_modules, self._tables = True, []
        inside = {id(child) for layer in self._skip for child in layer.modules()}
        for name, child in self._module.named_modules():
            # Torch's own modules keep nothing besides buffers.
            library = (
                type(child).__module__.startswith("torch.nn.") and type(child) is not nn.Module
            )
            if id(child) not in inside and (self._bookkeeping or child._buffers or not library):
                self._tables.append(_Table(name, child.__dict__, self._bookkeeping))
                self._tables.append(_Table(name, child._buffers, self._bookkeeping))
        trainer = getattr(self._module, "_trainer", None)
        if hasattr(trainer, "should_stop"):  # A step may say that the training is to end.
            self._tables.append(_Table(_STOP.module, vars(trainer), False, only=_STOP.key))

    def take(self) -> Snapshot:
        """Notes the present state."""
        if not self.knows_modules:
            self._find_tables()
        self._containers, self._tensors, self._generators = [], [], []
        self._seen, self._bytes = {}, 0
        for table in self._tables:
            table.take()
        for table in self._tables:
            for key, value in table.before.items():
                if type(value) not in PLAIN and key != "_buffers":
                    holders = (table.values, table.before)
                    self._look(StateRef(table.module, key), holders, key, value, 0)
        for key, value in _class_containers(type(self._module)):
            self._look(StateRef("", key), (), None, value, 0)
        return self

    def _look(self, ref: StateRef, holders: Any, key: Any, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            self._look_at_tensor(ref, holders, key, value, depth)
            return
        if isinstance(value, torch.Generator) and self._bookkeeping:
            self._generators.append((value, value.get_state()))
            return
        adapter = adapter_of(value)
        if adapter is None or id(value) in self._seen:
            return
        if len(self._seen) > _MOST and not self._bookkeeping:
            return
        self._seen[id(value)] = value
        content = adapter.read(value)
        self._containers.append((ref, value, adapter, content))
        long = isinstance(content, list | dict | set | tuple) and len(content) > _MANY
        if depth == _DEPTH or (self._bookkeeping and long):
            return
        inner = () if isinstance(value, tuple | set) else (_Holder(adapter, value), content)
        for name, item in adapter.items(content):
            if type(item) not in PLAIN:
                self._look(ref, inner, name, item, depth + 1)

    def _look_at_tensor(
        self, ref: StateRef, holders: Any, key: Any, tensor: Tensor, depth: int
    ) -> None:
        if isinstance(tensor, nn.Parameter | Hole) or tensor.is_meta:
            return
        if self._exact:
            if id(tensor) not in self._seen:
                self._seen[id(tensor)] = tensor
                self._tensors.append(_KeptTensor(ref, None, key, tensor, copies=True))
            return
        if tensor.is_inference() and holders:
            # Such a tensor does not count its changes; its copy does.
            with torch.inference_mode(False):
                tensor = tensor.clone()
            for holder in holders:
                holder[key] = tensor
        if depth:
            self._bytes += tensor.numel() * tensor.element_size()
        copies = not depth or self._bytes <= _COPIED_BYTES
        self._tensors.append(_KeptTensor(ref, holders, key, tensor, copies=copies))

    def marks(self) -> list[Any]:
        """Something that is equal as long as nothing changes."""
        return [
            [[*map(item_mark, table.now().values())] for table in self._tables],
            [adapter.mark(value) for _, value, adapter, _ in self._containers],
            [kept.version for kept in self._tensors],
        ]

    def changed(self) -> set[StateRef]:
        """Places whose value is another one than at the snapshot, on the surface or inside."""
        found = {StateRef(table.module, key) for table in self._tables for key in table.changed()}
        found |= {ref for ref, value, how, was in self._containers if not how.same(value, was)}
        found |= {kept.ref for kept in self._tensors if kept.is_changed()}
        return {ref for ref in found if ref.key not in _BOOKKEEPING}

    def is_unchanged(self) -> bool:
        """Whether each place has the same object as at the snapshot, and nothing in it changed."""
        return (
            all([table.is_same() for table in self._tables])
            and all([how.same(value, was) for _, value, how, was in self._containers])
            and not any([kept.is_changed() for kept in self._tensors])
        )

    def restore(self) -> bool:
        """Restores the state of the snapshot; returns whether it was another one.

        Raises:
            ModelError: There is no copy of a tensor that has changed.
        """
        touched = any([table.restore() for table in self._tables])
        for _, value, adapter, content in self._containers:
            if not adapter.same(value, content):
                adapter.fill(value, content)
                touched = True
        for generator, state in self._generators:
            generator.set_state(state)
        return any([kept.restore() for kept in self._tensors]) or touched

    def holds(self, value: Any) -> bool:
        """Whether a container or object was there at the snapshot."""
        return id(value) in self._seen

    def is_buffer(self, ref: StateRef) -> bool:
        return ref != _STOP and ref.key in self._module.get_submodule(ref.module)._buffers

    def table(self, ref: StateRef) -> dict[str, Any]:
        """The dictionary that has a place's value."""
        if ref == _STOP:
            attributes: dict[str, Any] = vars(self._module._trainer)
            return attributes
        module = self._module.get_submodule(ref.module)
        found: dict[str, Any] = module._buffers if self.is_buffer(ref) else module.__dict__
        return found

    def value(self, ref: StateRef) -> Any:
        """What is there now; MISSING if nothing is."""
        table = self.table(ref)
        return table[ref.key] if ref.key in table else self._of_class(ref)

    def _of_class(self, ref: StateRef) -> Any:
        of_class = dict(_class_containers(type(self._module)))
        return of_class.get(ref.key, MISSING) if not ref.module else MISSING

    def put(self, ref: StateRef, value: Any) -> None:
        if value is MISSING:
            self.table(ref).pop(ref.key, None)
        elif value is not self.value(ref):
            self.table(ref)[ref.key] = value

    def before(self, ref: StateRef) -> Any:
        """What was there at the snapshot; a tensor or container as it is now."""
        found = [t.before[ref.key] for t in self._tables if t.has(ref)]
        return found[0] if found else self._of_class(ref)

    def copy(self, ref: StateRef) -> Any:
        """The same, but of a tensor, list, dict or set a copy of what it was."""
        value = self.before(ref)
        if isinstance(value, Tensor):
            return next((kept.copy for kept in self._tensors if kept.tensor is value), value)
        copies = (was for _, held, _, was in self._containers if held is value)
        return next(copies, value) if type(value) in (list, dict, set) else value


@contextmanager
def restoring(module: nn.Module, skip: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Runs the body, then restores attributes, containers, buffers, hooks and random states.

    What is in modules of ``skip`` stays as the body leaves it.
    """
    before = Snapshot(module, skip, exact=True, bookkeeping=True).take()
    draws = Generators.now()
    try:
        yield
    finally:
        draws.put_back()
        before.restore()


class _Table:
    """One dictionary of a module: its attributes or its buffers."""

    def __init__(
        self, module: str, values: dict[str, Any], bookkeeping: bool, *, only: str | None = None
    ) -> None:
        self.module = module
        self.values = values
        self.before: dict[str, Any] = {}
        self._all = bookkeeping
        self._only = only
        self._names: tuple[str, ...] = ()
        self._ids: tuple[int, ...] = ()

    def take(self) -> None:
        self.before = self.now()
        # Of all values, bookkeeping included: mostly nothing of it changes in a forward, and that
        # is seen without looking at one name after the other.
        self._names = tuple(self.values)
        self._ids = tuple(map(id, self.values.values()))

    def now(self) -> dict[str, Any]:
        if self._all:
            return dict(self.values)
        if self._only is not None:
            return {self._only: self.values.get(self._only)}
        return {key: value for key, value in self.values.items() if key not in _BOOKKEEPING}

    def has(self, ref: StateRef) -> bool:
        return ref.module == self.module and ref.key in self.before

    def is_same(self) -> bool:
        """Whether it has the same objects under the same names."""
        return tuple(map(id, self.values.values())) == self._ids and (
            tuple(self.values) == self._names
        )

    def changed(self) -> list[str]:
        if self.is_same():
            return []
        now, before = self.now(), self.before
        return [
            key
            for key in {**before, **now}
            if not is_same(now.get(key, MISSING), before.get(key, MISSING))
        ]

    def restore(self) -> bool:
        if self.is_same():
            return False
        changed = self.changed()
        now = self.now()
        if now.keys() == self.before.keys():
            self.values.update(self.before)
        else:
            rest = {key: value for key, value in self.values.items() if key not in now}
            self.values.clear()
            self.values.update(self.before | rest)
        return bool(changed)


class _Holder:
    """An object in which a tensor lies, and another one may take its place."""

    def __init__(self, adapter: Adapter, value: Any) -> None:
        self._adapter = adapter
        self._value = value

    def __setitem__(self, key: Any, item: Any) -> None:
        self._adapter.put(self._value, key, item)


class _KeptTensor:
    """A tensor with a copy of what it was.

    ``holders`` are where it is, and the copy from which that is filled again; None for a tensor
    that is compared by its numbers and restored in place.
    """

    def __init__(
        self, ref: StateRef, holders: Any, key: Any, tensor: Tensor, *, copies: bool
    ) -> None:
        self.ref = ref
        self.tensor = tensor
        self.copy = tensor.detach().clone() if copies else None
        self._holders = holders
        self._key = key
        self._version = version_of(tensor)

    @property
    def version(self) -> int:
        return version_of(self.tensor)

    def is_changed(self) -> bool:
        if self.version != self._version:
            return True
        if self._holders is not None or self.copy is None or isinstance(self.tensor, FakeTensor):
            return False
        return self.tensor.layout != torch.strided or not torch.equal(self.tensor, self.copy)

    def restore(self) -> bool:
        if not self.is_changed():
            return False
        if self.copy is None:
            raise ModelError(
                f"a step changes a tensor in {self.ref.name} in place, which is too large, or too "
                "far from the module, to be copied for each batch. Make it a buffer "
                "(register_buffer)."
            )
        if self._holders:
            self.tensor = self.copy.clone()
        elif isinstance(self.tensor, Hole):  # A trial run has written a value of a layer into it.
            exchange(self.tensor, self.copy.clone())
        elif not self.tensor.is_meta and not isinstance(self.tensor, FakeTensor):
            with torch.no_grad():
                self.tensor.copy_(self.copy)
        self._version = version_of(self.tensor)
        for holder in self._holders or ():
            holder[self._key] = self.tensor
        return True


def version_of(tensor: Tensor) -> int:
    if isinstance(tensor, Hole):
        return -2  # A tensor into which a probe has written becomes one.
    return -1 if tensor.is_inference() else tensor._version


def _class_containers(kind: type) -> Iterator[tuple[str, Any]]:
    """Lists, dicts and the like that the bodies of a user's classes make, for all instances."""
    seen: set[str] = set()
    for base in kind.__mro__:
        for key, value in vars(base).items() if not is_library(base.__module__) else ():
            if isinstance(value, CONTAINERS) and key not in seen and not key.startswith("__"):
                seen.add(key)
                yield key, value
