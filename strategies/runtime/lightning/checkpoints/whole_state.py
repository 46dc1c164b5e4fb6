"""The whole of a cut module: its state brought together, and the module itself after training.

Each rank of a pipeline has a part of the module. Whoever wants all of it (``torch.save`` of a
``state_dict``, another Trainer, a file that stock Lightning reads) gets it here: what ranks own
travels as bytes over the default group, and the holes of a module are filled with it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from strategies.errors import CheckpointError, ModelError
from strategies.models.held_units import Elsewhere
from strategies.models.replay.hole import Hole
from strategies.models.stage_model import StageModel
from strategies.runtime.engine.rank_engine import Engine
from strategies.runtime.messages.exchange import Exchange, everybody
from strategies.runtime.storage.opened import shortened
from strategies.runtime.storage.part import Piece, as_piece, flatten, unflatten

_BLOCK_BYTES = 1 << 26
# How much of a host's free memory whole modules may take.
_SHARE = 0.5
# Of a module that a failed fit has left cut: its WayBack, for when the ranks have met again.
LEFT = "_foldpipe_left"


def bring_together(state: Mapping[str, Any], *, everywhere: bool) -> dict[str, Any]:
    """What all ranks hold of something, under its names; collective, over the default group.

    Args:
        state: Tensors, pieces of tensors, and plain values. What several ranks have is taken from
            the first of them.
        everywhere: Whether every rank gets it; else rank 0 does, and the others get {}.

    Raises:
        CheckpointError: A value is neither a tensor nor plain data, or boxes are missing. All
            ranks raise.
    """
    exchange = everybody()
    pieces, values, problem = _plain(state)
    rows = [
        [name, _dtype(box.tensor), box.global_shape, box.offsets, box.sizes]
        for name, piece in pieces.items()
        for box in piece.boxes()
    ]
    told = exchange.everyone({"rows": rows, "values": values, "problem": problem})
    problems = [part["problem"] for part in told if part["problem"] is not None]
    if problems:
        raise CheckpointError(problems[0])
    tensors = _travel(pieces, [part["rows"] for part in told], everywhere, exchange)
    if exchange.rank > 0 and not everywhere:
        return {}
    found: dict[str, Any] = {}
    trees: dict[str, Any] = {}
    for part in told:
        trees = part["values"] | trees
    nested: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        owner, mark, key = name.partition("\0")
        if mark:
            nested.setdefault(owner, {})[key] = tensor
        else:
            found[name] = tensor
    return found | {name: unflatten(tree, nested.get(name, {})) for name, tree in trees.items()}


def _plain(state: Mapping[str, Any]) -> tuple[dict[str, Piece], dict[str, Any], str | None]:
    pieces: dict[str, Piece] = {}
    values: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor | Piece):
            pieces[name] = as_piece(value)
            continue
        try:
            tree, tensors = flatten(value)
        except CheckpointError as error:
            return {}, {}, f"{name} of the module's state cannot be brought together: {error}"
        values[name] = tree
        pieces |= {f"{name}\0{key}": as_piece(tensor) for key, tensor in tensors.items()}
    return pieces, values, None


def _travel(
    pieces: Mapping[str, Piece], rows: Sequence[Sequence[Any]], everywhere: bool, exchange: Exchange
) -> dict[str, Tensor]:
    first: dict[tuple[str, tuple[int, ...]], tuple[int, Any]] = {}
    for rank, said in enumerate(rows):
        for row in said:
            first.setdefault((row[0], tuple(row[3])), (rank, row))
    whole: dict[str, Tensor] = {}
    filled: dict[str, int] = {}
    gets = everywhere or exchange.rank == 0
    for (name, offsets), (source, row) in first.items():
        dtype, shape, sizes = getattr(torch, row[1]), tuple(row[2]), tuple(row[4])
        own = None
        if exchange.rank == source:
            own = next(b.tensor for b in pieces[name].boxes() if tuple(b.offsets) == offsets)
        box = _sent(own, sizes, dtype, source, everywhere, exchange)
        if box is None:
            continue
        filled[name] = filled.get(name, 0) + math.prod(sizes)
        if sizes == shape:
            whole[name] = box
        else:
            target = whole.setdefault(name, torch.empty(shape, dtype=dtype))
            place = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
            target[place] = box
    for name, tensor in whole.items():
        if gets and filled[name] < tensor.numel():
            raise CheckpointError(
                f"of {name}, {list(tensor.shape)}, the ranks have {filled[name]:,} of "
                f"{tensor.numel():,} elements together."
            )
    return whole


def _sent(
    own: Tensor | None,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    source: int,
    everywhere: bool,
    exchange: Exchange,
) -> Tensor | None:
    """A box on the ranks that get it, in host memory; from the ``source``, which has it."""
    here = exchange.rank in (0, source) or everywhere
    if not here:
        return None
    if own is not None:
        box = own.detach().to("cpu", copy=True).contiguous()
    else:
        box = torch.empty(sizes, dtype=dtype)
    travels = exchange.size > 1 and (everywhere or source > 0)
    if travels and box.numel():
        for block in torch.split(box.reshape(-1).view(torch.uint8), _BLOCK_BYTES):
            if everywhere:
                dist.broadcast(block, src=source)
            elif exchange.rank == source:
                dist.send(block, dst=0)
            else:
                dist.recv(block, src=source)
    return box if everywhere or exchange.rank == 0 else None


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class WayBack:
    """Makes a module whole that a failed fit has left cut; no part of a copy of the module."""

    def __init__(self, make_whole: Callable[[], None]) -> None:
        self.make_whole = make_whole

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class StateOnSight(MutableMapping[str, Any]):
    """A module's state as hooks find it in a checkpoint: it becomes whole when one looks at it.

    Attributes:
        parts: What this rank has of it.
        seen: Whether somebody has looked. Then it may have been changed, too.
    """

    def __init__(
        self, parts: Mapping[str, Any], bring: Callable[[], dict[str, Any] | None]
    ) -> None:
        self.parts = dict(parts)
        self.seen = False
        self._bring = bring
        self._found: dict[str, Any] = {}

    def look(self) -> dict[str, Any]:
        if not self.seen:
            found = self._bring()
            if found is None:
                return self.parts  # It is asked for outside of hooks.
            self._found, self.seen = found, True
        return self._found

    def __getitem__(self, name: str) -> Any:
        return self.look()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.look()[name] = value

    def __delitem__(self, name: str) -> None:
        del self.look()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.look())

    def __len__(self) -> int:
        return len(self.look())

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return self.look() | dict(other)

    def copy(self) -> dict[str, Any]:
        return dict(self.look())

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return copy.deepcopy(self.look(), memo)

    def plain(self, whole: Mapping[str, Any] | None) -> dict[str, Any]:
        """As a dict; ``whole`` of one that nobody has looked at."""
        return dict(self._found if self.seen else self.parts if whole is None else whole)


def without_sights(value: Any, whole: Mapping[str, Any] | None) -> Any:
    """Plain data, with what nobody has looked at as ``whole``, or in parts."""
    if isinstance(value, StateOnSight):
        return value.plain(whole)
    if type(value) is dict:
        return {key: without_sights(item, whole) for key, item in value.items()}
    return [without_sights(item, whole) for item in value] if type(value) is list else value


def has_unseen(value: Any) -> bool:
    """Whether there is a state that nobody has looked at."""
    if isinstance(value, StateOnSight):
        return not value.seen
    inside = value.values() if type(value) is dict else value if type(value) is list else ()
    return any(map(has_unseen, inside))


# ---------------------------------------------------------------------------------- whole module


class WholeModule:
    """What a module was before it was cut, and the way back to it; made before the cut.

    Attributes:
        names: Of its state, in the order of stock Lightning.
        aliases: Of each name of a parameter all the names that it has.
        num_bytes: Of its parameters and buffers.
        restored: Whether it is whole at present.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names = tuple(module.state_dict())
        tied: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            tied.setdefault(id(parameter), []).append(name)
        self.aliases = {name: all_names for all_names in tied.values() for name in all_names}
        self._kinds = {
            name: (tuple(p.shape), p.dtype)
            for name, p in module.named_parameters(remove_duplicate=False)
        }
        tensors = [*module.parameters(), *module.buffers()]
        self.num_bytes = sum(t.numel() * t.element_size() for t in tensors)
        self.restored = False
        self._left = False
        self._free: dict[str, Tensor] = {}
        self._held: frozenset[str] = frozenset()
        self._now: Any = None

    def cut(self, free: Collection[str]) -> None:
        """Notes that it has been cut; ``free`` buffers belong to no rank's parameters."""
        self._leave_out_holes()
        self._held = frozenset(self.module.state_dict())
        buffers = dict(self.module.named_buffers())
        self._free = {name: buffers[name].clone() for name in free if name in buffers}

    def _leave_out_holes(self) -> None:
        """Layers that write their state themselves name parameters of other ranks, too."""
        hooked: Any = self.module  # The hook's registration is untyped in torch.
        self._handle = hooked.register_state_dict_post_hook(_without_holes)

    @property
    def changed(self) -> bool:
        """Whether somebody has changed the module since it was made whole: other parameters, say.

        What was found out about it when it was cut does not hold then.
        """
        return self.restored and self._now != _signature(self.module)

    @contextmanager
    def shown(self, model: StageModel) -> Iterator[None]:
        """Inside, the module has all parameters, those of other ranks without values or memory."""
        if self.restored:
            yield
            return
        model.restore(
            {
                name: torch.zeros((), dtype=d).expand(shape)
                for name, (shape, d) in self._kinds.items()
            }
        )
        try:
            yield
        finally:
            model.release()

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuses a state that is not this module's.

        Raises:
            CheckpointError: Names differ; the same on all ranks.
        """
        for which, names, others in (
            ("lacks", self.names, state),
            ("has, and this one lacks,", state, self.names),
        ):
            other = set(others)
            missing = [name for name in names if name not in other]
            if missing:
                raise CheckpointError(
                    f"the checkpoint is that of another model: it {which} {len(missing)} names: "
                    f"{shortened(missing)}. Use the model it was written with, or set "
                    "self.strict_loading = False in the module."
                )

    def foreign(self, *, speaks: bool) -> set[str]:
        """Free buffers that are another rank's; collective.

        Every rank has them, and those stages change them whose code does: the last such stage's
        value counts. Only ranks that speak have one.
        """
        if not self._free:
            return set()
        exchange = everybody()
        buffers = dict(self.module.named_buffers())
        said = {name: not _same(buffers.get(name), old) for name, old in self._free.items()}
        owners: dict[str, int] = {}
        for rank, theirs in enumerate(exchange.everyone(said if speaks else {})):
            for name, changed in theirs.items():
                if changed or name not in owners:
                    owners[name] = rank
        return {name for name, owner in owners.items() if owner != exchange.rank}

    def meet(self) -> None:
        """All ranks have the same buffers now: whose they are is seen by what changes from here."""
        buffers = dict(self.module.named_buffers())
        self._free = {name: buffers[name].clone() for name in self._free if name in buffers}

    def part(self) -> dict[str, Any]:
        """What this rank has of the module's state, or had of it when it was cut."""
        left, self._left = self._left, False
        state: dict[str, Any] = self.module.state_dict()
        self._left = left
        if not self.restored:
            return state
        return {name: value for name, value in state.items() if name in self._held}

    def tensors(self, engine: Engine) -> dict[str, Tensor]:
        """This rank's parameters under all their names, and its buffers."""
        mine = {id(parameter) for parameter in engine.named_parameters().values()}
        named = self.module.named_parameters(remove_duplicate=False)
        found: dict[str, Tensor] = {name: p for name, p in named if id(p) in mine}
        return found | dict(self.module.named_buffers(remove_duplicate=False))

    def restore(self, model: StageModel, state: Mapping[str, Tensor]) -> None:
        """Fills the holes, on all ranks; collective.

        ``state`` has this rank's parameters and buffers; others' buffers take the owners' values.
        """
        found = bring_together(state, everywhere=True)
        self.module.to("cpu")
        model.restore(found)
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                value = found.get(name)
                if value is not None and name not in state and value.shape == buffer.shape:
                    buffer.copy_(value)
        self._handle.remove()
        self.restored, self._now = True, _signature(self.module)
        self.leave(cut=False)

    def release(self, model: StageModel) -> None:
        """Cuts it again, where it was cut before."""
        model.release()
        self._leave_out_holes()
        self.restored = False

    def leave(self, *, cut: bool) -> None:
        """With ``cut``, a ``state_dict`` of the part that is here is refused from now on."""
        if cut and not self._left:
            hooked: Any = self.module  # The hook's registration is untyped in torch.
            hooked.register_state_dict_pre_hook(self._refuse)
        self._left = cut

    def _refuse(self, *_: Any) -> None:
        if self._left:
            raise ModelError(
                f"{type(self.module).__name__} is cut over the ranks of a pipeline, and this rank "
                "has one part of it: state_dict() would leave out the others. Call "
                "trainer.strategy.full_state_dict() on all ranks, or let the module be made whole "
                "after training: PipelineStrategy(whole_after=True)."
            )


def _without_holes(_: Any, state: dict[str, Any], *__: Any) -> None:
    for name in [name for name, value in state.items() if isinstance(value, Hole)]:
        del state[name]


def _same(now: Tensor | None, before: Tensor) -> bool:
    return now is None or (now.shape == before.shape and torch.equal(now, before))


def fits(num_bytes: int, *, copies: int) -> tuple[bool, str]:
    """Whether so many copies fit into this host's memory; and the figures, for people."""
    free = psutil.virtual_memory().available
    needs = num_bytes * copies
    return needs <= free * _SHARE, (
        f"{copies} copies of {num_bytes / 1e9:.1f} GB on this host, of whose {free / 1e9:.1f} GB "
        f"of free memory {_SHARE:.0%} may be taken"
    )


def look_at_whole(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Lets Lightning look now at a module that will be cut when it would look.

    The summary counts parameters and runs ``example_input_array`` through ``forward``; the graph
    for TensorBoard runs it as well.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    fitting = trainer.state.fn == TrainerFn.FITTING
    for callback in callbacks:
        if fitting and isinstance(callback, ModelSummary) and callback._max_depth:
            vars(callback).pop("_summary", None)
            kept = _seen(callback._summary(trainer, module))
            vars(callback)["_summary"] = lambda *_, kept=kept: kept
    for logger in trainer.loggers:
        if getattr(logger, "_log_graph", False):
            graphs: Any = logger
            graphs.log_graph(module)
            graphs._log_graph = False


def _seen(summary: Any) -> SimpleNamespace:
    """A summary as it is now: Lightning's counts when it is asked."""
    data = summary._get_summary_data()
    names = ("total_parameters", "trainable_parameters", "model_size", "total_training_modes")
    figures = {name: getattr(summary, name) for name in names}
    flops = getattr(summary, "total_flops", 0)
    return SimpleNamespace(_get_summary_data=lambda: data, total_flops=flops, **figures)


def refuse_cut(module: nn.Module) -> None:
    """Refuses a module that another strategy has cut, and left so; collective.

    One that was left so because its fit has failed is made whole, if that can be.

    Raises:
        ModelError: It is such a one.
    """
    way_back = vars(module).pop(LEFT, None)
    if way_back is not None:
        way_back.make_whole()
    for child in module.modules():
        values: Iterable[Any] = child.__dict__.values()
        if isinstance(child, Elsewhere) or any(type(value) is Hole for value in values):
            raise ModelError(
                f"{type(module).__name__} was cut by an earlier Trainer and has not been made "
                "whole since: that Trainer failed, or has PipelineStrategy(whole_after=False), or "
                "the whole module did not fit into memory. Make the module anew and load a "
                "checkpoint into it, or use the same Trainer again."
            )


def _signature(module: nn.Module) -> Any:
    parameters = ((name, id(p), p.requires_grad) for name, p in module.named_parameters())
    return tuple(parameters), tuple(id(child) for child in module.modules())
