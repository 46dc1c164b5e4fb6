"""One call of a layer or an operation, run on fake tensors: FLOPs, and what autograd keeps.

Layers whose Python code looks at values cannot run on fakes; they run once on made-up ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.errors import ModelError
from strategies.models.contents import KeptObjects
from strategies.models.expert_parallel import ExpertRanks, HasExperts
from strategies.models.expert_parallel.expert_ranks import Compute, Sent
from strategies.models.expert_parallel.expert_shares import named_expert_layers
from strategies.models.flops import FlopCount
from strategies.models.nested import rebuild, replaced, tensors
from strategies.models.replay.hole import Args, Function, Kwargs, Spec
from strategies.models.selective.lineage import family_of, makes_new
from strategies.models.selective.policy import Selection
from strategies.models.selective.region import measured
from strategies.tracing.equal_calls import Slot, described, structure

MOST_MADE_UP = 2_000_000_000  # bytes


@dataclass(frozen=True, slots=True)
class Kept:
    """A storage that the call keeps for its backward.

    Attributes:
        origin: ``input`` or ``output`` of the call, or ``own``.
        index: Which of them.
    """

    origin: str
    index: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What one call takes.

    Attributes:
        input_flops: Of its backward, for the gradients of its inputs.
        weight_flops: For those of its parameters.
        kept: What autograd keeps; parameters, buffers and the batch do not count.
        outputs: The tensors of its result.
        unknown: Operations without a formula.
        again: With ``recompute=selective``; None for an operation between layers, which always
            keeps what it keeps, and for a layer that cannot run so.
        experts: Of the layers inside that ranks can share the experts of.
    """

    forward_flops: float
    input_flops: float
    weight_flops: float
    kept: tuple[Kept, ...]
    outputs: tuple[Spec, ...]
    unknown: tuple[str, ...]
    again: Again | None = None
    experts: tuple[ExpertLayer, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """What a layer's experts take of a call, as they would on the ranks that share them.

    Attributes:
        experts: Of the layer.
        parameters: Of all of them.
        flops: Of a forward.
        saved_bytes: What their computation keeps.
        sent_bytes: Rows that travel to them.
    """

    experts: int
    parameters: int
    flops: float
    saved_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Again:
    """A layer that runs its cheap parts again in its backward.

    Attributes:
        kept: What is kept for that.
        flops: Of products that run again.
        elements: Read and written by all else that does.
    """

    kept: tuple[Kept, ...]
    flops: float
    elements: float


class Tracer:
    """Traces calls; equal ones once. ``autocast`` gives the types in which steps run."""

    def __init__(self, autocast: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._autocast = autocast
        self._known: dict[Hashable, Figures] = {}

    def layer(self, name: str, module: nn.Module, args: Args, kwargs: Kwargs) -> Figures:
        """A call of a module, whose weights may be on the meta device.

        ``name`` is for messages; slots stand for tensors that come from other layers.

        Raises:
            ModelError: It can be run neither on fakes nor on made-up values.
        """
        key = ("layer", structure(module), described((args, kwargs)))
        if key not in self._known:
            self._known[key] = self.operation(name, module, args, kwargs, module)
        return self._known[key]

    def operation(
        self, name: str, func: Function, args: Args, kwargs: Kwargs, module: nn.Module | None = None
    ) -> Figures:
        """A call of a function; ``module`` is one whose parameters it may use by itself."""
        count = FlopCount()
        objects = KeptObjects((args, kwargs))
        try:
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            return self._run(func, args, kwargs, module, count, fake)
        except Exception as error:
            reason, first = " ".join(str(error).split())[:200], count.last
            needed = sum(p.numel() * p.element_size() for p in module.parameters()) if module else 0
            if needed > MOST_MADE_UP:
                raise _untraceable(name, first, error, reason) from error
            objects.restore()
            try:
                return self._run(func, args, kwargs, module, FlopCount(), None)
            except Exception:
                raise _untraceable(name, first, error, reason) from error
        finally:
            objects.restore()

    def _run(
        self,
        func: Function,
        args: Args,
        kwargs: Kwargs,
        module: nn.Module | None,
        count: FlopCount,
        fake: FakeTensorMode | None,
    ) -> Figures:
        made: dict[int, Tensor] = {}
        inputs: list[Tensor] = []
        own: list[Tensor] = []
        # Storages of arguments: a slot's number, or None for what is not counted.
        known: dict[int, tuple[Tensor, int | None]] = {}
        places: dict[Hashable, int] = {}
        with (
            torch.enable_grad(),
            self._autocast(),
            torch.random.fork_rng(devices=[]),
            fake or nullcontext(),
            replaced(own_weights(module, fake, own) if module is not None else ()),
        ):

            def give(leaf: Any) -> Any:
                if isinstance(leaf, Slot):
                    if id(leaf) not in made:
                        tensor = _made(leaf.spec, fake)
                        if leaf.spec.requires_grad:
                            tensor.requires_grad_()
                            (own if leaf.parameter else inputs).append(tensor)
                            if not leaf.parameter:
                                # Written to in place, perhaps: no leaf.
                                tensor = tensor.clone()
                        number = (
                            None if leaf.parameter else places.setdefault(leaf.key, len(places))
                        )
                        known[_storage(tensor)] = (tensor, number)
                        made[id(leaf)] = tensor
                    return made[id(leaf)]
                if isinstance(leaf, Tensor):
                    tensor = leaf if fake is None else fake.from_tensor(leaf)
                    known[_storage(tensor)] = (tensor, None)
                    return tensor
                return leaf

            given, named = rebuild((args, kwargs), give)
            for tensor in own:
                known[_storage(tensor)] = (tensor, None)
            for buffer in module.buffers() if module is not None else ():
                known[_storage(buffer)] = (buffer, None)
            saved: dict[int, Tensor] = {}

            def pack(tensor: Tensor) -> Tensor:
                saved.setdefault(_storage(tensor), tensor)
                return tensor

            with count:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    result = func(*given, **named)
                forward = count.flops
                results = tensors(result)
                roots = [t for t in results if t.requires_grad]
                both, weights = _backward(count, roots, inputs, own)
            outputs = {_storage(t): i for i, t in enumerate(results)}
            kept = [_kept(s, tensor, known, outputs) for s, tensor in saved.items()]
            again = None if module is None else _again(func, given, named, module, known)
            experts = () if module is None else _experts(func, given, named, module)
        return Figures(
            forward,
            both - weights,
            weights,
            tuple(entry for entry in kept if entry is not None),
            # A fake's device is the one it stands for.
            tuple(Spec.of(t, torch.device("cpu")) for t in results),
            tuple(sorted(count.unknown)),
            again,
            experts,
        )


def _again(
    func: Function,
    args: Args,
    kwargs: Kwargs,
    module: nn.Module,
    known: dict[int, tuple[Tensor, int | None]],
) -> Again | None:
    """As a layer does that recomputes selectively: the rank's own two runs, on what is given."""
    count, moved = FlopCount(), _Moved()
    try:
        held, results = measured(func, args, kwargs, module, Selection().default, (count, moved))
    except Exception:
        return None
    outputs = {_storage(t): i for i, t in enumerate(results)}
    found = {_storage(tensor): tensor for tensor in held}
    kept = [_kept(storage, tensor, known, outputs) for storage, tensor in found.items()]
    return Again(tuple(entry for entry in kept if entry is not None), count.flops, moved.elements)


def _experts(
    func: Function, args: Args, kwargs: Kwargs, module: nn.Module
) -> tuple[ExpertLayer, ...]:
    """What ranks that share experts would exchange and compute; () where that cannot be seen."""
    layers = [layer for _, layer in named_expert_layers(module)]
    if not layers:
        return ()
    count, saved = FlopCount(), {_storage(weight): 0 for weight in module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        saved.setdefault(_storage(tensor), tensor.untyped_storage().nbytes())
        return tensor

    seen = [_SeenExperts(layer, count, saved) for layer in layers]
    places = ((vars(ranks.layer), "exchange", ranks) for ranks in seen)
    try:
        with replaced(places), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), count:
            func(*args, **kwargs)
    except Exception:
        return ()
    return tuple(ranks.figures for ranks in seen if ranks.called)


class _SeenExperts(ExpertRanks):
    """Stands where ranks would that share a layer's experts, and sees what goes through."""

    def __init__(self, layer: HasExperts, count: FlopCount, saved: dict[int, int]) -> None:
        super().__init__(None)
        self.layer = layer
        self.called = False
        self._count, self._saved = count, saved
        self._flops, self._kept, self._sent_bytes = 0.0, 0, 0

    @property
    def figures(self) -> ExpertLayer:
        layer = self.layer
        assert isinstance(layer, nn.Module)
        parameters = sum(layer.get_parameter(name).numel() for name in layer.expert_parameters)
        return ExpertLayer(layer.num_experts, parameters, self._flops, self._kept, self._sent_bytes)

    def _sent(self, rows: Tensor, counts: Tensor, share: Any = None) -> Sent:
        self.called = True
        self._sent_bytes += rows.numel() * rows.element_size()
        return Sent(rows, counts, None, share)  # nobody knows yet how many experts have

    def _computed(self, compute: Compute, sent: Sent) -> Tensor:
        flops, kept = self._count.flops, sum(self._saved.values())
        found = super()._computed(compute, sent)
        self._flops += self._count.flops - flops
        self._kept += sum(self._saved.values()) - kept
        return found


class _Moved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Elements that operations read and write which are no products and no views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if makes_new(func) and family_of(func) != "matmul":
            self.elements += sum(t.numel() for t in tensors((args, kwargs, made)))
        return made


def _backward(
    count: FlopCount, roots: list[Tensor], inputs: list[Tensor], own: list[Tensor]
) -> tuple[float, float]:
    """FLOPs of the whole backward, and of those the ones for weights alone."""
    if not roots or not (inputs or own):
        return 0.0, 0.0

    def flops(wanted: list[Tensor]) -> float:
        before = count.flops
        ones = [torch.ones_like(root) for root in roots]
        torch.autograd.grad(roots, wanted, ones, retain_graph=True, allow_unused=True)
        return count.flops - before

    both = flops([*inputs, *own])
    return both, max(0.0, both - (flops(inputs) if inputs else 0.0))


def _kept(
    storage: int,
    tensor: Tensor,
    known: dict[int, tuple[Tensor, int | None]],
    outputs: dict[int, int],
) -> Kept | None:
    size = tensor.untyped_storage().nbytes()
    if storage in known:
        number = known[storage][1]
        return None if number is None else Kept("input", number, size)
    if storage in outputs:
        return Kept("output", outputs[storage], size)
    return Kept("own", 0, size)


def _untraceable(name: str, operation: str, error: Exception, reason: str) -> ModelError:
    return ModelError(
        f"{name}: {operation} cannot be traced ({type(error).__name__}: {reason}). A trace runs "
        "layers on shapes alone.",
        fix=(
            "Keep values out of Python code (no item(), numpy() or if on a tensor's content), or "
            "choose pp= and schedule= by hand with plan=manual."
        ),
    )


def _made(spec: Spec, fake: FakeTensorMode | None) -> Tensor:
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")
    if fake is None:
        with torch.no_grad():
            return tensor.normal_(std=0.1) if spec.dtype.is_floating_point else tensor.zero_()
    return tensor


def own_weights(
    module: nn.Module, fake: FakeTensorMode | None, own: list[Tensor]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Parameters and buffers of a module as fakes, or as made-up values where they have none."""
    known: dict[int, Tensor] = {}

    def stand_in(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            if fake is None and not tensor.is_meta:
                made = tensor.detach().clone()
            else:
                made = _made(Spec.of(tensor.detach()), fake)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
                if tensor.requires_grad:
                    own.append(made)
            known[id(tensor)] = made
        return known[id(tensor)]

    return stand_ins(module, stand_in)


def stand_ins(
    module: nn.Module, stand_in: Callable[[Tensor], Tensor]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Where a module keeps its parameters and buffers, and what stands in for each."""
    for child in module.modules():
        tables: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
        for table in tables:
            for name, value in list(table.items()):
                if isinstance(value, Tensor):
                    yield table, name, stand_in(value)
        if isinstance(child, nn.RNNBase):
            weights = [getattr(child, name) for name in child._flat_weights_names]
            yield child.__dict__, "_flat_weights", weights


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
