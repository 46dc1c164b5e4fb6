"""One run of a step on fake tensors that notes every operation, and torch's own layers as one each.

A module that looks at values cannot run so: it runs once on made-up ones, and is noted as one call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from strategies.errors import ModelError
from strategies.models.flops import FlopCount
from strategies.models.logs import captured_logs
from strategies.models.nested import leaves, rebuild, replaced, tensors
from strategies.models.replay.gate import as_written, call_step, has_compiled
from strategies.models.unit_model import HasUnits
from strategies.tracing.figures import MOST_MADE_UP, own_weights
from strategies.tracing.layer_shardings import layer_kind


@dataclass(slots=True)
class OperatorCall:
    """A call of a layer or an operation, as the run has made it."""

    module: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[Tensor]
    layer: nn.Module | None = None
    flops: float = 0.0
    opaque: bool = False

    @property
    def given(self) -> list[Tensor]:
        """Tensors among the arguments, each once."""
        found = (leaf for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor))
        return list({id(tensor): tensor for tensor in found}.values())


class OperatorRun(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The run, and what it has seen."""

    def __init__(self, module: nn.Module, boundaries: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[OperatorCall] = []
        self.results: list[Tensor] = []
        self.names: dict[int, str] = {}  # of parameters, by the stand-in's id
        self._module = module
        self._boundaries = set(boundaries)
        self._stack: list[str] = [""]
        self._inside = 0
        self._failed = ""

    def __call__(self, batch: Any, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        own: list[Tensor] = []
        with (
            torch.enable_grad(),
            torch.random.fork_rng(devices=[]),
            fake,
            replaced(own_weights(self._module, fake, own)),
            replaced(self._watched()),
            autocast(),
            captured_logs(self._module),
            as_written() if has_compiled() else nullcontext(),
        ):
            for name, parameter in self._module.named_parameters():
                self.names[id(parameter)] = name
            given = rebuild(batch, lambda x: fake.from_tensor(x) if isinstance(x, Tensor) else x)
            try:
                with self:
                    self.results += tensors(self._step(given))
            except Exception as error:
                raise _untraceable(self._module, self._failed, error) from error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        count = FlopCount()
        with count:
            made = func(*args, **kwargs)
        results = tensors(made)
        if results:
            event = OperatorCall(self._stack[-1], func, args, kwargs, results, flops=count.flops)
            self.events.append(event)
        return made

    def _step(self, batch: Any) -> Any:
        module = self._module
        if isinstance(module, HasUnits):
            values: Any = module.pipeline_inputs(batch)
            for _, unit in module.pipeline_units():
                self.results += tensors(values)  # A stage may begin here.
                made = unit(*values)
                values = made if isinstance(made, tuple) else (made,)
            return module.pipeline_result(values, batch, 0, "train")
        if isinstance(module, LightningModule):
            return call_step(module, "train", batch, 0)
        step: Any = getattr(module, "training_step", None)
        return step(batch, 0) if callable(step) else module(batch)

    def _watched(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        for name, child in self._module.named_modules():
            if name:
                yield child.__dict__, "forward", self._wrapped(name, child, child.forward)

    def _wrapped(self, name: str, child: nn.Module, forward: Callable[..., Any]) -> Any:
        known = layer_kind(child) is not None

        def watched(*args: Any, **kwargs: Any) -> Any:
            whole, before = not self._inside, len(self.events)
            self._stack.append(name)
            self._inside += known
            try:
                made = forward(*args, **kwargs)
            except Exception as error:
                self._failed = self._failed or name
                if not whole:
                    raise
                count = FlopCount()
                made = self._by_values(child, forward, args, kwargs, error, count)
                self._failed = ""
                event = OperatorCall(
                    name, None, args, kwargs, tensors(made), child, count.flops, opaque=True
                )
                self.events[before:] = [event]
                return made
            finally:
                self._inside -= known
                self._stack.pop()
            if known and whole:
                given = (*args, *kwargs.values())[:1]
                self.events.append(OperatorCall(name, None, given, {}, tensors(made), child))
            if name in self._boundaries:
                self.results += tensors(made)
            return made

        return watched

    def _by_values(
        self,
        child: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        error: Exception,
        count: FlopCount,
    ) -> Any:
        """What a module makes that looks at values: it runs once on made-up ones.

        Raises:
            Exception: What it has raised on shapes, if it does not run so, either.
        """
        fakes = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fakes += [*child.parameters(), *child.buffers()]
        if sum(t.numel() * t.element_size() for t in fakes) > MOST_MADE_UP:
            raise error
        known: dict[int, Tensor] = {}

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in known:
                made = torch.zeros(leaf.shape, dtype=leaf.dtype)
                known[id(leaf)] = made.normal_(std=0.1) if leaf.is_floating_point() else made
            return known[id(leaf)]

        self._inside += 1
        try:
            with _disable_current_modes(), torch.no_grad(), replaced(_real_weights(child, real)):
                given, named = rebuild((args, kwargs), real)
                with count:
                    made = forward(*given, **named)
        except Exception:
            raise error from None
        finally:
            self._inside -= 1

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            grows = leaf.is_floating_point()
            return torch.empty(leaf.shape, dtype=leaf.dtype, requires_grad=grows)

        return rebuild(made, fake)


def _real_weights(
    module: nn.Module, real: Callable[[Tensor], Tensor]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for child in module.modules():
        tables: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
        for table in tables:
            for name, value in list(table.items()):
                if isinstance(value, Tensor):
                    yield table, name, real(value)


def _untraceable(module: nn.Module, name: str, error: Exception) -> ModelError:
    reason = " ".join(str(error).split())[:200]
    where = name or type(module).__name__
    return ModelError(
        f"{where} cannot be looked at for tensor parallelism ({type(error).__name__}: {reason}). "
        "Its operators are found by a run on shapes alone. Keep values out of Python code (no "
        "item(), nonzero() or if on a tensor's content), declare tensor_parallel_plan(), or use "
        "tp=1."
    )
