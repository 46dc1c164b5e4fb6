"""What the optimizer updates where it is not the model's own parameters.

Two reasons, alone or together. With sharded weights (ZeRO stage 1, Rajbhandari et al., 2020,
https://arxiv.org/abs/1910.02054) a rank updates only its share of each bucket: the parameters lie
in a flat buffer of the same layout as their gradients, the optimizer gets views of the share, and
an asynchronous all-gather under the next step's first forwards brings the rest. With 16-bit weights
the optimizer updates 32-bit copies, in which small updates are not lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.runtime.update.grad_sync import StageGradients
from strategies.runtime.update.gradient_layout import Buffer, main_dtype
from strategies.runtime.update.reduction import start_gather

Gathered = Callable[[int, dist.Work | None], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a parameter that this rank updates."""

    parameter: nn.Parameter
    start: int  # its first element
    stop: int  # behind the last one
    main: nn.Parameter  # what the optimizer updates; the parameter's shape if it is all of it
    # Where the new values go in the parameter's own type; None if ``main`` lies there.
    weights: Tensor | None

    @property
    def whole(self) -> bool:
        return self.stop - self.start == self.parameter.numel()

    def of(self, tensor: Tensor) -> Tensor:
        """The same part of something that has an element per element of the parameter."""
        return tensor.reshape(-1)[self.start : self.stop].view_as(self.main)

    def move(self) -> None:
        """The parameter lies elsewhere now, and so does what is updated of it."""
        here = self.parameter.data  # A view of it would share its count of writes.
        if not self.whole:
            here = here.view(-1)[self.start : self.stop]
        moved = self.main if self.weights is None else self.weights
        moved.data = here.view_as(moved)

    def publish(self) -> None:
        """Rounds values that have been updated to the parameter's type."""
        if self.weights is not None and self.main.grad is not None:
            self.weights.copy_(self.main.detach())

    def refresh(self) -> None:
        """Takes over weights that somebody else has written, where they are news."""
        if self.weights is not None:
            main = self.main.detach()
            changed = main.to(self.weights.dtype) != self.weights
            main.copy_(torch.where(changed, self.weights.to(main.dtype), main))


def widened_piece(parameter: nn.Parameter) -> Piece:
    """The 32-bit copy of a whole 16-bit parameter."""
    values = parameter.detach()
    main = nn.Parameter(values.to(main_dtype(parameter.dtype)))
    return Piece(parameter, 0, parameter.numel(), main, values)


@dataclass
class MainWeights:
    """The weights of one stage as its optimizer sees them."""

    stage: int
    pieces: dict[int, tuple[Piece, ...]]  # by the parameter's id: what this rank updates, if any
    _flats: list[tuple[Buffer, Tensor]] = field(default_factory=list)
    _works: list[dist.Work] = field(default_factory=list)
    _sources: list[Tensor | None] = field(default_factory=list)
    _stale: bool = False

    @classmethod
    def build(cls, gradients: StageGradients) -> MainWeights | None:
        """Makes them, and tells the gradients, where the model's own parameters will not do."""
        widened = any(
            parameter.dtype != main_dtype(parameter.dtype)
            for buffer in gradients.buffers
            for parameter in buffer.parameters
        )
        if not widened and not any(buffer.sharded for buffer in gradients.buffers):
            return None
        mains = cls(gradients.stage, {})
        for buffer in gradients.buffers:
            if buffer.sharded:
                assert buffer.group is not None
                mains._add_shares(buffer, buffer.group.rank())
            else:
                mains._add_whole(buffer)
        mains.serve(gradients)
        return mains

    def serve(self, gradients: StageGradients) -> None:
        """Lets what is updated find its gradients in these buffers, which are laid out alike."""
        for buffer in gradients.buffers:
            for parameter, start in zip(buffer.parameters, buffer.layout.starts, strict=False):
                if id(parameter) in self.pieces:
                    gradients.targets[id(parameter)] = [
                        (p.main, buffer.flat[start + p.start : start + p.stop].view_as(p.main))
                        for p in self.pieces[id(parameter)]
                    ]

    def _add_whole(self, buffer: Buffer) -> None:
        for parameter in buffer.parameters:
            if parameter.dtype == main_dtype(parameter.dtype):
                continue  # The optimizer may have the parameter itself.
            piece = widened_piece(parameter)
            _may_hold(piece.main, buffer.flat.dtype)
            self.pieces[id(parameter)] = (piece,)

    def _add_shares(self, buffer: Buffer, member: int) -> None:
        layout = buffer.layout
        flat = torch.zeros(
            layout.bounds[-1], dtype=buffer.parameters[0].dtype, device=buffer.flat.device
        )
        self._flats.append((buffer, flat))
        _move(buffer, flat)
        wide = main_dtype(flat.dtype)
        for index, (parameter, first) in enumerate(
            zip(buffer.parameters, layout.starts, strict=True)
        ):
            pieces = []
            for start, stop in layout.pieces(index, member):
                weights = flat[start:stop]
                own = weights.to(wide)  # The same memory if the type is the same.
                if stop - start == parameter.numel():
                    own, weights = own.view_as(parameter), weights.view_as(parameter)
                main = nn.Parameter(own)
                _may_hold(main, buffer.flat.dtype)
                apart = weights if flat.dtype != wide else None
                pieces.append(Piece(parameter, start - first, stop - first, main, apart))
            self.pieces[id(parameter)] = tuple(pieces)

    @property
    def sharded(self) -> bool:
        """Whether this rank updates only its share of some of them."""
        return bool(self._flats)

    @property
    def layouts(self) -> Sequence[Buffer]:
        """The buffers that are sharded."""
        return [buffer for buffer, _ in self._flats]

    def updated(self) -> None:
        """The optimizer has run: other members' shares are old from now on."""
        for pieces in self.pieces.values():
            for piece in pieces:
                piece.publish()
        self._stale = self.sharded

    def gather(self, started: Gathered | None = None) -> None:
        """Starts the all-gather unless the weights are whole or on their way.

        ``started`` hears of the stage and the work that ends last, None if nothing is to do.
        """
        if self._stale:
            self._stale = False
            for buffer, flat in self._flats:
                assert buffer.group is not None
                bounds = buffer.layout.bounds
                for low, high in itertools.pairwise(bounds):
                    if low < high:
                        works, source = start_gather(flat[low:high], buffer.group)
                        self._works += works
                        self._sources.append(source)
        if started is not None:
            started(self.stage, self._works[-1] if self._works else None)

    def wait(self) -> None:
        """Returns when the weights are whole, if their gather has started."""
        for work in self._works:
            work.wait()
        self._works.clear()
        self._sources.clear()

    def relink(self) -> None:
        """Puts parameters back into their buffer whose memory somebody has replaced."""
        for buffer, flat in self._flats:
            _move(buffer, flat)

    def room(self) -> dict[int, Tensor]:
        """Other memory for the weights that are sharded, laid out alike; by the parameter's id."""
        found = {}
        for buffer, flat in self._flats:
            other = torch.zeros_like(flat)
            for parameter, start in zip(buffer.parameters, buffer.layout.starts, strict=True):
                view = other[start : start + parameter.numel()]
                found[id(parameter)] = view.view_as(parameter)
        return found

    def follow(self) -> None:
        """The parameters have moved, into memory that ``room`` has made."""
        # Graphs of older versions hold writes against the parameters: the buffer counts its own.
        self._flats = [
            (buffer, buffer.parameters[0].data.as_strided(flat.shape, (1,), 0))
            for buffer, flat in self._flats
        ]
        for pieces in self.pieces.values():
            for piece in pieces:
                piece.move()

    def refresh(self) -> None:
        """Takes over weights that were written into the model, by a checkpoint say."""
        self.relink()
        for pieces in self.pieces.values():
            for piece in pieces:
                piece.refresh()


def _may_hold(main: nn.Parameter, dtype: torch.dtype) -> None:
    """Lets its gradient be of another type, until ``widen``."""
    if dtype != main.dtype:
        main.grad_dtype = None


def _move(buffer: Buffer, flat: Tensor) -> None:
    """Lets parameters lie in the flat buffer, with the values that they have."""
    for parameter, start in zip(buffer.parameters, buffer.layout.starts, strict=True):
        view = flat[start : start + parameter.numel()].view_as(parameter)
        if parameter.data_ptr() != view.data_ptr():
            view.copy_(parameter.detach())
            parameter.data = view


class AllMainWeights:
    """Those of all stages of a rank, and of weights that several stages share."""

    def __init__(self) -> None:
        self._stages: dict[int, MainWeights] = {}
        self._shared: dict[int, tuple[Piece, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._stages) or bool(self._shared)

    @property
    def sharded(self) -> bool:
        """Whether a rank updates only its share."""
        return any(mains.sharded for mains in self._stages.values())

    def stages(self) -> Iterator[MainWeights]:
        """In the order of the stages, on all ranks."""
        return (self._stages[stage] for stage in sorted(self._stages))

    def add_stage(self, mains: MainWeights) -> None:
        self._stages[mains.stage] = mains

    def serve(self, gradients: StageGradients) -> None:
        """Lets what is updated of a stage find its gradients in other buffers, too."""
        if gradients.stage in self._stages:
            self._stages[gradients.stage].serve(gradients)

    def room(self, parameters: Sequence[nn.Parameter], stage: int) -> tuple[Tensor, ...]:
        """Other memory for a stage's parameters, in which they may be updated and gathered."""
        own = self._stages[stage].room() if stage in self._stages else {}
        return tuple(
            own[id(parameter)] if id(parameter) in own else torch.empty_like(parameter.detach())
            for parameter in parameters
        )

    def follow(self, parameters: Sequence[nn.Parameter], stage: int) -> None:
        """A stage's parameters have moved, into memory that ``room`` has made."""
        if stage in self._stages:
            self._stages[stage].follow()
        for parameter in parameters:
            for piece in self._shared.get(id(parameter), ()):
                piece.move()

    def add_shared(self, piece: Piece) -> None:
        """Adds a weight that several stages use; it is never sharded."""
        self._shared[id(piece.parameter)] = (piece,)

    def pieces_of(self, parameter: nn.Parameter) -> tuple[Piece, ...] | None:
        """What this rank updates of a parameter; None for the parameter itself."""
        for mains in self._stages.values():
            if id(parameter) in mains.pieces:
                return mains.pieces[id(parameter)]
        return self._shared.get(id(parameter))

    def updated_parameters(self, parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
        """What the optimizer updates in place of the model's parameters."""
        for parameter in parameters:
            pieces = self.pieces_of(parameter)
            yield from (parameter,) if pieces is None else (piece.main for piece in pieces)

    def gather(self, stage: int, started: Gathered) -> None:
        if stage in self._stages:
            self._stages[stage].gather(started)
        else:
            started(stage, None)

    def wait(self, stage: int) -> None:
        if stage in self._stages:
            self._stages[stage].wait()

    def complete(self) -> None:
        """Makes all weights whole, now; collective. Of no cost if they are."""
        for mains in self.stages():
            mains.gather()
        for mains in self.stages():
            mains.wait()

    def updated(self) -> None:
        for mains in self._stages.values():
            mains.updated()
        for pieces in self._shared.values():
            for piece in pieces:
                piece.publish()

    def relink(self) -> None:
        for mains in self._stages.values():
            mains.relink()

    def refresh(self) -> None:
        for mains in self._stages.values():
            mains.refresh()
        for pieces in self._shared.values():
            for piece in pieces:
                piece.refresh()


def refuse_freezing(mains: AllMainWeights) -> None:
    """Parameters were frozen or unfrozen between two steps."""
    if mains:
        why = "overlap=zero1" if mains.sharded else "16-bit weights"
        raise ModelError(
            f"parameters were frozen or unfrozen during training. With {why} the optimizer holds "
            "parts of its own of all trained weights, which are fixed at the start. Freeze before "
            "fit(), or use overlap=grad_reduce and trainer.precision=bf16-mixed or 32-true."
        )
