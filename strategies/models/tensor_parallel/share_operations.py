"""Operations that run on shares: DTensor has no rule for them, or another one than is right here.

A few work head by head or channel by channel, so each rank does its own; random numbers are drawn
as for the whole value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor.experimental import register_sharding
from torch.nn import functional

from strategies.models.replay.hole import Function
from strategies.models.tensor_parallel.tensor_ranks import Shard
from strategies.models.tensor_parallel.vocabulary import VocabularyShare, token_losses

if TYPE_CHECKING:
    from strategies.models.tensor_parallel.share_values import WholeShapeValues


def _dropout(
    values: WholeShapeValues,
    input: Any,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    if not training or p == 0.0:
        return input
    if not isinstance(input, DTensor) or any(x.is_partial() for x in input.placements):
        return NotImplemented
    mask = _mask(values, input, p)
    return input.mul_(mask) if inplace else input * mask


def _mask(values: WholeShapeValues, share: DTensor, p: float) -> Tensor:
    """This rank's share of what dropout on the whole value would multiply with."""
    local = share.to_local()
    like = torch.empty_strided(share.shape, share.stride(), dtype=local.dtype, device="meta")
    ones = torch.ones_like(like, device=local.device)  # Numbers are drawn in order of the memory.
    mask = values._known(functional.dropout(ones, p, training=True))
    assert isinstance(mask, DTensor)
    return mask.redistribute(placements=share.placements)


def _torch_dropout(values: WholeShapeValues, input: Any, p: float, train: bool) -> Any:
    return _dropout(values, input, p, train)


def _attention(
    values: WholeShapeValues,
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
    if dropout_p > 0.0 or dim is None or dim >= last:
        return NotImplemented
    if any(each.dim() != query.dim() for each in given):
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
        elif attn_mask.requires_grad:
            return NotImplemented  # Its gradient would be that of this rank's heads alone.
        else:
            attn_mask = values.whole(attn_mask)
    q, k, v = (values.own(each, dim) for each in given)
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
    values: WholeShapeValues,
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
    values: WholeShapeValues,
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
    values: WholeShapeValues,
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
    """On images that have channels in dimension 1: without a batch, a pooling's are in front."""
    name = function.__name__
    least = int(name[-2]) + 2 if name.endswith("d") else 3

    def run(values: WholeShapeValues, input: Any, *args: Any, **kwargs: Any) -> Any:
        others = any_share(args) or any_share(kwargs.values())
        if _cut_of(input) != 1 or input.dim() < least or others:
            return NotImplemented
        out = function(values.own(input, 1), *args, **kwargs)
        return values.left(out, 1, input.shape[1]) if isinstance(out, Tensor) else NotImplemented

    return run


def _cross_entropy(
    values: WholeShapeValues,
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


BY_SHARE: dict[Any, Callable[..., Any]] = {
    functional.dropout: _dropout,
    torch.dropout: _torch_dropout,
    functional.scaled_dot_product_attention: _attention,
    functional.batch_norm: _batch_norm,
    functional.group_norm: _group_norm,
    functional.instance_norm: _instance_norm,
    functional.cross_entropy: _cross_entropy,
    **{function: _channel_by_channel(function) for function in _CHANNELS},
}


# DTensor has no rules for these, or such as mean something else (an image cut along its height), or
# wrong gradients: of a share's mean for the whole one (losses), along negative dimensions (select).
WHOLE: frozenset[Any] = frozenset(
    {
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.conv_transpose1d,
        torch.conv_transpose2d,
        torch.conv_transpose3d,
        functional.multi_head_attention_forward,
        functional.pad,
        functional.binary_cross_entropy,
        functional.soft_margin_loss,
        torch.select,
        Tensor.select,
    }
)


@register_sharding(  # type: ignore[untyped-decorator]
    [torch.ops.aten.cumsum.default, torch.ops.aten.cumprod.default,
     torch.ops.aten.logcumsumexp.default]
)  # fmt: skip
def _scan(value: Any, dim: int, **_: Any) -> list[tuple[list[Placement], list[Placement | None]]]:
    """Along any other dimension; DTensor's rule takes a negative one for another, and is wrong."""
    cuts = [Cut(place) for place in range(value.ndim) if place != dim % value.ndim]
    return [([placement], [placement, None]) for placement in (Replicate(), *cuts)]


def any_share(items: Any) -> bool:
    """Whether one of an operation's arguments is a share, or has one in it."""
    for item in items:
        if isinstance(item, DTensor):
            return True
        if isinstance(item, list | tuple | dict) and any_share(
            item.values() if isinstance(item, dict) else item
        ):
            return True
    return False


_RANDOM = re.compile(
    r"\w*dropout[123]?d?_?|rand(n|int|perm)?(_like)?|bernoulli_?|multinomial|(log_)?normal_?"
    r"|poisson|fractional_max_pool[23]d(_with_indices)?|rrelu(_with_noise)?_?|gumbel_softmax"
    r"|(uniform|exponential|geometric|cauchy|random)_"
)


def draws(name: str) -> bool:
    """Whether an operation draws random numbers, of which all ranks want those of the whole.

    >>> [draws(name) for name in ("dropout", "randn_like", "normal_", "normalize", "__rand__")]
    [True, True, True, False, False]
    """
    return _RANDOM.fullmatch(name) is not None
