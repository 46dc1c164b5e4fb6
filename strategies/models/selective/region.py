"""One call of a layer of which the backward finds only a part, and computes the rest again.

torch has such a thing (``create_selective_checkpoint_contexts``). This one differs where a pipeline
needs it: what is computed again can be read twice, so that I computes it and W still has it; the
generators and the module's state are left as one run leaves them; a product's result that no
backward asks for is not kept (a head's logits are the largest tensor of all); and one that is
changed in place, as sums over tensor-parallel ranks do, is computed again instead of refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.errors import ModelError
from strategies.models.forward_state import Before, ForwardState, put_back
from strategies.models.nested import rebuild, tensors
from strategies.models.selective.lineage import Lineage, family_of, makes_new, storage_of, written
from strategies.models.state import Generators, cuda_is_used, drawing_again
from strategies.plan import Family


class SelectiveLayer:
    """Calls a layer so that what operations of some families give is not kept for its backward."""

    def __init__(self, module: nn.Module, recomputed: frozenset[Family]) -> None:
        self._recomputed = recomputed
        self._state = ForwardState(module)
        self._changes_inputs: bool | None = None  # not known before the first call

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        given = kept = (args, kwargs)
        if self._changes_inputs is not False:
            given = rebuild(kept, _copy)
        region = Region(call, self._recomputed, tensors(given))
        hooks = saved_tensors_hooks(region.pack, unpack)
        with self._state.kept(0) as before, hooks, _Answering(region.watch):
            result = call(*given[0], **given[1])
        if self._changes_inputs is None:
            copies = [t for t in tensors(given) if not isinstance(t, nn.Parameter)]
            self._changes_inputs = any(tensor._version for tensor in copies)
        copied = self._changes_inputs
        region.end(kept if copied else given, before, result, copied=copied)
        return result


def measured(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    module: nn.Module,
    recomputed: frozenset[Family],
    modes: Sequence[AbstractContextManager[Any]],
) -> tuple[list[Tensor], list[Tensor]]:
    """One call of a module and its second run, which goes through ``modes``.

    Returns:
        All that is held between the two, and the call's results.
    """
    region = Region(call, recomputed, tensors((args, kwargs)))
    packed: list[Kept | Computed] = []

    def pack(tensor: Tensor) -> Kept | Computed:
        packed.append(region.pack(tensor))
        return packed[-1]

    state = ForwardState(module)
    with state.kept(0) as before, saved_tensors_hooks(pack, unpack), _Answering(region.watch):
        result = call(*args, **kwargs)
    region.end((args, kwargs), before, result, copied=False)
    held = [tensor for each in packed for tensor in each.held_tensors()]
    if any(isinstance(each, Computed) for each in packed):
        with ExitStack() as contexts:
            for mode in modes:
                contexts.enter_context(mode)
            region.run_again()
    return held, tensors(result)


class Region:
    """What the second run of a call needs."""

    def __init__(
        self, call: Callable[..., Any], recomputed: frozenset[Family], given: Iterable[Tensor]
    ) -> None:
        self._call = call
        self._recomputed = recomputed
        self._given: Any = ((), {})
        self._copied = False
        self._generators = Generators.now()
        self._autocast = _autocast()
        self._before: Before = []
        self._saved: list[weakref.ref[Computed] | None] = []
        # What kept operations gave, by name.
        self._results: dict[int, _Result] = {}
        self._lineage = Lineage(given)
        self._unasked: list[int] = []  # results since the last tensor that is not kept
        self._made: set[int] = set()  # storages of operations' results
        self._asked: set[int] = set()  # storages that backwards ask for and that are kept
        self._keys: dict[int, list[int]] = {}  # storage -> the kept results in it

    # -- the first run -----------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Kept | Computed:
        storage = storage_of(tensor)
        if storage and storage in self._made and storage not in self._keys:
            computed = Computed(self, tensor)
            self._saved.append(weakref.ref(computed))
            self._unasked.clear()
            return computed
        self._asked.add(storage)
        self._saved.append(None)
        return Kept(tensor)

    def watch(self, operation: Any, args: Any, kwargs: Any) -> Any:
        result = operation(*args, **kwargs)
        if not makes_new(operation):
            changed = written(operation, args, kwargs)
            if changed:
                self._lineage.note(self._lineage.name(operation, args, kwargs), changed)
            for tensor in changed:
                self._forget(tensor)
            return result
        key = self._lineage.name(operation, args, kwargs)
        made = tensors(result)
        self._lineage.note(key, made)
        self._made.update(map(storage_of, made))
        if family_of(operation) not in self._recomputed:
            kept = rebuild(result, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
            random = torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())
            self._results[key] = _Result(operation, kept, Generators.now() if random else None)
            self._unasked.append(key)
            for tensor in made:
                # Some operations give parts of others' results without saying so (unsafe_split).
                self._keys.setdefault(storage_of(tensor), []).append(key)
        return result

    def end(self, given: Any, before: Before, result: Any, *, copied: bool) -> None:
        """Ends the first run.

        Args:
            given: Arguments for the second one.
            before: What that one is to find in the module.
            result: What the first one gave; the next layer may change it in place.
            copied: Whether the layer changes what it is given.
        """
        self._given, self._copied, self._before = given, copied, before
        for tensor in tensors(result):
            self._forget(tensor)
        for storage, keys in self._keys.items():
            if storage not in self._asked:
                # Nobody else keeps it, and only a product is worth the memory.
                self._unasked += [key for key in keys if self._is_cheap(key)]
        for key in self._unasked:
            self._results.pop(key, None)
        self._unasked.clear()
        self._asked.clear()
        self._made.clear()
        self._keys.clear()

    def _is_cheap(self, key: int) -> bool:
        found = self._results.get(key)
        return found is None or family_of(found.operation) != "matmul"

    def _forget(self, tensor: Tensor) -> None:
        """Lets go of kept results that may change: they are computed again."""
        for key in self._keys.pop(storage_of(tensor), ()):
            self._results.pop(key, None)

    # -- the second run ----------------------------------------------------------------------

    def run_again(self) -> None:
        """Computes what is missing, and lets go of all that was kept for it."""
        args, kwargs = rebuild(self._given, _fresh_leaf)
        filler = _Filler(self._saved)
        with ExitStack() as contexts:
            for context in self._autocast:
                contexts.enter_context(context)
            contexts.enter_context(torch.enable_grad())
            contexts.enter_context(drawing_again(self._generators))
            contexts.enter_context(put_back(self._before))
            contexts.enter_context(saved_tensors_hooks(filler.pack, unpack))
            if self._copied:
                args, kwargs = rebuild((args, kwargs), _copy)
            self._lineage = Lineage(tensors((args, kwargs)))
            contexts.enter_context(_Answering(self.answer))
            with suppress(_Done):
                self._call(*args, **kwargs)
        self._given, self._before = ((), {}), []
        self._results.clear()
        self._saved.clear()

    def answer(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """What an operation gives, kept or new."""
        if not makes_new(operation):
            changed = written(operation, args, kwargs)
            key = self._lineage.name(operation, args, kwargs) if changed else 0
            result = operation(*args, **kwargs)
            self._lineage.note(key, changed)
            return result
        key = self._lineage.name(operation, args, kwargs)
        kept = self._results.pop(key, None)
        if kept is None:
            result = operation(*args, **kwargs)
        else:
            result = kept.result
            if kept.behind is not None:
                kept.behind.put_back()
        self._lineage.note(key, tensors(result))
        return result

    def held_tensors(self) -> Iterable[Tensor]:
        kept = [entry.result for entry in self._results.values()]
        return tensors((self._given, kept, [value for _, _, value in self._before]))


@dataclass(frozen=True, slots=True)
class _Result:
    """What a kept operation gave, without history; ``behind``: where it left the generators."""

    operation: Any
    result: Any
    behind: Generators | None


_Mode: Any = TorchDispatchMode  # Untyped in torch.


class _Answering(_Mode):  # type: ignore[misc]
    """Has a function run every operation."""

    supports_higher_order_operators = True

    def __init__(self, answer: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._answer(func, args, kwargs or {})


class _Filler:
    """Hands the second run's tensors to those who stand for them."""

    def __init__(self, saved: list[weakref.ref[Computed] | None]) -> None:
        self._saved = iter(saved)
        self._wanted = sum(1 for entry in saved if entry is not None and entry() is not None)

    def pack(self, tensor: Tensor) -> Kept:
        entry = next(self._saved, None)
        computed = None if entry is None else entry()
        if computed is not None:
            computed.fill(tensor)
            self._wanted -= 1
        if self._wanted == 0:
            raise _Done
        return Kept(tensor)


class _Done(Exception):  # noqa: N818  # hooks that are always called are so behind an Exception
    """Leaves the second run when nothing is missing any more."""


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) else leaf


def _fresh_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)


def _autocast() -> list[AbstractContextManager[Any]]:
    kinds = ["cpu", "cuda"] if cuda_is_used() else ["cpu"]
    return [
        torch.autocast(
            kind, enabled=torch.is_autocast_enabled(kind), dtype=torch.get_autocast_dtype(kind)
        )
        for kind in kinds
    ]


# -- what stands in the autograd graph for a tensor that the layer has saved -----------------------


class Kept:
    """A tensor that is there: an input, a weight, or what a kept operation gave."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # With its history it would hold the node that holds it.
        self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self._version = tensor._version

    def unpack(self) -> Tensor:
        _check(self._tensor, self._version)
        return self._tensor

    def held_tensors(self) -> Iterable[Tensor]:
        return (self._tensor,)


class Computed:
    """A tensor that its layer computes again when the first of its kind is asked for.

    It may be asked for more than once: a split backward does, for the operands of products whose
    weight gradients wait.
    """

    __slots__ = ("__weakref__", "_kind", "_region", "_tensor", "_version")

    def __init__(self, region: Region, tensor: Tensor) -> None:
        self._region: Region | None = region
        self._kind = (tensor.shape, tensor.dtype)
        self._tensor: Tensor | None = None
        self._version = 0

    def fill(self, tensor: Tensor) -> None:
        if (tensor.shape, tensor.dtype) != self._kind:
            raise ModelError(
                "a layer that is recomputed did something else the second time: it saved a tensor "
                f"of {list(tensor.shape)} and {tensor.dtype} instead of {list(self._kind[0])} and "
                f"{self._kind[1]}. Its forward must depend on its inputs only; if it cannot, use "
                "recompute=none."
            )
        self._tensor, self._version = tensor.detach(), tensor._version
        self._region = None

    def unpack(self) -> Tensor:
        if self._region is not None:
            self._region.run_again()
        if self._tensor is None:
            raise ModelError(
                "a layer that is recomputed saved less the second time. Its forward must depend "
                "on its inputs only; if it cannot, use recompute=none."
            )
        _check(self._tensor, self._version)
        return self._tensor

    def held_tensors(self) -> Iterable[Tensor]:
        """What this keeps in memory, all that the second run needs included."""
        if self._tensor is not None:
            return (self._tensor,)
        return () if self._region is None else self._region.held_tensors()


def unpack(packed: Kept | Computed) -> Tensor:
    return packed.unpack()


def _check(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of {list(tensor.shape)} is at version {tensor._version}; "
            f"expected version {version} instead."
        )
