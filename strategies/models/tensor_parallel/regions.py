"""Where the work of tensor-parallel ranks begins and ends, as autograd functions.

Between ``Entrance`` and ``leave`` each rank computes its share of a matrix product: forward the
shares are added up at the end, backward the input's gradients at the beginning (Shoeybi et al.,
2019, https://arxiv.org/abs/1909.08053). With sequence parallelism the stream outside is cut along
the sequence, so it is gathered at the beginning and summed share by share at the end (Korthikanti
et al., 2022, https://arxiv.org/abs/2205.05198). What was gathered is not kept: the share is, and
weight gradients gather it again.

Losses are the same number on every rank, and each rank starts its backward from it: whatever is
replicated has the whole gradient everywhere, so only the entrance adds up.

In a compiled unit these run as they stand here, between two compiled pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from strategies.errors import DataError
from strategies.models.selective.region import Kept
from strategies.models.tensor_parallel.tensor_ranks import GatherUnderWay, TensorRanks

TIME = 1  # the dimension of [batch, sequence, hidden] that sequence parallelism cuts

_Function = TypeVar("_Function", bound=Callable[..., Any])


def as_written(function: _Function) -> _Function:
    """A function that torch.compile leaves alone."""
    disable: Any = torch.compiler.disable  # Untyped in torch.
    return cast(_Function, disable(function))


class Entrance:
    """Begins the parallel part of one unit; layers that read the same tensor share it."""

    def __init__(self, ranks: TensorRanks) -> None:
        self._ranks = ranks
        self._last: tuple[Tensor, int, Tensor, _Again | None] | None = None

    def forget_after(self, unit: nn.Module) -> None:
        """Lets go of what was entered when the unit has run, or it would keep activations alive."""
        unit.register_forward_hook(lambda *_: self.forget(), always_call=True)

    @as_written
    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor for column layers; one collective however many of them there are."""
        return self._entered(tensor)[0]

    def linear(self, tensor: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A column layer's outputs, which keeps no more for its backward than it was given."""
        if self._ranks.sequence:
            return self._gathered_linear(tensor, weight, bias)
        return functional.linear(self(tensor), weight, bias)

    @as_written
    def _gathered_linear(self, tensor: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        entered, again = self._entered(tensor)
        device = entered.device.type
        if torch.is_autocast_enabled(device) and entered.dtype is not torch.float64:
            # As the product would, but where it is seen.
            entered = entered.to(torch.get_autocast_dtype(device))
        if again is None or not torch.is_grad_enabled():
            return functional.linear(entered, weight, bias)
        with again.kept_instead_of(entered):
            return functional.linear(entered, weight, bias)

    def _entered(self, tensor: Tensor) -> tuple[Tensor, _Again | None]:
        ranks = self._ranks
        if not (ranks.sequence or (tensor.requires_grad and torch.is_grad_enabled())):
            return tensor, None
        # What was written into since is another value.
        known = self._last
        if known is not None and known[0] is tensor and known[1] == tensor._version:
            return known[2:]
        again = _Again(tensor, ranks) if ranks.sequence else None
        entered: Tensor = _Enter.apply(tensor, ranks, again)  # type: ignore[no-untyped-call]
        self._last = (tensor, tensor._version, entered, again)
        return entered, again

    def forget(self) -> None:
        self._last = None


@as_written
def leave(partial: Tensor, ranks: TensorRanks, *, whole: bool = False) -> Tensor:
    """The sum over ranks of a tensor that nobody else uses (its memory is taken).

    ``whole`` gives every rank the whole sum, also with sequence parallelism.
    """
    function = _LeaveToShares if ranks.sequence and not whole else _Leave
    result: Tensor = function.apply(partial, ranks)  # type: ignore[no-untyped-call]
    return result


@as_written
def gather_outputs(share: Tensor, ranks: TensorRanks, dim: int = -1) -> Tensor:
    result: Tensor = _GatherOutputs.apply(share, ranks, dim % share.dim())  # type: ignore[no-untyped-call]
    return result


@as_written
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
    def forward(ctx: Any, tensor: Tensor, ranks: TensorRanks, again: _Again | None) -> Tensor:
        ctx.ranks, ctx.again = ranks, again
        return ranks.gather_along(tensor, TIME) if ranks.sequence else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ranks: TensorRanks = ctx.ranks
        if ranks.sequence:
            if ranks.meanwhile is not None:
                ctx.again.start()
            under_way = ranks.start_sum_share(gradient, TIME)
            _meanwhile(ranks)
            return under_way.wait(), None, None
        # A gradient may belong to others, too.
        total = gradient.clone(memory_format=torch.contiguous_format)
        work = ranks.start_sum(total)
        _meanwhile(ranks)
        work.wait()
        return total, None, None


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
    def forward(ctx: Any, share: Tensor, ranks: TensorRanks, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return ranks.gather_along(share, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.share_along(gradient, ctx.dim).contiguous(), None, None


class _SplitStream(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.share_along(stream, TIME).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.gather_along(gradient, TIME), None


# -- what sequence-parallel layers keep: their share of what they have gathered --------------------


class Gathered:
    """Stands in the autograd graph for a gathered tensor: this rank's share of it is kept.

    Attributes:
        waits: Its product's weight gradient is computed later, from ``share``: the engine, which
            asks for all that a node has saved, is given a tensor without values.
    """

    __slots__ = ("_again", "_layout", "waits")

    def __init__(self, again: _Again, tensor: Tensor) -> None:
        self._again = again
        place = (tensor.shape, tensor.stride(), tensor.storage_offset())
        self._layout = (tensor.dtype, *place)
        self.waits = False

    @property
    def packed_share(self) -> Any:
        """The share, as whoever packs what is saved around here has packed it."""
        return self._again.packed

    def share(self) -> Tensor:
        return self._again.share()

    def whole(self) -> Tensor:
        """Gathers again: all ranks do, at the same place in their lists."""
        dtype, shape, stride, offset = self._layout
        return self._again.whole().to(dtype).as_strided(shape, stride, offset)

    def unpack(self) -> Tensor:
        if not self.waits:
            return self.whole()
        dtype, shape, *_ = self._layout
        return self.share().new_empty((), dtype=dtype).expand(shape)

    def held_tensors(self) -> Iterable[Tensor]:
        packed = self._again.packed
        held: Any = getattr(packed, "held_tensors", None)
        return (packed,) if held is None else held()


class _Again:
    """A tensor that several column layers have read: its share, and the whole while they need it.

    Attributes:
        packed: The share, packed by the hooks around; None before a layer has read it.
    """

    def __init__(self, share: Tensor, ranks: TensorRanks) -> None:
        self._ranks = ranks
        self._share: Tensor | None = share
        self.packed: Any = None
        self._unpack: Callable[[Any], Tensor] | None = None
        self._users = 0
        self._left = 0
        self._whole: Tensor | None = None
        self._under_way: GatherUnderWay | None = None

    def kept_instead_of(self, entered: Tensor) -> saved_tensors_hooks:
        """Inside, whatever lies in the memory of ``entered`` is saved as a ``Gathered``."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        storage = entered.untyped_storage()._cdata

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage()._cdata != storage:
                return Kept(tensor) if outer is None else outer[0](tensor)
            if self._share is not None:
                share, self._share = self._share, None
                self.packed = Kept(share) if outer is None else outer[0](share)
                self._unpack = Kept.unpack if outer is None else outer[1]
            self._users += 1
            return Gathered(self, tensor)

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Gathered):
                return packed.unpack()
            return (Kept.unpack if outer is None else outer[1])(packed)

        return saved_tensors_hooks(pack, unpack)

    def share(self) -> Tensor:
        assert self._unpack is not None
        return self._unpack(self.packed).detach()

    def start(self) -> None:
        """Starts gathering for layers whose weight gradients come next."""
        if self._users and self._whole is None and self._under_way is None:
            self._under_way = self._ranks.start_gather(self.share())

    def whole(self) -> Tensor:
        if self._whole is None:
            under_way, self._under_way = self._under_way, None
            if under_way is None:
                under_way = self._ranks.start_gather(self.share())
            self._whole = torch.cat(under_way.wait().unbind(0), TIME)
            self._left = self._users
        whole = self._whole
        self._left -= 1
        if self._left == 0:  # All have it.
            self._whole = None
        return whole
