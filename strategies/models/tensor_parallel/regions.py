"""Where the work of tensor-parallel ranks begins and ends, as autograd functions.

Between ``Entrance`` and ``leave`` each rank computes its share of a matrix product: forward the
shares are added up at the end, backward the input's gradients at the beginning (Shoeybi et al.,
2019, https://arxiv.org/abs/1909.08053). With sequence parallelism the stream outside is cut along
the sequence, so it is gathered at the beginning and summed share by share at the end (Korthikanti
et al., 2022, https://arxiv.org/abs/2205.05198).

Losses are the same number on every rank, and each rank starts its backward from it: whatever is
replicated has the whole gradient everywhere, so only the entrance adds up.

In a compiled unit these run as they stand here, between two compiled pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from strategies.errors import DataError
from strategies.models.tensor_parallel.tensor_ranks import TensorRanks

TIME = 1  # the dimension of [batch, sequence, hidden] that sequence parallelism cuts

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _as_written(function: _Function) -> _Function:
    """A function that torch.compile leaves alone."""
    disable: Any = torch.compiler.disable  # Untyped in torch.
    return cast(_Function, disable(function))


class Entrance:
    """Begins the parallel part of one unit; layers that read the same tensor share it."""

    def __init__(self, ranks: TensorRanks) -> None:
        self._ranks = ranks
        self._last: tuple[Tensor, Tensor] | None = None

    def forget_after(self, unit: nn.Module) -> None:
        """Lets go of what was entered when the unit has run, or it would keep activations alive."""
        unit.register_forward_hook(self._forget, always_call=True)

    @_as_written
    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor for column layers; one collective however many of them there are."""
        if not (self._ranks.sequence or (tensor.requires_grad and torch.is_grad_enabled())):
            return tensor
        if self._last is not None and self._last[0] is tensor:
            return self._last[1]
        entered: Tensor = _Enter.apply(tensor, self._ranks)  # type: ignore[no-untyped-call]
        self._last = (tensor, entered)
        return entered

    def _forget(self, *_: object) -> None:
        self._last = None


@_as_written
def leave(partial: Tensor, ranks: TensorRanks, *, whole: bool = False) -> Tensor:
    """The sum over ranks of a tensor that nobody else uses (its memory is taken).

    ``whole`` gives every rank the whole sum, also with sequence parallelism.
    """
    function = _LeaveToShares if ranks.sequence and not whole else _Leave
    result: Tensor = function.apply(partial, ranks)  # type: ignore[no-untyped-call]
    return result


@_as_written
def gather_outputs(share: Tensor, ranks: TensorRanks) -> Tensor:
    result: Tensor = _GatherOutputs.apply(share, ranks)  # type: ignore[no-untyped-call]
    return result


@_as_written
def split_stream(stream: Tensor, ranks: TensorRanks) -> Tensor:
    """This rank's share of the sequence.

    Raises:
        DataError: It does not come out even.
    """
    length = stream.shape[TIME]
    if length % ranks.size:
        raise DataError(
            f"a sequence of {length} tokens is not divisible by tp={ranks.size}, which "
            "sequence_parallel cuts it into. Use sequences of a multiple of it, or "
            "sequence_parallel=false."
        )
    result: Tensor = _SplitStream.apply(stream, ranks)  # type: ignore[no-untyped-call]
    return result


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather_along(tensor, TIME) if ranks.sequence else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ranks: TensorRanks = ctx.ranks
        if ranks.sequence:
            under_way = ranks.start_sum_share(gradient, TIME)
            _meanwhile(ranks)
            return under_way.wait(), None
        # A gradient may belong to others, too.
        total = gradient.clone(memory_format=torch.contiguous_format)
        work = ranks.start_sum(total)
        _meanwhile(ranks)
        work.wait()
        return total, None


def _meanwhile(ranks: TensorRanks) -> None:
    if ranks.meanwhile is not None:
        ranks.meanwhile.run()


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, ranks: TensorRanks) -> Tensor:
        if not partial.is_contiguous():
            return ranks.sum_(partial.contiguous())
        ctx.mark_dirty(partial)
        return ranks.sum_(partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _LeaveToShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.start_sum_share(partial, TIME).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.gather_along(gradient, TIME), None


class _GatherOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather_along(share, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.share_along(gradient, gradient.dim() - 1).contiguous(), None


class _SplitStream(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.share_along(stream, TIME).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.gather_along(gradient, TIME), None
