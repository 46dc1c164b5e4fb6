"""What a user's step sees of ``torch.distributed``: the replicas, as under data parallelism.

A step that talks to other processes means those that train on other rows of the same batch. In a
pipeline these are the replicas of the rank that runs it, and the default group would hold all
processes, most of which never get to that line. So while a step runs (forward or backward), the
default group is that of its replicas, whatever function asks for it; nothing in torch is patched.
Where values are only shapes, a ``LocalGroup`` stands in its place and talks to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from strategies.errors import ModelError
from strategies.models.nested import tensors
from strategies.models.replay.hole import Hole, user_line

# Torch renames its methods now and then; a group answers under the old names and the new ones.
_ANSWERED = """
    allgather allgather_coalesced _allgather_base all_gather_single allgather_into_tensor_coalesced
    all_gather_single_coalesced allreduce allreduce_coalesced broadcast reduce gather scatter
    reduce_scatter _reduce_scatter_base reduce_scatter_single reduce_scatter_tensor_coalesced
    reduce_scatter_single_coalesced alltoall alltoall_base all_to_all_single barrier
"""
_C10D = distributed_c10d.__name__


class LocalGroup(dist.ProcessGroup):
    """A group that has this process only, or that knows shapes only.

    With ``inner`` real values go to that group, and those without data are answered here: each
    result has its shape, and its data is this process's own, which for a single process is right.
    """

    def __init__(self, rank: int, size: int, inner: dist.ProcessGroup | None = None) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # without a store: not in the stubs
        self._inner = inner

    def _answer(self, name: str, args: Any, kwargs: Any) -> Any:
        written = tensors(args[0]) if args and name != "barrier" else []
        given = tensors(args[1]) if len(args) > 1 else []
        dataless = any(t.is_meta or isinstance(t, Hole) for t in (*written, *given))
        if self._inner is not None and not dataless:
            return getattr(self._inner, name)(*args, **kwargs)
        for index, tensor in enumerate(written):
            source = given[index % len(given)] if given else tensor
            tensor.copy_(source if source.shape == tensor.shape else tensor.zero_())
        return _Ended(written)


class _Ended:
    """A piece of work that has ended already."""

    def __init__(self, result: list[Tensor]) -> None:
        self._result = result

    def wait(self, *_: Any, **__: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def result(self) -> list[Tensor]:
        return self._result


def _method(name: str) -> Callable[..., Any]:
    def answer(self: LocalGroup, *args: Any, **kwargs: Any) -> Any:
        return self._answer(name, args, kwargs)

    return answer


for _name in _ANSWERED.split():
    setattr(LocalGroup, _name, _method(_name))


def _enter(group: dist.ProcessGroup | None) -> bool:
    """Enters a local group into torch's tables, where questions about backends look."""
    world = distributed_c10d._world
    if not isinstance(group, LocalGroup) or group in world.pg_map:
        return False
    world.pg_map[group] = (dist.Backend.GLOO, None)  # type: ignore[assignment]
    world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    return True


def _take_out(group: dist.ProcessGroup | None) -> None:
    assert group is not None
    distributed_c10d._world.pg_map.pop(group, None)
    distributed_c10d._world.pg_group_ranks.pop(group, None)


class default_group:  # noqa: N801 - read as the function that it could be
    """Inside, it is torch's default group; None leaves what is there.

    Holds for all threads: autograd runs backwards of custom functions in threads of its own. Every
    instruction enters it, so it is no generator, and whoever runs many has entered it before.
    """

    __slots__ = ("_before", "_fresh", "_group")

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._fresh = False
        self._before: dist.ProcessGroup | None = None

    def __enter__(self) -> None:
        group = self._group
        if group is None:
            return
        before = dist.group.WORLD
        if before is None or before is group:
            return
        self._before = before
        self._fresh = _enter(group)
        _set_default(group)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _set_default(self._before)
        if self._fresh:
            _take_out(self._group)


class ShapesFirst:
    """The default group of a replay: answers by shapes until ``open``, then as it was before."""

    def __init__(self) -> None:
        self._before = dist.group.WORLD
        self._inside = ExitStack()

    def begin(self) -> None:
        before = self._before
        if before is not None:
            group = LocalGroup(before.rank(), before.size(), before)
            self._inside.enter_context(default_group(group))

    def open(self) -> None:
        if self._before is not None:
            _set_default(self._before)

    def end(self) -> None:
        self._inside.close()


def shapes_only() -> AbstractContextManager[None]:
    """The default group of a probe: of the same size, and talks to nobody."""
    before = dist.group.WORLD
    return default_group(None if before is None else LocalGroup(before.rank(), before.size()))


def gather(tensor: Tensor, group: dist.ProcessGroup | None, *, sync_grads: bool) -> Tensor:
    """Every member's tensor, ``[size, ...]``; with ``sync_grads`` gradients go back to each."""
    with nullcontext() if sync_grads else torch.no_grad():
        gathered: Tensor = _Gather.apply(tensor.contiguous(), group)  # type: ignore[no-untyped-call]
        return gathered


class _Gather(torch.autograd.Function):
    """As torch.distributed.nn.functional.all_gather, which warns of its own end."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, tensor, group=group)
        return torch.stack(everyone)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        whole = gradient.contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole[dist.get_rank(ctx.group)], None


def is_collective(func: Any) -> bool:
    return getattr(func, "__module__", None) == _C10D


def refuse_own_group(func: Any, kwargs: dict[str, Any]) -> None:
    """Refuses a collective over another group than the default one.

    Raises:
        ModelError: Its members are not known to be the replicas of one pipeline rank.
    """
    group = kwargs.get("group")
    if group is None or group is dist.group.WORLD or isinstance(group, LocalGroup):
        return
    raise ModelError(
        f"{user_line()}: {func.__name__} inside a step goes over a process group of its own. Only "
        "the ranks of one stage get to that line, so others in the group would be waited for for "
        "ever. Leave the group out: inside a step the default group is that of the replicas "
        "(world size dp), or use self.all_gather."
    )


_ADDING = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"})


def refuse_repeated(func: Any, args: Sequence[Any], kwargs: dict[str, Any], *, hook: str) -> None:
    """Refuses a collective of a hook that counts each replica once per stage.

    Raises:
        ModelError: It adds up, or gathers, over all processes.
    """
    name = func.__name__
    if any(isinstance(value, dist.ProcessGroup) for value in (*args, *kwargs.values())):
        return
    if name in _ADDING:
        place = {"reduce": 2, "all_reduce": 1}.get(name, 2)
        op = kwargs.get("op", args[place] if len(args) > place else dist.ReduceOp.SUM)
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT):
            return
    elif "gather" not in name and "all_to_all" not in name:
        return
    raise ModelError(
        f"{user_line()}: {hook} calls torch.distributed.{name} over all {dist.get_world_size()} "
        "processes, of which those of one pipeline have the same data: each replica would count "
        "once per stage. Use self.log(..., sync_dist=True), self.all_gather or "
        "self.trainer.strategy.reduce, which go over the replicas, or give a group."
    )


def _set_default(group: dist.ProcessGroup | None) -> None:
    dist.group.WORLD = group  # a property of the metaclass, with a setter
