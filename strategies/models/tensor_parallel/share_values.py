"""Values that lie cut over tensor-parallel ranks between two layers, under their whole shapes.

Nobody has written these modules with shares in mind: they view by a number of heads, split at a
width, add masks of the whole size. So a value that a cut layer leaves behind is torch's DTensor: it
answers with the whole shape, holds a share, and knows for most operations what becomes of the share
(torch/distributed/tensor/_ops). What it does not know is done here: a few operations that work head
by head or channel by channel run on the share; random numbers are drawn as for the whole value;
everything else takes the whole value, which all ranks then compute alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Cut
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from strategies.errors import ModelError
from strategies.models.nested import rebuild
from strategies.models.replay.hole import Args, Function, Kwargs, is_question, user_line
from strategies.models.tensor_parallel.regions import Entrance
from strategies.models.tensor_parallel.sharded_layers import VocabularyShare, token_losses
from strategies.models.tensor_parallel.tensor_ranks import Shard, TensorRanks

_numbers = itertools.count()


class ShareValues:
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
        self._entrances: list[Entrance] = []
        self._entered = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> ShareValues:
        return self  # Groups cannot be copied; a copy of a model has the same one.

    def _mesh_of(self, kind: str) -> DeviceMesh:
        return self._meshes[kind]

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

    @property
    def allowed(self) -> bool:
        """Whether somebody looks after shares at the moment."""
        return self._entered > 0

    def is_share(self, value: Any) -> bool:
        return isinstance(value, DTensor)

    def left(self, local: Tensor, dim: int, size: int) -> Tensor:
        """A value of which this rank has ``local``, cut along ``dim``, ``size`` long in all."""
        dim %= local.dim()
        shape = list(local.shape)
        shape[dim] = size
        share = DTensor.from_local(
            local,
            self._mesh_of(local.device.type),
            [Cut(dim)],
            run_check=False,
            shape=torch.Size(shape),
            stride=_stride(shape),
        )
        return share if self.allowed else self.whole(share)

    def whole(self, value: Tensor) -> Tensor:
        """All of a value, on every rank; what is no share goes through."""
        if not isinstance(value, DTensor):
            return value
        return value.redistribute(placements=[Replicate()]).to_local()

    def whole_of(self, leaf: Any) -> Any:
        """The same for anything."""
        return self.whole(leaf) if isinstance(leaf, DTensor) else leaf

    def own(self, value: Tensor, dim: int) -> Tensor:
        """This rank's share along ``dim``, whatever there is of the value."""
        value = self._known(value)
        assert isinstance(value, DTensor)
        return value.redistribute(placements=[Cut(dim % value.dim())]).to_local()

    def _known(self, value: Tensor) -> Tensor:
        """A whole value as one that DTensor's operations take."""
        if isinstance(value, DTensor):
            return value
        mesh = self._mesh_of(value.device.type)
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)


class _BetweenLayers(TorchFunctionMode):
    def __init__(self, values: ShareValues) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _any_share(args) and not (kwargs and _any_share(kwargs.values())):
            return func(*args, **kwargs)
        if is_question(func):
            return func(*args, **kwargs)
        by_share = _BY_SHARE.get(func)
        if by_share is not None:
            result = by_share(self._values, *args, **kwargs)
            if result is not NotImplemented:
                return result
            return self._by_whole(func, args, kwargs)
        name = getattr(func, "__name__", "")
        _refuse_lost_write(name, args)
        if func in _WHOLE or _draws(name) or _writes_plain(name, args, kwargs):
            return self._by_whole(func, args, kwargs)
        try:
            known = rebuild((args, kwargs), self._known)
            return func(*known[0], **known[1])
        except (RuntimeError, NotImplementedError, ValueError, AssertionError, TypeError):
            # It has no rule for that, or the layout does not come out even.
            return self._by_whole(func, args, kwargs)

    def _known(self, leaf: Any) -> Any:
        return self._values._known(leaf) if isinstance(leaf, Tensor) else leaf

    def _by_whole(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """The operation on whole values; what it writes into is cut again."""
        values = self._values
        name = getattr(func, "__name__", str(func))
        # inplace=True of torch.nn.functional comes by position, too.
        writes = _in_place(name) or any(flag is True for flag in (*args, *kwargs.values()))
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


def _any_share(items: Any) -> bool:
    for item in items:
        if isinstance(item, DTensor):
            return True
        if isinstance(item, list | tuple | dict) and _any_share(
            item.values() if isinstance(item, dict) else item
        ):
            return True
    return False


def _in_place(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (
            name.startswith("__i") and name not in ("__int__", "__index__", "__invert__")
        )
    return name.endswith("_")


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


_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal", "poisson", "rrelu", "gumbel")
_RANDOM_IN_PLACE = frozenset(
    ["uniform_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_"]
)


def _draws(name: str) -> bool:
    """Whether an operation draws random numbers, of which all ranks want those of the whole."""
    return name in _RANDOM_IN_PLACE or (
        any(word in name for word in _RANDOM) and "norm" not in name.replace("normal", "")
    )


def _stride(shape: list[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


# -- operations on shares: what DTensor has no rule for, or another one than is right here ---------


def _dropout(
    values: ShareValues, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if not training or p == 0.0:
        return input
    if not isinstance(input, DTensor) or any(x.is_partial() for x in input.placements):
        return NotImplemented
    mask = _mask(values, input, p)
    return input.mul_(mask) if inplace else input * mask


def _mask(values: ShareValues, share: DTensor, p: float) -> Tensor:
    """This rank's share of what dropout on the whole value would multiply with."""
    local = share.to_local()
    ones = torch.ones(share.shape, dtype=local.dtype, device=local.device)
    mask = values._known(functional.dropout(ones, p, training=True))
    assert isinstance(mask, DTensor)
    return mask.redistribute(placements=share.placements)


def _torch_dropout(values: ShareValues, input: Any, p: float, train: bool) -> Any:
    return _dropout(values, input, p, train)


def _attention(
    values: ShareValues,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Heads, and rows of the batch, know nothing of each other."""
    given = (query, key, value)
    dims = [_cut_of(each) for each in given]
    dim = next((dim for dim in dims if dim is not None), None)
    last = query.dim() - 2
    if dim is None or dim >= last or any(each.dim() != query.dim() for each in given):
        return NotImplemented
    if any(other not in (None, dim) for other in dims):
        return NotImplemented
    parts = values.ranks.size
    if any(each.shape[dim] % parts for each in given):
        return NotImplemented
    if key.shape[dim] != query.shape[dim] and not enable_gqa:
        return NotImplemented
    if attn_mask is not None:
        place = dim - query.dim() + attn_mask.dim()
        if place >= 0 and attn_mask.shape[place] > 1:
            attn_mask = values.own(attn_mask, place)
        else:
            attn_mask = values.whole(attn_mask)
    q, k, v = (values.own(each, dim) for each in given)
    if dropout_p > 0.0:
        return NotImplemented
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return values.left(out, dim, query.shape[dim])


def _cut_of(value: Tensor) -> int | None:
    """The dimension along which a value lies cut."""
    if isinstance(value, DTensor) and isinstance(value.placements[0], Cut):
        return value.placements[0].dim
    return None


def _batch_norm(
    values: ShareValues,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Channels know nothing of each other; running means stay whole on every rank."""
    if _cut_of(input) != 1 or input.shape[1] % values.ranks.size:
        return NotImplemented
    channels = input.shape[1]
    own = [None if each is None else values.own(each, 0) for each in (weight, bias)]
    running = [running_mean, running_var]
    parts = [None if r is None else values.ranks.share_along(r, 0).clone() for r in running]
    out = functional.batch_norm(
        values.own(input, 1), parts[0], parts[1], own[0], own[1], training, momentum, eps
    )
    if training:
        with torch.no_grad():
            for whole, part in zip(running, parts, strict=True):
                if whole is not None and part is not None:
                    whole.copy_(values.ranks.gather_along(part, 0))
    return values.left(out, 1, channels)


def _group_norm(
    values: ShareValues,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    parts = values.ranks.size
    if _cut_of(input) != 1 or num_groups % parts:
        return NotImplemented
    own = [None if each is None else values.own(each, 0) for each in (weight, bias)]
    out = functional.group_norm(values.own(input, 1), num_groups // parts, own[0], own[1], eps)
    return values.left(out, 1, input.shape[1])


def _instance_norm(
    values: ShareValues,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if _cut_of(input) != 1 or input.dim() < 3 or running_mean is not None:
        return NotImplemented
    own = [None if each is None else values.own(each, 0) for each in (weight, bias)]
    out = functional.instance_norm(
        values.own(input, 1), None, None, own[0], own[1], use_input_stats, momentum, eps
    )
    return values.left(out, 1, input.shape[1])


def _channel_by_channel(function: Function) -> Callable[..., Any]:
    def run(values: ShareValues, input: Any, *args: Any, **kwargs: Any) -> Any:
        others = _any_share(args) or _any_share(kwargs.values())
        if _cut_of(input) != 1 or input.dim() < 3 or others:
            return NotImplemented
        out = function(values.own(input, 1), *args, **kwargs)
        return values.left(out, 1, input.shape[1]) if isinstance(out, Tensor) else NotImplemented

    return run


def _cross_entropy(
    values: ShareValues,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """The loss of a classifier whose outputs lie cut by class: three numbers per row travel."""
    dim = 1 if input.dim() > 1 else 0
    plain = size_average is None and reduce is None and weight is None and label_smoothing == 0.0
    if not plain or _cut_of(input) != dim or values.is_share(target):
        return NotImplemented
    if target.is_floating_point() or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    share = VocabularyShare(Shard(0, input.shape[dim], values.ranks.size), values.ranks)
    logits = values.own(input, dim).movedim(dim, -1)
    ignored = target == ignore_index
    wanted = target.masked_fill(ignored, -100)
    losses = token_losses(logits, wanted, share).to(logits.dtype)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (~ignored).sum()


_CHANNELS = (
    functional.interpolate,
    functional.max_pool1d,
    functional.max_pool2d,
    functional.max_pool3d,
    functional.avg_pool1d,
    functional.avg_pool2d,
    functional.avg_pool3d,
    functional.adaptive_avg_pool1d,
    functional.adaptive_avg_pool2d,
    functional.adaptive_avg_pool3d,
    functional.adaptive_max_pool1d,
    functional.adaptive_max_pool2d,
    functional.adaptive_max_pool3d,
)

_BY_SHARE: dict[Any, Callable[..., Any]] = {
    functional.dropout: _dropout,
    torch.dropout: _torch_dropout,
    functional.scaled_dot_product_attention: _attention,
    functional.batch_norm: _batch_norm,
    functional.group_norm: _group_norm,
    functional.instance_norm: _instance_norm,
    functional.cross_entropy: _cross_entropy,
    **{function: _channel_by_channel(function) for function in _CHANNELS},
}

# DTensor has no rules for these, or such as mean something else (an image cut along its height).
_WHOLE: frozenset[Any] = frozenset(
    {
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.conv_transpose1d,
        torch.conv_transpose2d,
        torch.conv_transpose3d,
        functional.multi_head_attention_forward,
        functional.pad,
    }
)
