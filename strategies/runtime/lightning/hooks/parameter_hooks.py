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
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.errors import ModelError
from strategies.models.collectives import is_collective, refuse_repeated
from strategies.models.held_units import Elsewhere
from strategies.models.replay.hole import Hole, is_question, operation_name
from strategies.runtime.lightning.hooks.hook_watch import (
    Watch,
    differs_by_rank,
    hooks_of,
    is_clearing,
    label_of,
    leaves_of,
    listings_watched,
    mapped,
)
from strategies.runtime.lightning.hooks.shown_groups import Groups
from strategies.runtime.lightning.hooks.whole_parameters import (
    END,
    GRADIENTS,
    WEIGHTS,
    WholeParameters,
)
from strategies.runtime.lightning.refusals import is_weight_averaging

# Here gradients of the step before are gone already, which are there under stock Lightning.
_CLEARED = ("on_before_zero_grad", "optimizer_zero_grad")


# Where optimizers are made: what asks a parameter for its shape, and what takes no values of it.
_SHAPES = frozenset(
    ["shape", "size", "ndim", "dim", "ndimension", "numel", "nelement", "nbytes", "__len__"]
)
_NO_VALUES = frozenset(
    ["requires_grad_", "grad", "data_ptr", "register_hook", "register_post_accumulate_grad_hook"]
)


class ParameterHooks(WholeParameters):
    """Watches hooks, and brings the whole model to this rank when one of them looks at it."""

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
            own = vars(callback)
            own["on_load_checkpoint"] = _averages_of_files(callback.on_load_checkpoint)

    def unwatch(self) -> None:
        for owner, name, before in self._wrapped:
            if before is None:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before
        self._wrapped.clear()

    def state(self) -> dict[str, Any] | None:
        """The whole module's state, copied, where a hook is running; None elsewhere."""
        if self._call is None or not self._watching:
            return None
        found: dict[str, Any] = self._module.state_dict()  # Being listed, it is brought here.
        return {n: v.detach().clone() if isinstance(v, Tensor) else v for n, v in found.items()}

    @contextmanager
    def whole_groups(self, optimizers: Callable[[], Sequence[Optimizer]]) -> Iterator[None]:
        """Around ``configure_optimizers``: it sees the whole model, and each rank keeps its part.

        Foreign parameters have their shapes there and no values; shares have the shapes of wholes.

        Raises:
            ModelError: It computes with a share.
        """
        with nullcontext() if self._table is None else self._table.listed():
            with Watch(self._on_setup) if self._shares.ids else nullcontext():
                yield
            made = list(optimizers())
            self._look_at_gradient_hooks()
            self._optimizers = [
                Groups(optimizer, self._is_foreign, self._is_parted) for optimizer in made
            ]

    def group_names(self) -> list[list[list[str]]]:
        """Per optimizer and group the names of its parameters on all ranks, in order.

        [] where a rank knows its own stages alone.
        """
        if self._table is None and self._where.pp > 1:
            return []
        names = {id(p): name for name, p in self._engine.named_parameters().items()}
        names |= self._foreign
        return [
            [[names.get(id(p), "") for p in group] for group in groups.whole]
            for groups in self._optimizers
        ]

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
                called = self._on_call if self._sharing else None
                stack.enter_context(listings_watched(self._on_listing, self._refuse_new, called))
                stack.enter_context(Watch(self._on_operation))
                result = function()
                self._watching = False
                if key not in self._settled or key in self._uneven:
                    self._exchange(END)
                    self._settled.add(key)
            return result
        finally:
            self._watching = False
            self._call = None

    # ---------------------------------------------------------------- touches

    def _on_operation(self, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """An operation in a watched hook: brings what it needs; gives the arguments to use."""
        if self._watching and self._call is not None and is_collective(func):
            refuse_repeated(func, args, kwargs, hook=self._call[1])
        if not self._watching or not any(map(self._counts, leaves_of((args, kwargs)))):
            return args, kwargs
        # The one thing that an optimizer asks of what add_param_group() is given.
        if not is_question(func) or operation_name(func) == "is_leaf":
            property_of = getattr(func, "__self__", None)
            gradient = getattr(property_of, "__name__", "") == "grad"
            if gradient and is_clearing():
                return mapped(args, self._present), mapped(kwargs, self._present)
            self._bring(GRADIENTS if gradient else WEIGHTS)
        elif operation_name(func) in _SHAPES and not self._here:
            args, kwargs = (mapped(each, self._shares.by_shape) for each in (args, kwargs))
        return mapped(args, self._present), mapped(kwargs, self._present)

    def _on_setup(self, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """An operation in ``configure_optimizers``; those of optimizers are on shares."""
        shares = [leaf for leaf in leaves_of((args, kwargs)) if id(leaf) in self._shares.ids]
        name = operation_name(func)
        if not shares or _in_optimizer():
            return args, kwargs
        if name in _SHAPES:
            return mapped(args, self._shares.by_shape), mapped(kwargs, self._shares.by_shape)
        if not is_question(func) and name not in _NO_VALUES:
            raise self._shares.refusal(
                shares[0], f"configure_optimizers() computes with ({name})", "on_fit_start"
            )
        return args, kwargs

    def _on_listing(self, module: nn.Module) -> None:
        if self._watching and any(id(child) in self._modules for child in module.modules()):
            self._refuse_units(module)
            self._bring(WEIGHTS)

    def _refuse_units(self, module: nn.Module) -> None:
        """Refuses a list that lacks parameters: units of other stages are on no other rank."""
        if self._table is not None or self._call is None or is_clearing():
            return
        if any(isinstance(child, Elsewhere) for child in module.modules()):
            own = self._engine.named_parameters()
            names = (name for name in self._engine.model.parameter_names if name not in own)
            raise ModelError(
                f"{self._call[1]} lists the parameters of {type(module).__name__}, which declares "
                f"pipeline_units(): a rank has those of its own stages, and {next(names)} is "
                "elsewhere. Use pp=1, where ranks that share weights (tp, ep) bring all of them."
            )

    def _on_call(self, module: nn.Module) -> None:
        # Before its forward begins, which is another one where weights are whole.
        if self._watching and id(module) in self._sharing:
            self._bring(WEIGHTS)

    def _refuse_new(self, module: nn.Module, given: Any) -> None:
        if self._watching and self._call is not None and id(module) in self._modules:
            place = next(name for name, child in self._module.named_modules() if child is module)
            raise ModelError(
                f"{self._call[1]} gives {place or type(module).__name__} the parameter {given[0]} "
                "during training, as pruning does. Stages and optimizers hold the parameters that "
                "were there at the start: do it before fit(), or change values in place (mul_ by a "
                "mask)."
            )

    def _counts(self, leaf: Any) -> bool:
        if isinstance(leaf, Hole):
            return leaf.parameter is not None
        return id(leaf) in self._parameters or id(leaf) in self._buffer_ids

    def _present(self, leaf: Any) -> Any:
        """What stands for another rank's parameter: itself where it is here now, or its hole."""
        if not self._here:
            name = self._foreign.get(id(leaf))
            return leaf if name is None or self._table is None else self._table.find(name)
        if isinstance(leaf, Hole) and leaf.parameter is not None and self._table is not None:
            return self._table.original(leaf.parameter)
        return leaf

    # ---------------------------------------------------------------- bringing

    def _bring(self, wanted: str) -> None:
        assert self._call is not None
        if wanted == GRADIENTS:
            self._check_gradients(self._call[1])
        there = self._has_gradients if wanted == GRADIENTS else self._here
        if not there:
            label = self._call[1]
            self._watching = False
            if wanted == GRADIENTS and label.endswith(".optimizer_step"):
                with self.away():
                    self._engine.flush()  # It may have run the closure by itself.
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

    # ---------------------------------------------------------------- the end of it


def _in_optimizer() -> bool:
    """Whether an optimizer's own method is at work."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "configure_optimizers":
        if isinstance(frame.f_locals.get("self"), Optimizer):
            return True
        frame = frame.f_back
    return False


def _watched_hook(hooks: ParameterHooks, owner: Any, name: str) -> Callable[..., Any]:
    hook = getattr(owner, name)

    def aside(there: ParameterHooks, value: Any) -> Any:
        if not callable(value) or isinstance(value, Optimizer) or hasattr(value, "param_groups"):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            with there.away():
                return value(*args, **kwargs)

        return call

    known = weakref.ref(hooks)  # The module must not keep the engine alive.

    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        there = known()
        if there is None:
            return hook(*args, **kwargs)
        if name == "optimizer_step":  # The closure is the pipeline's pass, whoever calls it.
            args = tuple(aside(there, value) for value in args)
            kwargs = {key: aside(there, value) for key, value in kwargs.items()}
        return there.run(owner, name, lambda: hook(*args, **kwargs))

    return run


def _averages_of_files(load: Callable[..., Any]) -> Callable[..., Any]:
    def run(trainer: Any, module: Any, checkpoint: Mapping[str, Any]) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and "averaging_state" in checkpoint and not trainer.strategy.from_file:
            raise ModelError(
                "this checkpoint is a folder with the averages of WeightAveraging, of which each "
                "rank has written its part, and they are not put together again. Go on without "
                "that callback, from the averages, or start again with "
                "PipelineStrategy(checkpoints='file')."
            )
        load(trainer, module, checkpoint)

    return run
