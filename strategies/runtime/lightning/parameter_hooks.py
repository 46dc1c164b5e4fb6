"""People's hooks see the uncut module: weights, gradients and optimizers of all pipeline ranks.

A momentum teacher, hand clipping, a logged norm of gradients or weights, an average of weights: all
go through ``parameters()``, which on a cut module has this rank's only. Which hooks do is found
out while they run. Overridden hooks run watched; at the first touch of a parameter (listed, copied,
or in an operation) all ranks bring theirs, the holes' places are filled, and the hook goes on as in
one process: on every rank alike. Behind it each rank keeps what is its own. A hook that touches
nothing costs nothing.

The hooks are the same code on all ranks, so all touch at the same place. Where that is not so (a
``rank_zero_only`` function reads weights) it is known from the hook's code or from its first call,
at whose end ranks wait for each other; all calls of such a hook end like that.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.errors import ModelError
from strategies.models.collectives import is_collective, refuse_repeated
from strategies.models.replay.hole import Hole, is_question
from strategies.models.replay.path import ParameterTable
from strategies.runtime.lightning.hook_watch import (
    Watch,
    differs_by_rank,
    hooks_of,
    label_of,
    leaves_of,
    listings_watched,
    mapped,
)
from strategies.runtime.lightning.last_words import is_lost
from strategies.runtime.lightning.refusals import is_weight_averaging
from strategies.runtime.messages.control import Bulletin
from strategies.runtime.step.rank_engine import Engine

# Here gradients of the step before are gone already, which are there under stock Lightning.
_CLEARED = ("on_before_zero_grad", "optimizer_zero_grad")
_PATIENCE_S = 300.0
_WEIGHTS, _GRADIENTS, _END = "weights", "gradients", "end"


class ParameterHooks:
    """Brings the whole model to this rank while a hook looks at it.

    Args:
        engine: Of a module whose parameters are known everywhere by name (``StageModel.table``).
        reduced: Whether gradients behind this pass are those of all replicas.
        changed: Called when a hook has ended that had the whole model.
        settle: Called before weights or gradients are brought; what is under way may end there.
    """

    def __init__(
        self,
        engine: Engine,
        module: pl.LightningModule,
        *,
        reduced: Callable[[], bool],
        changed: Callable[[], None],
        settle: Callable[[], None],
    ) -> None:
        table = engine.model.table
        assert table is not None
        self._engine = engine
        self._module = module
        self._table: ParameterTable = table
        self._reduced = reduced
        self._changed = changed
        self._settle = settle
        self._where = engine.coordinates
        self._patience_s = min(_PATIENCE_S, engine.options.timeout_s)
        engine.create_hook_groups(timeout_s=self._patience_s)
        self._group = self._group_of("hooks")
        self._bulletin = Bulletin(self._group, self._where.pp)
        first = engine.model.first_stages()
        self._owners = {
            name: engine.placement.owners(first[name])[0] for name in engine.model.parameter_names
        }
        self._buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
        self._optimizers: list[_Groups] = []
        self._wrapped: list[tuple[Any, str, Any]] = []  # with what was there before, if anything
        self._settled: set[tuple[int, str]] = set()  # hooks that have run
        self._uneven: set[tuple[int, str]] = set()  # of those, what not all ranks have touched
        self._told: set[str] = set()
        self._call: tuple[tuple[int, str], str] | None = None  # the hook that runs, and its name
        self._watching = False
        self._look()
        self._here = False  # whether the holes' places are filled
        self._has_gradients = False

    # ---------------------------------------------------------------- which hooks

    def watch(self, trainer: pl.Trainer) -> None:
        """Runs the overridden hooks of module and callbacks watched, until ``unwatch``."""
        self.unwatch()
        self._look()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        owners = (*callbacks, self._module)
        hooks = [(owner, name) for owner in owners for name in hooks_of(owner)]
        self._bulletin.post([label_of(owner, name) for owner, name in hooks])
        said = self._bulletin.read()
        for owner, name in hooks:
            # Hooks of a callback that only some ranks have are left alone.
            if all(label_of(owner, name) in one for one in said):
                before = vars(owner).get(name)
                self._wrapped.append((owner, name, before))
                if differs_by_rank(owner, name):
                    self._uneven.add((id(owner), name))
                vars(owner)[name] = _watched_hook(self, owner, name)
        for callback in filter(is_weight_averaging, callbacks):
            self._wrapped.append((callback, "on_load_checkpoint", None))
            vars(callback)["on_load_checkpoint"] = _no_averages

    def unwatch(self) -> None:
        for owner, name, before in self._wrapped:
            if before is None:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before
        self._wrapped.clear()

    @contextmanager
    def whole_groups(self, optimizers: Callable[[], Sequence[Optimizer]]) -> Iterator[None]:
        """Around ``configure_optimizers``: it sees the whole model, and each rank keeps its part.

        Foreign parameters have their shapes there and no values.
        """
        with self._table.listed():
            yield
            made = list(optimizers())
            self._optimizers = [_Groups(optimizer, self._is_foreign) for optimizer in made]

    def run(self, owner: Any, name: str, function: Callable[[], Any]) -> Any:
        """Runs a hook watched."""
        if self._call is not None:
            return function()  # One hook calls another.
        key = (id(owner), name)
        self._call = (key, label_of(owner, name))
        try:
            with ExitStack() as stack:
                stack.callback(self._leave)
                for groups in self._optimizers:
                    groups.show()
                self._watching = True
                self._look_at_buffers()
                stack.enter_context(listings_watched(self._on_listing))
                stack.enter_context(Watch(self._on_operation))
                result = function()
                self._watching = False
                if key not in self._settled or key in self._uneven:
                    self._exchange(_END)
                    self._settled.add(key)
            return result
        finally:
            self._watching = False
            self._call = None

    @contextmanager
    def away(self) -> Iterator[None]:
        """Inside, the module is cut, although a hook is running: the pipeline's own work."""
        if self._call is None:
            yield
            return
        call, self._call = self._call, None
        watching = self._watching
        self._leave()
        try:
            yield
        finally:
            for groups in self._optimizers:
                groups.show()
            self._call, self._watching = call, watching

    # ---------------------------------------------------------------- touches

    def _on_operation(self, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """An operation in a watched hook: brings what it needs; gives the arguments to use."""
        if self._watching and self._call is not None and is_collective(func):
            refuse_repeated(func, args, kwargs, hook=self._call[1])
        if not self._watching or not any(map(self._counts, leaves_of((args, kwargs)))):
            return args, kwargs
        if not is_question(func):
            property_of = getattr(func, "__self__", None)
            gradient = getattr(property_of, "__name__", "") == "grad"
            self._bring(_GRADIENTS if gradient else _WEIGHTS)
        return mapped(args, self._present), mapped(kwargs, self._present)

    def _on_listing(self, module: nn.Module) -> None:
        if self._watching and id(module) in self._modules:
            self._bring(_WEIGHTS)

    def _counts(self, leaf: Any) -> bool:
        if isinstance(leaf, Hole):
            return leaf.parameter is not None
        return id(leaf) in self._parameters or id(leaf) in self._buffer_ids

    def _present(self, leaf: Any) -> Any:
        """What stands for another rank's parameter: itself where it is here now, or its hole."""
        if not self._here:
            name = self._foreign.get(id(leaf))
            return leaf if name is None else self._table.find(name)
        named = isinstance(leaf, Hole) and leaf.parameter is not None
        return self._table.original(leaf.parameter) if named else leaf

    def _look(self) -> None:
        """Notes which objects count as the module's."""
        self._foreign = {id(self._table.original(name)): name for name in self._table.freed}
        own = {id(parameter) for parameter in self._engine.named_parameters().values()}
        self._parameters = own | self._foreign.keys()
        modules = list(self._module.modules())
        self._modules = {id(module) for module in modules}
        self._tables = [module._buffers for module in modules]
        self._look_at_buffers()

    def _look_at_buffers(self) -> None:
        """The same of buffers, which others may take the place of at any time."""
        self._buffer_ids = {id(b) for table in self._tables for b in table.values()} - {id(None)}

    def _is_foreign(self, parameter: Tensor) -> bool:
        return id(parameter) in self._foreign

    # ---------------------------------------------------------------- bringing

    def _bring(self, wanted: str) -> None:
        assert self._call is not None
        if wanted == _GRADIENTS:
            self._check_gradients(self._call[1])
        there = self._has_gradients if wanted == _GRADIENTS else self._here
        if not there:
            self._watching = False
            with self.away():
                self._settle()
            self._exchange(wanted)
            self._watching = True

    def _check_gradients(self, label: str) -> None:
        name = label.rpartition(".")[2]
        if name in _CLEARED:
            raise ModelError(
                f"{label} looks at gradients, which the pipeline has cleared by then. Look at them "
                "in on_before_optimizer_step or on_train_batch_end."
            )
        if not self._reduced():
            raise ModelError(
                f"{label} looks at gradients while batches are accumulated: they are each "
                f"replica's own until the last of them (dp={self._where.dp}). Use "
                "on_before_optimizer_step."
            )
        if self._engine.mains:
            why = "overlap=zero1" if self._engine.mains.sharded else "16-bit weights"
            raise ModelError(
                f"{label} looks at gradients, which with {why} are the optimizer's alone. Use "
                "Trainer(gradient_clip_val=...) to clip, strategy.gradient_norm() for the norm, "
                "or overlap=grad_reduce and 32-bit weights."
            )

    @torch.inference_mode(False)
    @torch.no_grad()
    def _exchange(self, kind: str) -> None:
        """Tells the other ranks what this one has come to, and brings what any of them asks for.

        Raises:
            ModelError: The others have come to something else.
        """
        assert self._call is not None
        key, label = self._call
        loose = key not in self._settled or key in self._uneven
        while True:
            own = {"hook": label, "kind": kind, **self._contribution()}
            self._bulletin.post(own)
            try:
                said = self._bulletin.read()
            except RuntimeError as error:
                if is_lost(error):
                    raise
                raise self._apart(label, f"nothing for {self._patience_s:.0f} s") from error
            kinds = {one["kind"] for one in said}
            others = {one["hook"] for one in said} - {label}
            if others or (len(kinds) > 1 and not loose):
                raise self._apart(label, ", ".join(sorted(others or kinds - {kind})))
            if len(kinds) > 1:
                self._uneven.add(key)
            if kinds - {_END} and not self._here:
                self._bring_weights(said, label)
            if _GRADIENTS in kinds and not self._has_gradients:
                self._bring_gradients(said)
            if kind != _END or kinds == {_END}:
                return

    def _apart(self, label: str, met: str) -> ModelError:
        return ModelError(
            f"{label} looked at parameters or gradients on pipeline rank {self._where.pp_rank}, "
            f"and another rank of the pipeline came to: {met}. Hooks must look at them on all "
            "ranks in the same calls; where only one rank is to use what it sees, let all ranks "
            "look and one rank write."
        )

    def _contribution(self) -> dict[str, Any]:
        """What the other ranks need to know to receive this rank's part."""
        now = dict(self._module.named_buffers())
        changed = {
            name: list(buffer.shape)
            for name, buffer in now.items()
            if not _same(buffer, self._buffers.get(name))
        }
        graded = [
            name
            for name, parameter in self._engine.named_parameters().items()
            if parameter.grad is not None and self._owners[name] == self._where.pp_rank
        ]
        return {"buffers": changed, "gradients": graded}

    def _bring_weights(self, said: Sequence[Mapping[str, Any]], label: str) -> None:
        self._engine.complete()
        wanted = {
            name: (owner, self._table.spec(name).shape, self._table.spec(name).dtype)
            for name, owner in self._owners.items()
        }
        own = self._engine.named_parameters()
        values = self._spread(wanted, {name: p.detach() for name, p in own.items()})
        size = sum(self._table.spec(name).num_bytes for name in wanted)
        self._bring_buffers(said)
        self._bring_generators()
        self._table.fill(values)
        self._here = True
        self._look_at_buffers()
        if label not in self._told:
            self._told.add(label)
            rank_zero_info(
                f"{label} looks at parameters: the whole model ({size / 2**20:.1f} MiB) is brought "
                "to every pipeline rank in each call that does."
            )

    def _bring_buffers(self, said: Sequence[Mapping[str, Any]]) -> None:
        """Each buffer as the rank has it that has changed it last; of several the last stage's."""
        last = self._engine.placement.owners(self._engine.placement.num_stages - 1)[0]
        ranks = [rank for rank in range(self._where.pp) if rank != last] + [last]
        found = {
            name: (rank, tuple(shape), dict(self._module.named_buffers())[name].dtype)
            for rank in ranks
            for name, shape in said[rank]["buffers"].items()
        }
        now = dict(self._module.named_buffers())
        for name, value in self._spread(found, now).items():
            if now[name].shape == value.shape:
                now[name].copy_(value)
            else:
                now[name].data = value

    def _bring_generators(self) -> None:
        """Draws in the hook are the same everywhere."""
        if self._group is not None:
            state = torch.default_generator.get_state()
            first = self._where.global_rank(0, self._where.dp_rank)
            dist.broadcast(state, src=first, group=self._group)
            torch.default_generator.set_state(state)

    def _bring_gradients(self, said: Sequence[Mapping[str, Any]]) -> None:
        wanted = {
            name: (rank, self._table.spec(name).shape, self._table.spec(name).dtype)
            for rank, one in enumerate(said)
            for name in one["gradients"]
        }
        own = {n: p.grad for n, p in self._engine.named_parameters().items() if p.grad is not None}
        for name, gradient in self._spread(wanted, own).items():
            if name in self._table.freed:
                self._table.original(name).grad = gradient
        self._has_gradients = True

    def _spread(
        self,
        wanted: Mapping[str, tuple[int, tuple[int, ...], torch.dtype]],
        own: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Tensors of other ranks, by owner, shape and type; collective over the pipeline."""
        packs: dict[tuple[int, torch.dtype], list[str]] = {}
        for name, (owner, _, dtype) in wanted.items():
            packs.setdefault((owner, dtype), []).append(name)
        fast = self._engine.options.backend == "nccl"
        device = self._engine.device if fast else torch.device("cpu")
        group = self._group_of("whole") if fast else self._group
        found: dict[str, Tensor] = {}
        for (owner, dtype), names in packs.items():
            sizes = [torch.Size(wanted[name][1]).numel() for name in names]
            if owner == self._where.pp_rank:
                flat = torch.cat([own[name].detach().reshape(-1) for name in names]).to(device)
            else:
                flat = torch.empty(sum(sizes), dtype=dtype, device=device)
            source = self._where.global_rank(owner, self._where.dp_rank)
            if group is not None and flat.numel():
                dist.broadcast(flat.view(torch.uint8), src=source, group=group)
            if owner != self._where.pp_rank:
                parts = torch.split(flat.to(self._engine.device), sizes)
                for name, part in zip(names, parts, strict=True):
                    found[name] = part.view(wanted[name][1])
        return found

    def _group_of(self, purpose: str) -> dist.ProcessGroup | None:
        return self._engine.communicators.get(purpose, self._where.replica(self._where.dp_rank))

    # ---------------------------------------------------------------- the end of it

    @torch.inference_mode(False)
    @torch.no_grad()
    def _leave(self) -> None:
        """Each rank keeps what is its own of what the hook has done."""
        self._watching = False
        here, self._here = self._here, False
        gradients, self._has_gradients = self._has_gradients, False
        for groups in self._optimizers:
            groups.hide(self._is_foreign)
        if not here:
            return
        frozen = self._table.take_out()
        self._buffers = {n: b.detach().clone() for n, b in self._module.named_buffers()}
        self._engine.adopt(gradients=gradients)
        if frozen or self._engine.trained != self._engine.trained_now():
            self._engine.follow_freezing()
        self._changed()


class _Groups:
    """An optimizer whose groups can have the parameters of all ranks."""

    def __init__(self, optimizer: Optimizer, foreign: Callable[[Tensor], bool]) -> None:
        self.optimizer = optimizer
        self._whole: list[list[nn.Parameter]] = [list(g["params"]) for g in optimizer.param_groups]
        self._own: list[list[nn.Parameter]] = []
        self._sizes: list[int] = []
        self._shown = True
        self.hide(foreign)

    def show(self) -> None:
        if not self._shown:
            self._shown = True
            self._own = [group["params"] for group in self.optimizer.param_groups]
            self._whole += map(list, self._own[len(self._whole) :])  # added outside of hooks
            for group, whole in zip(self.optimizer.param_groups, self._whole, strict=True):
                group["params"] = whole
            self._sizes = [len(whole) for whole in self._whole]

    def hide(self, foreign: Callable[[Tensor], bool]) -> None:
        """Leaves each group its own parameters; a hook may have added groups."""
        if not self._shown:
            return
        self._shown = False
        groups = self.optimizer.param_groups
        for index, group in enumerate(groups):
            whole = group["params"]
            known = index < len(self._own) and whole is self._whole[index]
            if known and len(whole) == self._sizes[index]:
                group["params"] = self._own[index]
            else:
                group["params"] = [p for p in whole if not foreign(p)]
                self._whole[index:] = [list(whole), *self._whole[index + 1 :]]
        for parameter in [p for p in self.optimizer.state if foreign(p)]:
            del self.optimizer.state[parameter]


def _watched_hook(hooks: ParameterHooks, owner: Any, name: str) -> Callable[..., Any]:
    hook = getattr(owner, name)
    known = weakref.ref(hooks)  # The module must not keep the engine alive.

    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        there = known()
        if there is None:
            return hook(*args, **kwargs)
        return there.run(owner, name, lambda: hook(*args, **kwargs))

    return run


def _no_averages(trainer: Any, module: Any, checkpoint: Mapping[str, Any]) -> None:
    if "averaging_state" in checkpoint:
        raise ModelError(
            "this checkpoint has the averages of WeightAveraging, which are not put together again "
            f"for the {trainer.strategy.plan.pp} ranks of a pipeline. Go on without that callback, "
            "from the averages; or begin anew."
        )


def _same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one, other)
