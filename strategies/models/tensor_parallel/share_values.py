"""Values that lie cut over tensor-parallel ranks between two layers, under their whole shapes.

Nobody has written these modules with shares in mind: they view by a number of heads, split at a
width, add masks of the whole size. So a value that a cut layer leaves behind is torch's DTensor: it
answers with the whole shape, holds a share, and knows for most operations what becomes of the share
(torch/distributed/tensor/_ops). What it does not know is done here: a few operations that work head
by head or channel by channel run on the share; random numbers are drawn as for the whole value;
everything else takes the whole value, which all ranks then compute alike.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Cut
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from strategies.errors import ModelError
from strategies.models.nested import rebuild, tensors
from strategies.models.replay.hole import (
    WHOLE_SHAPE,
    Args,
    Function,
    Kwargs,
    is_question,
    operation_name,
    user_line,
)
from strategies.models.tensor_parallel.regions import Entrance
from strategies.models.tensor_parallel.share_operations import BY_SHARE, WHOLE, draws
from strategies.models.tensor_parallel.tensor_ranks import Shard, TensorRanks, unflattened
from strategies.models.tensor_parallel.value_segments import (
    Segments,
    placement,
    run_on_segments,
    segments_of,
    with_segments,
)

_numbers = itertools.count()


class WholeShapeValues:
    """Makes shares of values and whole values of shares, for one group of ranks.

    Attributes:
        ranks: The group.
        wholes: Operation that took whole values, and the line that asked for it -> bytes of one
            such value; noted while ``noting``.
    """

    def __init__(self, ranks: TensorRanks) -> None:
        self.ranks = ranks
        self.wholes: dict[tuple[str, str], int] = {}
        self.noting = False
        # Made here: inside a step the default group is another, and a mesh asks it for its place.
        kinds = ["cuda"] if dist.get_backend(ranks.group) == "nccl" else ["cpu"]
        if kinds == ["cpu"] and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            kinds.append("cuda")
        # DTensor keeps what it has worked out for a mesh that is equal to another one, whose groups
        # may be gone: names make them differ.
        self._meshes = {
            kind: DeviceMesh.from_group(
                ranks.group, kind, mesh_dim_names=(f"tensor{next(_numbers)}",)
            )
            for kind in kinds
        }
        # Names of operations that run on whole values, besides those that have to; and whether all
        # do that can: what DTensor does with their backwards is not what autograd needs.
        self.unsharded_ops: set[str] = set()
        self.unshard_everything = False
        # Shares of weights by identity: name, parameter, how it is cut.
        self.weights: dict[int, tuple[str, nn.Parameter, Shard]] = {}
        self.computing = 0  # cut layers whose forwards run, which take their shares
        self._wholes: dict[tuple[int, bool], tuple[str, Tensor, int]] = {}
        # Layers that ``look_after`` was called for, what they were before, and what they are.
        self.looked_after: list[tuple[nn.Module, type[nn.Module], type[nn.Module]]] = []
        self._entrances: list[Entrance] = []
        self._entered = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeShapeValues:
        return self  # Groups cannot be copied; a copy of a model has the same one.

    def entrance(self) -> Entrance:
        """For layers that may read the same tensor."""
        self._entrances.append(Entrance(self.ranks))
        return self._entrances[-1]

    @contextmanager
    def between_layers(self) -> Iterator[None]:
        """Inside, code that was written for whole values runs on shares; else layers leave wholes.

        What runs inside of a replay (a layer, an operation) meets this first of all.
        """
        self._entered += 1
        try:
            with _BetweenLayers(self):
                yield
        finally:
            self._entered -= 1
            for entrance in self._entrances:
                entrance.forget()
            wholes = [] if self._entered else list(self._wholes.values())
            if wholes:
                self._wholes.clear()
        for name, whole, version in wholes:
            if whole._version != version:
                raise self.lost_write(name)

    def look_after(self, layer: nn.Module) -> None:
        """Lets a layer's forward run ``between_layers`` wherever it is called: in a backward, too.

        A backward that computes a forward again calls it, and no function mode reaches there.
        """
        kind: Any = type(layer)

        def forward(this: Any, *args: Any, **kwargs: Any) -> Any:
            modes: Any = _get_current_function_mode_stack  # Untyped in torch.
            if any(isinstance(mode, _BetweenLayers) for mode in modes()):
                return kind.forward(this, *args, **kwargs)
            with self.between_layers():
                return kind.forward(this, *args, **kwargs)

        looked_after = type(kind.__name__, (kind,), {"forward": forward})
        looked_after.__module__, looked_after.__qualname__ = kind.__module__, kind.__qualname__
        layer.__class__ = looked_after
        self.looked_after.append((layer, kind, looked_after))

    @contextmanager
    def taking_shares(self) -> Iterator[None]:
        """Inside, operations take shares of weights as they are."""
        self.computing += 1
        try:
            yield
        finally:
            self.computing -= 1

    def whole_weight(self, parameter: Tensor) -> Tensor:
        """All of a weight of which this rank has a share, for code outside of its layer."""
        key = id(parameter), torch.is_grad_enabled()
        if key not in self._wholes:
            name, _, shard = self.weights[id(parameter)]
            whole: Tensor = _WholeWeight.apply(parameter, shard, self.ranks)  # type: ignore[no-untyped-call]
            self._wholes[key] = name, whole, whole._version
        return self._wholes[key][1]

    def hold(self, parameter: nn.Parameter, name: str, cut: Shard, shape: torch.Size) -> None:
        """Takes a parameter for the share of a weight of this shape."""
        self.weights[id(parameter)] = name, parameter, cut
        vars(parameter)[WHOLE_SHAPE] = tuple(shape)

    def lost_write(self, name: str, what: str = "a step changes") -> ModelError:
        return ModelError(
            f"{what} {name} outside of its layer, and each of tp={self.ranks.size} ranks has a "
            "share of it. Change it in a hook (on_train_batch_end), which sees all of it, or use "
            "tp=1."
        )

    def is_share(self, value: Any) -> bool:
        return isinstance(value, DTensor)

    def left(self, local: Tensor, dim: int, size: int, parts: int = 1) -> Tensor:
        """A value of which this rank has ``local``, cut along ``dim``, ``size`` long in all.

        Of ``parts`` that lie side by side there, it has a share of each.
        """
        dim %= local.dim()
        shape = list(local.shape)
        shape[dim] = size
        several = Segments(local, dim, parts) if parts > 1 else None
        share = DTensor.from_local(
            local,
            self._meshes[local.device.type],
            [Cut(dim) if several is None else placement(several)],
            run_check=False,
            shape=torch.Size(shape),
            stride=_stride(shape),
        )
        if several is not None:
            with_segments(share, several)
        return share if self._entered else self.whole(share)

    def whole(self, value: Tensor) -> Tensor:
        """All of a value, on every rank; what is no share goes through."""
        if not isinstance(value, DTensor):
            return value
        several = segments_of(value)
        if several is not None:
            # Each part in a row of its own, which is cut like any value.
            dim, size = several.dim, value.shape[several.dim] // several.number
            rows = self.left(unflattened(several.local, dim, several.number, -1), dim + 1, size)
            return self.whole(rows).flatten(dim, dim + 1)
        found = value.redistribute(placements=[Replicate()]).to_local()
        if found.stride() == value.stride() or 0 in value.stride():
            return found
        # Random numbers are drawn in the order of the memory, which is that of the uncut value.
        empty = torch.empty_strided(
            value.shape, value.stride(), dtype=found.dtype, device=found.device
        )
        return empty.copy_(found)

    def whole_of(self, leaf: Any) -> Any:
        """The same for anything."""
        return self.whole(leaf) if isinstance(leaf, DTensor) else leaf

    def own(self, value: Tensor, dim: int) -> Tensor:
        """This rank's share along ``dim``, whatever there is of the value."""
        value = self._known(value if segments_of(value) is None else self.whole(value))
        assert isinstance(value, DTensor)
        return value.redistribute(placements=[Cut(dim % value.dim())]).to_local()

    def _known(self, value: Tensor) -> Tensor:
        """A whole value as one that DTensor's operations take."""
        if isinstance(value, DTensor):
            return value
        mesh = self._meshes[value.device.type]
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)


class _WholeWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, shard: Shard, ranks: TensorRanks) -> Tensor:
        ctx.shard, ctx.rank = shard, ranks.rank
        return shard.whole(ranks.gather(share.detach()).unbind(0))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # All ranks compute the same of the whole, so each has its whole gradient.
        return ctx.shard.local(gradient, ctx.rank), None, None


class _BetweenLayers(TorchFunctionMode):
    def __init__(self, values: WholeShapeValues) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        values = self._values
        share, weight = _found(args, values.weights)
        if kwargs:
            more = _found(kwargs.values(), values.weights)
            share, weight = share or more[0], weight or more[1]
        if weight and not values.computing:
            args, kwargs = self._with_wholes(func, args, kwargs)
            share = share or is_question(func)
        if not share:
            return func(*args, **kwargs)
        if is_question(func):
            return func(*args, **kwargs)
        if _any_segments(args) or _any_segments(kwargs.values()):
            size = self._values.ranks.size
            result = run_on_segments(func, args, kwargs, size, self._values.left)
            if result is not NotImplemented:
                return result
            _refuse_write_into_segments(func, args, kwargs)
            return self._by_whole(func, args, kwargs)
        by_share = BY_SHARE.get(func)
        if by_share is not None:
            result = by_share(self._values, *args, **kwargs)
            if result is not NotImplemented:
                return result
            return self._by_whole(func, args, kwargs)
        name = getattr(func, "__name__", "")
        _refuse_lost_write(name, args)
        plain = func in WHOLE or draws(name) or _writes_plain(name, args, kwargs)
        plain = plain or ("matmul" in name and any(_is_vector(arg) for arg in args))
        if plain or values.unshard_everything or name in values.unsharded_ops:
            return self._by_whole(func, args, kwargs)
        try:
            known = rebuild((args, kwargs), self._known)
            return func(*known[0], **known[1])
        except (RuntimeError, LookupError, ValueError, AssertionError, TypeError, AttributeError):
            # It has no rule for that, or the layout does not come out even. Not every exception:
            # torch's recomputation ends with one of its own.
            return self._by_whole(func, args, kwargs)

    def _with_wholes(self, func: Function, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The arguments of an operation outside of layers, with all of each weight."""
        name, values = operation_name(func), self._values
        if name in ("requires_grad", "is_leaf"):
            return args, kwargs
        first = args[0] if args else None
        known = values.weights.get(id(first))
        if known is not None and (_in_place(name) or getattr(func, "__name__", "") == "__set__"):
            raise values.lost_write(known[0], f"{user_line()}: {name} changes")
        if func is torch.autograd.grad:
            asked = (values.weights.get(id(leaf)) for leaf in tensors((args, kwargs)))
            known = next(filter(None, asked))
        if known is not None and name in ("grad", "register_hook"):
            raise values.lost_write(known[0], f"{user_line()}: {name} takes the gradient of")
        shape = is_question(func)

        def whole(leaf: Any) -> Any:
            known = values.weights.get(id(leaf))
            if known is None:
                return leaf
            if shape:
                share = known[2].unpadded(leaf.detach(), values.ranks.rank)
                return values.left(share, known[2].dim, known[2].size, known[2].segments)
            return values.whole_weight(leaf)

        found: tuple[Args, Kwargs] = rebuild((args, kwargs), whole)
        return found

    def _known(self, leaf: Any) -> Any:
        return self._values._known(leaf) if isinstance(leaf, Tensor) else leaf

    def _by_whole(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """The operation on whole values; what it writes into is cut again."""
        values = self._values
        name = getattr(func, "__name__", str(func))
        writes = _writes(func, args, kwargs)
        made: dict[int, tuple[DTensor, Tensor, int]] = {}

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, DTensor):
                return leaf
            if id(leaf) not in made:
                full = values.whole(leaf).clone() if writes else values.whole(leaf)
                made[id(leaf)] = (leaf, full, full._version)
            return made[id(leaf)][1]

        full_args, full_kwargs = rebuild((args, kwargs), whole)
        if values.noting:
            size = max((f.numel() * f.element_size() for _, f, _ in made.values()), default=0)
            known = values.wholes.get((name, line := user_line()), 0)
            values.wholes[name, line] = max(known, size)
        result = func(*full_args, **full_kwargs)
        for share, full, version in made.values():
            if full._version != version:
                (placement,) = share.placements
                new = values._known(full)
                assert isinstance(new, DTensor)
                share.copy_(new.redistribute(placements=[placement]))
                result = share if result is full else result
        return result


def _found(items: Any, weights: Collection[int]) -> tuple[bool, bool]:
    """Whether there are shares of values among arguments, or in them, and shares of weights."""
    share = weight = False
    for item in items:
        if type(item) is Tensor:
            continue
        if isinstance(item, DTensor):
            share = True
        elif isinstance(item, nn.Parameter):
            weight = weight or id(item) in weights
        elif isinstance(item, list | tuple | dict):
            inside = _found(item.values() if isinstance(item, dict) else item, weights)
            share, weight = share or inside[0], weight or inside[1]
    return share, weight


def _any_segments(items: Any) -> bool:
    """Whether there is a value of several parts, in a list, too."""
    for item in items:
        if segments_of(item) is not None:
            return True
        if isinstance(item, list | tuple) and _any_segments(item):
            return True
    return False


def _in_place(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (
            name.startswith("__i") and name not in ("__int__", "__index__", "__invert__")
        )
    return name.endswith("_")


def _writes(func: Function, args: Args, kwargs: Kwargs) -> bool:
    """Whether an operation writes into its first argument: by its name, or with inplace=True."""
    place = _place_of_inplace(func)
    flag = kwargs.get("inplace") or (place is not None and place < len(args) and args[place])
    return flag is True or _in_place(getattr(func, "__name__", ""))


@functools.cache
def _place_of_inplace(func: Function) -> int | None:
    """Where ``inplace`` stands among the arguments of a function of torch.nn.functional."""
    with suppress(TypeError, ValueError):  # It is written in C++, or has no such argument.
        return list(inspect.signature(func).parameters).index("inplace")
    return None


def _refuse_lost_write(name: str, args: Args) -> None:
    """Writing into a view that is no view any more, as its base lies cut, would change nothing."""
    target = args[0] if args else None
    if not (isinstance(target, DTensor) and _in_place(name) and target._is_view()):
        return
    base = target._base
    own = target._local_tensor.untyped_storage().data_ptr()
    if isinstance(base, DTensor) and base._local_tensor.untyped_storage().data_ptr() != own:
        raise ModelError(
            f"{user_line()}: {name} writes into a part of a value that lies cut over "
            "tensor-parallel ranks, and the part is a copy there. Write it out of place "
            "(torch.where, torch.cat), or use tp=1."
        )


def _refuse_write_into_segments(func: Function, args: Args, kwargs: Kwargs) -> None:
    """What is written would not reach the shares that later operations are given."""
    if segments_of(args[0] if args else None) is not None and _writes(func, args, kwargs):
        raise ModelError(
            f"{user_line()}: {operation_name(func)} writes into a value of which tensor-parallel "
            "ranks have a share of each part (queries, keys and values from one layer). Write it "
            "out of place, or use tp=1."
        )


def _is_vector(arg: Any) -> bool:
    """A product with one keeps a dimension too many in DTensor."""
    return isinstance(arg, Tensor) and arg.dim() == 1


def _writes_plain(name: str, args: Args, kwargs: Kwargs) -> bool:
    """Whether a share is written into a whole value."""
    if isinstance(kwargs.get("out"), Tensor):
        return True
    target = args[0] if args else None
    return (
        _in_place(name)
        and isinstance(target, Tensor)
        and (not isinstance(target, DTensor) or name == "__setitem__")
    )


def _stride(shape: list[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
