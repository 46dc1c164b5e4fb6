"""A user's optimizer, built over the model's parameters, made to update what stands for them.

Groups stay the same objects, so schedulers and loggers see what they saw. Checkpoints know nothing
of it: state is put together per parameter when it is saved and cut when it is loaded, so a
checkpoint fits any number of replicas, with sharded weights or without.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.errors import CheckpointError, ModelError
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.update.gradient_layout import Buffer
from strategies.runtime.update.main_weights import AllMainWeights, MainWeights, Piece

# They treat every element alike and look at no other, so a part of a tensor is as good as all.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adamax, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.ASGD,
    torch.optim.RMSprop, torch.optim.Rprop,
)  # fmt: skip
MAIN_WEIGHT = "foldpipe_main_weight"  # the 32-bit copy, among the optimizer's state
_State = dict[str, Any]


@dataclass(frozen=True)
class MainOptimizer:
    """An optimizer that updates pieces."""

    optimizer: Optimizer  # the user's
    groups: tuple[tuple[nn.Parameter, ...], ...]  # the model's parameters of each of its groups
    mains: AllMainWeights  # what it updates instead

    @classmethod
    def take_over(cls, optimizer: Optimizer, mains: AllMainWeights) -> MainOptimizer:
        """Puts the pieces into an optimizer that has not run yet.

        Raises:
            ModelError: It needs whole tensors, and the weights are sharded; or it runs the step
                again at other weights, which the model would not see.
        """
        if mains.sharded:
            check_elementwise(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ModelError(
                "LBFGS tries several weights in a step, and with 16-bit weights the model has them "
                "only when the step has ended. Use trainer.precision=32-true, or another optimizer."
            )
        groups = []
        for group in optimizer.param_groups:
            members = tuple(group["params"])
            groups.append(members)
            replaced: list[nn.Parameter] = []
            for parameter in members:
                pieces = mains.pieces_of(parameter)
                if pieces is None:
                    replaced.append(parameter)
                    continue
                state = optimizer.state.pop(parameter, None)  # Adagrad makes its own at once.
                for piece in pieces:
                    replaced.append(piece.main)
                    if state is not None:
                        optimizer.state[piece.main] = _cut(state, piece)
            group["params"] = replaced
        return cls(optimizer, tuple(groups), mains)

    @classmethod
    def plain(cls, optimizer: Optimizer) -> MainOptimizer:
        """One that updates the model's own parameters, maybe inside a wrapper of Lightning's."""
        own = getattr(optimizer, "optimizer", optimizer)
        groups = tuple(tuple(group["params"]) for group in own.param_groups)
        return cls(own, groups, AllMainWeights())

    def named_state(
        self,
        named: Mapping[str, nn.Parameter],
        *,
        group_of: Callable[[int, bool], dist.ProcessGroup | None],
    ) -> dict[str, Any]:
        """The state keyed by names, as of an optimizer that updates whole parameters; collective.

        Of a sharded weight only what the group's first member has to write is there. ``group_of`` a
        stage, or of this rank's share of its experts, are the processes that talk about it from
        host memory.

        Raises:
            CheckpointError: The optimizer updates a parameter that is not the module's, or keeps
                state that cannot be put together.
        """
        names = {id(parameter): name for name, parameter in named.items()}
        groups = []
        state: dict[str, _State] = {}
        for group, members in zip(self.optimizer.param_groups, self.groups, strict=True):
            if any(id(parameter) not in names for parameter in members):
                raise CheckpointError(
                    "the optimizer updates a parameter that is no part of the module, so it has no "
                    "name in a checkpoint. Build optimizers from self.parameters()."
                )
            rest = {key: value for key, value in group.items() if key != "params"}
            groups.append({**rest, "params": [names[id(p)] for p in members]})
            for parameter in members:
                pieces = self.mains.pieces_of(parameter)
                if pieces is None:
                    entry = self.optimizer.state.get(parameter)
                elif len(pieces) == 1 and pieces[0].whole:
                    entry = self._entry(pieces[0])
                else:
                    continue
                if entry:
                    state[names[id(parameter)]] = dict(entry)
        updated = {id(parameter) for members in self.groups for parameter in members}
        for stage in self.mains.stages():
            for buffer in stage.layouts:
                talk = group_of(stage.stage, buffer.experts)
                assert talk is not None
                ours = [id(p) in updated for p in buffer.parameters]
                keys = [names.get(id(p), "") for p in buffer.parameters]
                found = self._collected(stage, buffer, ours, keys, talk)
                for key in keys:
                    state.pop(key, None)
                state.update(found)
        return {"state": state, "param_groups": groups}

    def load(self, saved: Mapping[str, Any], named: Mapping[str, nn.Parameter]) -> None:
        """Cuts saved state to this rank's pieces."""
        names = {id(parameter): name for name, parameter in named.items()}
        there = self.optimizer.param_groups
        if len(there) != len(saved["param_groups"]):
            raise CheckpointError(
                f"the checkpoint's optimizer has {len(saved['param_groups'])} parameter groups, "
                f"this one has {len(there)}. Use the optimizer it was written with."
            )
        positions: dict[int, _State] = {}
        groups = []
        index = 0
        for members, old in zip(self.groups, saved["param_groups"], strict=True):
            first = index
            for parameter in members:
                entry = dict(saved["state"].get(names[id(parameter)], {}))
                weight = entry.pop(MAIN_WEIGHT, None)
                pieces = self.mains.pieces_of(parameter)
                if pieces is None:
                    if weight is not None:
                        # Written with 16-bit weights: what they were rounded from.
                        parameter.detach().copy_(weight)
                    if entry:
                        positions[index] = entry
                    index += 1
                    continue
                for piece in pieces:
                    if entry:
                        positions[index] = _cut(entry, piece)
                    if weight is not None:
                        piece.main.detach().copy_(piece.of(weight.to(piece.main.device)))
                    index += 1
            groups.append(
                {**{k: v for k, v in old.items() if k != "params"},
                 "params": list(range(first, index))}
            )  # fmt: skip
        self.optimizer.load_state_dict({"state": positions, "param_groups": groups})

    def _entry(self, piece: Piece) -> _State:
        entry = dict(self.optimizer.state.get(piece.main, {}))
        if piece.weights is not None:
            entry[MAIN_WEIGHT] = piece.main.detach()
        return entry

    def _collected(
        self,
        stage: MainWeights,
        buffer: Buffer,
        ours: Sequence[bool],
        names: Sequence[str],
        talk: dist.ProcessGroup,
    ) -> dict[str, _State]:
        """The state of a buffer's parameters, whole, on the first member; {} on the others."""
        member, members = talk.rank(), talk.size()
        plain: dict[str, _State] = {}
        kinds: dict[str, dict[str, str]] = {}  # key of the state -> parameter -> type
        mine: list[tuple[Piece, int, _State]] = []
        for index, parameter in enumerate(buffer.parameters):
            if not ours[index]:
                continue
            for piece in stage.pieces[id(parameter)]:
                entry = self._entry(piece)
                mine.append((piece, buffer.layout.starts[index], entry))
                for key, value in entry.items():
                    if _spread(value, piece):
                        dtype = str(value.dtype).removeprefix("torch.")
                        kinds.setdefault(key, {})[names[index]] = dtype
                    else:
                        kept = value.detach().cpu() if isinstance(value, Tensor) else value
                        plain.setdefault(names[index], {})[key] = kept
        told = Exchange(talk).everyone((kinds, plain))
        spread: dict[str, dict[str, str]] = {}
        result: dict[str, _State] = {}
        for theirs, scalars in told:
            for key, types in theirs.items():
                spread.setdefault(key, {}).update(types)
            for name, entry in scalars.items():
                result.setdefault(name, {}).update(entry)
        ranges = [buffer.layout.owned(who) for who in range(members)]
        for key in sorted(spread):
            dtype = getattr(torch, next(iter(spread[key].values())))
            own = torch.zeros(sum(b - a for a, b in ranges[member]), dtype=dtype)
            whole = torch.zeros(buffer.layout.bounds[-1], dtype=dtype)
            for piece, start, entry in mine:
                if key in entry:
                    whole[start + piece.start : start + piece.stop] = entry[key].reshape(-1).cpu()
            torch.cat([whole[a:b] for a, b in ranges[member]], out=own)
            gathered = [torch.empty_like(own) for _ in range(members)] if member == 0 else None
            dist.gather(own, gathered, group=talk, group_dst=0)
            for who, part in enumerate(gathered or ()):
                sizes = [b - a for a, b in ranges[who]]
                for (a, b), values in zip(ranges[who], torch.split(part, sizes), strict=True):
                    whole[a:b] = values
            if member == 0:
                for index, parameter in enumerate(buffer.parameters):
                    if names[index] in spread[key]:
                        start = buffer.layout.starts[index]
                        values = whole[start : start + parameter.numel()].view(parameter.shape)
                        result.setdefault(names[index], {})[key] = values
        return result if member == 0 else {}


def with_sparse_gradients(optimizer: Optimizer) -> Callable[[], None]:
    """Shows ``SparseAdam`` gradients as it wants them, until what is returned is called.

    Here they add up in dense buffers. A row without a gradient is one that no sample has had: its
    gradient is zero.
    """
    own = getattr(optimizer, "optimizer", optimizer)
    dense: list[tuple[Tensor, Tensor]] = []
    if isinstance(own, torch.optim.SparseAdam):
        for parameter in (p for group in own.param_groups for p in group["params"]):
            if parameter.grad is not None and not parameter.grad.is_sparse:
                dense.append((parameter, parameter.grad))
                parameter.grad = parameter.grad.to_sparse(1)

    def put_back() -> None:
        for parameter, gradient in dense:
            parameter.grad = gradient

    return put_back


def check_elementwise(
    optimizer: Optimizer, *, parts: str = "overlap=zero1", instead: str = "overlap=grad_reduce"
) -> None:
    """Refuses one that parts will not do for: ``parts`` gives them, not ``instead``."""
    kind = type(optimizer)
    # Torch wraps a class's step when it makes the first one.
    known = any(inspect.unwrap(kind.step) is inspect.unwrap(b.step) for b in ELEMENTWISE)
    if not (known or getattr(kind, "elementwise", False)):
        raise ModelError(
            f"{parts} gives the optimizer a part of each weight, and {kind.__name__} is not "
            f"known to treat every element by itself. Use {instead}; or, if it does, say "
            f"so with {kind.__name__}.elementwise = True."
        )
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params" and isinstance(value, Tensor) and value.numel() > 1:
                raise ModelError(
                    f"{name} of the optimizer's group {number} has {value.numel()} elements: it is "
                    f"made for whole weights, and {parts} gives the optimizer parts of them. "
                    f"Use {instead}."
                )


def _spread(value: Any, piece: Piece) -> bool:
    """Whether it has an element per element of the piece, as opposed to one for all."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return False
    if value.shape != piece.main.shape:
        raise CheckpointError(
            f"the optimizer keeps {tuple(value.shape)} elements for {tuple(piece.main.shape)} of a "
            "weight, which cannot be put together from the replicas. Use overlap=grad_reduce."
        )
    return True


def _cut(entry: Mapping[str, Any], piece: Piece) -> _State:

    def part(value: Any) -> Any:
        if isinstance(value, Tensor) and value.shape == piece.parameter.shape and value.dim():
            return piece.of(value).clone()
        return value.clone() if isinstance(value, Tensor) else value

    return {key: part(value) for key, value in entry.items()}
