"""What people's own functions touch, seen while they run: their hooks, and ``backward``."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LambdaCallback, StochasticWeightAveraging
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from strategies.errors import ModelError, one_line
from strategies.models.nested import replaced
from strategies.models.replay.hole import Hole
from strategies.models.snapshot import restoring
from strategies.runtime.lightning.refusals import is_weight_averaging
from strategies.runtime.messages.mesh import Coordinates

_log = logging.getLogger(__name__)
_BESIDE = {
    "on_exception", "on_gpu", "on_before_batch_transfer", "on_after_batch_transfer",
}  # fmt: skip
# In the code of hooks: what may be done on some ranks alone.
_RANK_WORDS = {"is_global_zero", "global_rank", "local_rank", "node_rank", "get_rank", "LOCAL_RANK"}
_MORE = ("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad")


class Watch(TorchFunctionMode):
    """Tells of every torch operation, which may then run with other arguments."""

    def __init__(self, told: Callable[[Callable[..., Any], Any, Any], tuple[Any, Any]]) -> None:
        super().__init__()
        self._told = told

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._told(func, args, kwargs or {})
        if _writes_view(func, args):
            # A gradient here is a part of a buffer, which torch lets nobody write that it follows.
            with torch.no_grad():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


_WRITING = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"}


def _writes_view(func: Callable[..., Any], args: Any) -> bool:
    """Whether an operation changes a part of a larger tensor that needs no gradient."""
    name = getattr(func, "__name__", "")
    if not args or not (name in _WRITING or (name.endswith("_") and not name.endswith("__"))):
        return False
    written = args[0] if isinstance(args[0], list | tuple) else [args[0]]
    with torch._C.DisableTorchFunctionSubclass():
        return any(
            isinstance(each, Tensor)
            and not isinstance(each, Hole)
            and each._is_view()
            and not each.requires_grad
            for each in written
        )


def is_clearing() -> bool:
    """Whether torch's ``zero_grad`` is at work, which looks at gradients only to forget them."""
    frame = sys._getframe(1)
    for _ in range(12):
        code = frame.f_code
        if code.co_name == "zero_grad" and frame.f_globals.get("__name__", "").startswith("torch."):
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


@contextmanager
def listings_watched(
    touched: Callable[[nn.Module], None],
    refuse_new: Callable[[nn.Module, Any], None] = lambda *_: None,
    called: Callable[[nn.Module], None] | None = None,
) -> Iterator[None]:
    """Tells of every module that is asked for its parameters or copied, before it answers.

    Of one that gets a parameter, too, as pruning gives it one in place of another, and of one that
    is ``called``.
    """
    ways = [
        "_named_members", "state_dict", "load_state_dict", "_apply", "__reduce_ex__",
        "register_parameter",
    ]  # fmt: skip
    ways += [] if called is None else ["__call__"]
    before = {name: vars(nn.Module).get(name) for name in ways}

    def watched(name: str) -> Callable[..., Any]:
        way = getattr(nn.Module, name)

        @functools.wraps(way)
        def ask(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            (called if name == "__call__" and called else touched)(self)
            if name == "register_parameter":
                refuse_new(self, args)
            return way(self, *args, **kwargs)

        return ask

    for name in ways:
        setattr(nn.Module, name, watched(name))
    try:
        yield
    finally:
        for name, way in before.items():
            if way is None:
                delattr(nn.Module, name)
            else:
                setattr(nn.Module, name, way)


class Listings:
    """Names each hook once that lists the parameters of a module of which ranks have some units.

    Only such a list comes here: from places of units that are elsewhere. A hook that treats each
    parameter by itself is right with those of its rank, so this warns and refuses nothing.
    """

    def __init__(self, module: str, where: Coordinates) -> None:
        self._module, self._where = module, where
        self._told: set[str] = set()

    def __call__(self, here: str) -> None:
        """``here``: what this rank has."""
        label, every = _looking_hook()
        first = self._where.dp_rank == 0 and not (every and self._where.pp_rank)
        if label is None or label in self._told or not first:
            return
        self._told.add(label)
        _log.warning(
            f"{label} lists parameters of {self._module}, whose stages lie on {self._where.pp} "
            f"ranks, and sees those of its own rank: {here}. What it computes of all of them (a "
            "norm, an average, a copy) is that rank's part. Use "
            "trainer.strategy.full_state_dict(everywhere=True) there, on all ranks, or pp=1. If it "
            "treats each parameter by itself, set reads_weights = False on its class."
        )


_OF_EACH = {"_apply", "requires_grad_", "zero_grad"}  # what torch does to each parameter


def _looking_hook() -> tuple[str | None, bool]:
    """The user's function whose list of parameters this is, and whether all ranks run it.

    None for Lightning's own lists and ours.
    """
    frame = sys._getframe(4)  # where the places ask
    own = step = None
    while frame.f_back is not None:
        frame = frame.f_back
        name = str(frame.f_globals.get("__name__", ""))
        library = name.partition(".")[0]
        if library in ("torch", "copy"):
            if own is None and frame.f_code.co_name in _OF_EACH:
                break
        elif library not in _LIBRARIES:
            own = frame.f_code.co_qualname
            step = own if isinstance(frame.f_locals.get("self"), pl.LightningModule) else step
        elif name != "lightning.pytorch.trainer.call":
            return step, False
        else:
            given = frame.f_locals
            owner = given.get("callback", given.get("pl_module"))
            hook = given.get("hook_name", frame.f_code.co_name.removeprefix("_call_callbacks_"))
            reads = getattr(owner, "reads_weights", True) and hook not in _SETS_UP
            return label_of(owner, hook) if reads else None, True
    return None, False


_LIBRARIES = ("lightning", "strategies", "launcher")
_SETS_UP = ("configure_model", "configure_optimizers")


def hooks_of(owner: Any) -> list[str]:
    """Hooks that somebody has written; Lightning's own callbacks look at no weights but these."""
    parent = pl.LightningModule if isinstance(owner, pl.LightningModule) else pl.Callback
    kind = type(owner)
    lookers = (BaseFinetuning, StochasticWeightAveraging, LambdaCallback)
    averaging = is_weight_averaging(owner)
    if (
        not isinstance(owner, lookers)
        and not averaging
        and not getattr(owner, "reads_weights", True)
    ):
        return []
    names = [name for name in dir(parent) if name.startswith("on_") and name not in _BESIDE]
    if parent is pl.LightningModule:
        names += _MORE
    looking = isinstance(owner, lookers) or averaging
    return [
        name
        for name in names
        if is_overridden(name, owner, parent)
        and (looking or name in vars(owner) or not _is_known(kind, name))
    ]


def label_of(owner: Any, name: str) -> str:
    return f"{type(owner).__name__}.{name}"


def _is_known(kind: type, name: str) -> bool:
    """Whether a hook is Lightning's or this project's."""
    definer = next(base for base in kind.__mro__ if name in vars(base))
    return definer.__module__.split(".")[0] in _LIBRARIES


def differs_by_rank(owner: Any, name: str) -> bool:
    """Whether a hook, or a function that it calls by name, asks which rank it is on."""
    todo: list[Any] = [getattr(owner, name)]
    seen: set[CodeType] = set()
    while todo:
        function = todo.pop()
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        library = str(getattr(function, "__module__", "")).split(".")[0] in ("torch", "lightning")
        if code is None or code in seen or library:
            continue
        seen.add(code)
        words = set(_words(code))
        if words & _RANK_WORDS or code.co_filename.endswith("rank_zero.py"):
            return True
        known = function.__globals__
        todo += [getattr(type(owner), w, None) or known.get(w) for w in words]
    return False


def _words(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _words(part)


def leaves_of(value: Any, depth: int = 3) -> Iterator[Any]:
    if isinstance(value, list | tuple) and depth:
        for item in value:
            yield from leaves_of(item, depth - 1)
    elif isinstance(value, dict) and depth:
        for item in value.values():
            yield from leaves_of(item, depth - 1)
    elif isinstance(value, Tensor):
        yield value


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(mapped(item, leaf) for item in value)
    if type(value) is dict:
        return {key: mapped(item, leaf) for key, item in value.items()}
    return leaf(value)


# ---------------------------------------------------------------------------------- own backward
# The backwards of a pass have run, microbatch by microbatch, before Lightning asks for one. What an
# overridden ``backward(loss)`` makes of the loss is found out with a number in its place, whose
# gradient is the factor on all gradients of the pass. It is asked before the pass, and nothing of
# that remains; behind the pass it is called with the loss itself.

_LOSSES = (1e-3, 1.0, 1e3)


class OwnBackward:
    """An overridden ``LightningModule.backward``.

    Raises:
        ModelError: It does more than to scale the loss; from its making and all methods.
    """

    def __init__(self, module: pl.LightningModule, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._factor = 1.0
        self.factor()

    def factor(self) -> float:
        """What the next pass's gradients are multiplied by."""
        found = [self._tried(value) for value in _LOSSES]
        if not all(_close(one, found[0]) for one in found):
            raise self._refusal(
                "is not linear in the loss, whose value is known only when the backwards have run"
            )
        self._factor = found[0]
        return self._factor

    def call(self, loss: Tensor) -> None:
        """Runs it in its place, behind the pass, with the loss."""
        found = self._run(loss.detach().requires_grad_())
        if not _close(found, self._factor):
            raise self._refusal(
                f"scales the loss by {found}, and by {self._factor} when it was asked before"
            )

    def _tried(self, value: float) -> float:
        loss = torch.full((), value, dtype=torch.float64, device=self._device)
        own = self._module.__dict__
        silent = [(own, name, lambda *_, **__: None) for name in ("log", "log_dict", "print")]
        with restoring(self._module), replaced(silent):
            try:
                return self._run(loss.requires_grad_())
            except ModelError:
                raise
            except Exception as error:
                raise self._refusal(
                    f"cannot run on a number in place of the loss ({one_line(error)})"
                ) from error

    def _run(self, loss: Tensor) -> float:
        known: list[Tensor] = [loss]
        parameters = {id(p) for p in self._module.parameters()}

        def look(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
            for leaf in leaves_of((args, kwargs)):
                foreign = isinstance(leaf, Hole) or id(leaf) in parameters
                if foreign or (leaf.requires_grad and not self._derived(leaf, known)):
                    raise self._refusal("uses tensors with gradients beside the loss")
            return args, kwargs

        def listed(module: nn.Module) -> None:
            if any(module is own for own in self._module.modules()):
                raise self._refusal("looks at the module's parameters")

        with torch.enable_grad(), listings_watched(listed), Watch(look):
            self._module.backward(loss)
        if loss.grad is None:
            raise self._refusal("runs no backward of the loss")
        return float(loss.grad)

    def _derived(self, leaf: Tensor, known: list[Tensor]) -> bool:
        """Whether a tensor was made from the loss alone."""
        with torch._C.DisableTorchFunctionSubclass():
            todo, seen = [leaf.grad_fn], set()
            if leaf.grad_fn is None:
                return leaf is known[0]
            while todo:
                node = todo.pop()
                if node is None or node in seen:
                    continue
                seen.add(node)
                variable = getattr(node, "variable", None)
                if variable is not None and variable is not known[0]:
                    return False
                todo += [following for following, _ in node.next_functions]
        return True

    def _refusal(self, what: str) -> ModelError:
        return ModelError(
            f"{type(self._module).__name__}.backward() {what}. A pipeline runs the backwards of "
            "all microbatches inside training_step and takes from an overridden backward the "
            "factor on the loss alone, as in (loss * 2).backward(). Return the scaled loss from "
            "training_step, change gradients in on_after_backward, or use "
            "Trainer(strategy='auto')."
        )


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
