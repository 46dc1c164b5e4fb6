"""One run of a step on fake tensors that notes every operation, and torch's own layers as one each.

A module that looks at values cannot run so: it runs once on made-up ones, and is noted as one call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
from strategies.planner.shardings.operators import ENTERED, WHOLE, Choice, Message
from strategies.sharding_plan import LayerKind
from strategies.tracing.figures import MOST_MADE_UP, own_weights, stand_ins
from strategies.tracing.operator_shardings import Cut, read_state

# --------------------------------------------------------------------------------------------------
# How torch's own layers may be cut: by outputs, by inputs, by the ids or channels they are for.

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_KINDS: tuple[tuple[tuple[type[nn.Module], ...], LayerKind], ...] = (
    ((nn.Linear,), "linear"),
    ((*_CONVOLUTIONS, *_TRANSPOSED), "conv"),
    ((nn.Embedding, nn.EmbeddingBag), "embedding"),
    ((*_BATCH_NORMS, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm), "norm"),
)
_SEGMENTS = (2, 3)


def layer_kind(layer: nn.Module) -> LayerKind | None:
    """What a layer is; None for one that is not known, whose operations are looked at instead."""
    # A weight that is computed (weight_norm) is no share of anything that could be cut.
    plain = isinstance(layer._parameters.get("weight"), nn.Parameter)
    for kinds, name in _KINDS:
        for kind in kinds if plain or name == "norm" else ():
            if isinstance(layer, kind) and type(layer).forward is kind.forward:
                return name
    # The projection of transformers' GPT-2: a Linear whose weight stands the other way round.
    if type(layer).__name__ == "Conv1D" and hasattr(layer, "nf") and hasattr(layer, "nx"):
        return "linear"
    return None


class LayerCall(NamedTuple):
    """A call of a layer: its input and output, the states that the input may have."""

    layer: nn.Module
    kind: LayerKind
    given: Tensor
    states: Sequence[str]
    made: Tensor
    free: bool  # Whether its input may be cut at all; ids may not.
    tp: int
    scores: bool  # Whether a loss takes its outputs where they are cut.


def layer_choices(call: LayerCall) -> tuple[Choice, ...]:
    """All choices that its sizes allow, the uncut one first."""
    finders = {"linear": _linear, "conv": _conv, "embedding": _embedding, "norm": _norm}
    found = [Choice((WHOLE,), (WHOLE,), "replicated"), *finders[call.kind](call)]
    possible = (*call.states, ENTERED, WHOLE)
    unique = dict.fromkeys(
        choice if call.free else replace(choice, inputs=())
        for choice in found
        if all(state in possible for state in choice.inputs)
    )
    return tuple(unique)


def products(call: LayerCall) -> tuple[int, int, int, int]:
    """(rows, columns, inner, batch) of a layer's matrix product; zeros where it has none."""
    layer: Any = call.layer
    if call.kind == "linear":
        inner = call.given.shape[-1]
        return call.given.numel() // inner, call.made.shape[-1], inner, 1
    if call.kind == "conv":
        transposed = isinstance(layer, _TRANSPOSED)
        ends = call.given if transposed else call.made
        places = ends.numel() // (layer.in_channels if transposed else layer.out_channels)
        kernel = 1
        for size in layer.kernel_size:
            kernel *= size
        inner = layer.in_channels // layer.groups * kernel
        return places, layer.out_channels // layer.groups, inner, layer.groups
    return 0, 0, 0, 0


def _linear(call: LayerCall) -> Iterator[Choice]:
    outputs, inputs = call.made.shape[-1], call.given.shape[-1]
    flipped = not isinstance(call.layer, nn.Linear)
    dims = (1, 0) if flipped else (0, 1)
    yield from _by_column(call, outputs, call.made.dim() - 1, dims[0])
    if call.scores:
        share = -(-outputs // call.tp) / outputs
        yield Choice(
            (_entered(call),), (str(Cut(call.made.dim() - 1, scores=True)),), "vocabulary",
            share, share, split_dim=dims[0], whole_output=False,
        )  # fmt: skip
    yield from _by_row(call, inputs, call.given.dim() - 1, dims[1])
    yield from _alongside(call, call.given.dim() - 1)


def _conv(call: LayerCall) -> Iterator[Choice]:
    layer: Any = call.layer
    if call.given.dim() != len(layer.kernel_size) + 2 or layer.padding_mode != "zeros":
        return
    flipped = isinstance(layer, _TRANSPOSED)
    if layer.groups == 1:
        yield from _by_column(call, layer.out_channels, 1, int(flipped))
        yield from _by_row(call, layer.in_channels, 1, 1 - int(flipped))
    elif layer.groups % call.tp == 0:
        yield from _channels(call, layer.out_channels // layer.groups)


def _embedding(call: LayerCall) -> Iterator[Choice]:
    layer: Any = call.layer
    if layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq or call.free:
        return
    size = _size(call.made)
    share = -(-layer.num_embeddings // call.tp) / layer.num_embeddings
    if isinstance(layer, nn.Embedding):  # Bags are cut by width alone.
        yield Choice((), (WHOLE,), "vocabulary", 1.0, share, (Message("sum", size),), split_dim=0)
    width = layer.embedding_dim
    if width % call.tp:
        return
    part = 1 / call.tp
    yield Choice(
        (), (str(Cut(call.made.dim() - 1)),), "column", part, part, split_dim=1,
        whole_output=False,
    )  # fmt: skip
    yield Choice((), (WHOLE,), "column", part, part, (Message("gather", size),), split_dim=1)


def _norm(call: LayerCall) -> Iterator[Choice]:
    layer: Any = call.layer
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        yield from _alongside(call, call.given.dim() - len(layer.normalized_shape))
        return
    if isinstance(layer, nn.GroupNorm):
        if layer.num_groups % call.tp:
            return
        yield from _channels(call, layer.num_channels // layer.num_groups)
    elif layer.num_features % call.tp == 0:
        yield from _channels(call, 1)


def _by_column(call: LayerCall, count: int, dim: int, split_dim: int) -> Iterator[Choice]:
    """Outputs are cut: left so, or gathered."""
    if count % call.tp:
        return
    part, entered = 1 / call.tp, _entered(call)
    for segments in (1, *_SEGMENTS) if call.kind == "linear" else (1,):
        if count % (segments * call.tp) == 0:
            yield Choice(
                (entered,), (str(Cut(dim, segments)),), "column", part, part,
                split_dim=split_dim, segments=segments, whole_output=False,
            )  # fmt: skip
    gathered = (Message("gather", _size(call.made)),)
    yield Choice((entered,), (WHOLE,), "column", part, part, gathered, split_dim=split_dim)


def _by_row(call: LayerCall, count: int, dim: int, split_dim: int) -> Iterator[Choice]:
    """Inputs are cut already, or each rank takes its share of them; outputs are summed."""
    if count % call.tp:
        return
    part, summed = 1 / call.tp, Message("sum", _size(call.made))
    yield Choice(
        (str(Cut(dim)),), (WHOLE,), "row", part, part, (summed,), split_dim=split_dim,
        whole_input=False,
    )  # fmt: skip
    back = Message("gather", _size(call.given), backward=True)
    messages = (summed, back) if call.given.requires_grad else (summed,)
    yield Choice((WHOLE,), (WHOLE,), "row", part, part, messages, split_dim=split_dim)


def _alongside(call: LayerCall, last: int) -> Iterator[Choice]:
    """Whole weights on a share of what they are applied to, over and over."""
    own = sum(_size(parameter) for parameter in call.layer.parameters())
    added = (Message("sum", own, backward=True, once=True),)
    for state in call.states:
        cut = read_state(state)
        if cut is not None and cut.dim < last and not cut.scores:
            yield Choice(
                (state,), (state,), "replicated", 1 / call.tp, 1.0, added,
                whole_input=False, whole_output=False, partial=True,
            )  # fmt: skip


def _channels(call: LayerCall, block: int) -> Iterator[Choice]:
    """Each rank has some of the channels, of weights as of inputs."""
    state, part = str(Cut(1)), 1 / call.tp
    yield Choice(
        (state,), (state,), "column", part, part, split_dim=0, block=block, whole_input=False,
        whole_output=False,
    )  # fmt: skip


def _entered(call: LayerCall) -> str:
    return ENTERED if call.given.requires_grad else WHOLE


def _size(tensor: Tensor) -> float:
    return float(tensor.numel())


# --------------------------------------------------------------------------------------------------
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
            with _disable_current_modes(), torch.no_grad(), replaced(stand_ins(child, real)):
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


def _untraceable(module: nn.Module, name: str, error: Exception) -> ModelError:
    reason = " ".join(str(error).split())[:200]
    where = name or type(module).__name__
    return ModelError(
        f"{where} cannot be looked at for tensor parallelism ({type(error).__name__}: {reason}). "
        "Its operators are found by a run on shapes alone.",
        fix=(
            "Keep values out of Python code (no item(), nonzero() or if on a tensor's content), "
            "declare tensor_parallel_plan(), or use tp=1."
        ),
    )
