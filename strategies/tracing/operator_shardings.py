"""How an operation without weights of its own may run on values that are cut: DTensor's knowledge.

Asked of torch's own sharding propagation (``torch.distributed.tensor``): for given states of the
inputs, what state the output has, and whether an input would have to be moved first. What would
move, or leave a sum to be added up, is no choice: between layers nothing is sent. It is asked on a
mesh without any process group.

Own rules only where that table has none, or where what counts is which numbers lie beside each
other: views and splits of a dimension that is several parts side by side, a CPU's attention
kernels, and the two steps of a cross-entropy on scores that are cut.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._decompositions import DecompShardingStrategy
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema

from strategies.models.tensor_parallel import share_operations  # noqa: F401 -- registers its rules
from strategies.models.tensor_parallel.value_segments import segments_after_view
from strategies.planner.shardings.operators import WHOLE, Choice, Message

aten: Any = torch.ops.aten

_MOST_COMBINATIONS = 64
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}
_SQUEEZES = {
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default, aten.squeeze.dims,
}  # fmt: skip
# Of queries, keys and values [batch, heads, tokens, width]; more outputs, one number per query.
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
}
_LOSSES = {aten.nll_loss_forward.default: -1, aten.nll_loss2d_forward.default: 1}
_STATE = re.compile(r"([SV])(\d+)(?::(\d+))?")


class Cut(NamedTuple):
    """A state that is not whole: its dimension, and how many parts lie side by side there."""

    dim: int
    parts: int = 1
    scores: bool = False

    def __str__(self) -> str:
        if self.scores:
            return f"V{self.dim}"
        return f"S{self.dim}" + (f":{self.parts}" if self.parts > 1 else "")


def read_state(state: str) -> Cut | None:
    """None for a whole value."""
    found = _STATE.fullmatch(state)
    if found is None:
        return None
    return Cut(int(found[2]), int(found[3] or 1), found[1] == "V")


class Shardings:
    """Answers for one number of ranks; equal questions once."""

    def __init__(self, tp: int) -> None:
        self.tp = tp
        # Neither a backend nor a group: placements are all that is asked about.
        self._mesh = DeviceMesh("cpu", torch.arange(tp), _init_backend=False, _rank=0)
        dispatcher: Any = DTensor._op_dispatcher
        self._table: Any = dispatcher.sharding_propagator
        self._known: dict[Hashable, tuple[str, ...] | None] = {}

    def knows(self, func: Any) -> bool:
        """Whether there is a rule for an operation, or operations with rules that it is made of."""
        return self.has_rule(func) or bool(DecompShardingStrategy.has_decomp(func))

    def has_rule(self, func: Any) -> bool:
        table = self._table
        return (
            func in _VIEWS | _SPLITS | _SQUEEZES | _ATTENTION
            or func in _LOSSES
            or func in table.op_strategy_funcs
            or func in table.op_to_rules
            or func in table.op_single_dim_strategy_funcs
        )

    def choices(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        free: Sequence[tuple[Tensor, Sequence[str]]],
        outputs: Sequence[Tensor],
        fixed: Callable[[Tensor], bool],
    ) -> tuple[Choice, ...]:
        """All ways to run an operation that send nothing (but a loss its few numbers).

        Args:
            func: An overload of torch's.
            args: Its arguments.
            kwargs: Likewise.
            free: Those of its inputs that may be cut, and the states they may have.
            outputs: Its results, of which some may be inputs (written in place).
            fixed: Whether an input gets gradients that no layer would add up.
        """
        whole = Choice((WHOLE,) * len(free), (WHOLE,) * len(outputs))
        found = [whole]
        lists = [tuple(states) for _, states in free]
        if not self.knows(func) or math.prod(map(len, lists)) > _MOST_COMBINATIONS:
            return (whole,)
        for states in product(*lists):
            cuts = [read_state(state) for state in states]
            if not any(cuts):
                continue
            lone = (t for (t, _), cut in zip(free, cuts, strict=True) if cut is None)
            if any(fixed(tensor) for tensor in lone):
                continue
            made = self._outcome(func, args, kwargs, free, cuts, outputs)
            if made is None:
                continue
            messages = self._messages(func, free, cuts)
            found.append(Choice(states, made, work=1 / self.tp, messages=messages))
        return tuple(found)

    def _outcome(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        free: Sequence[tuple[Tensor, Sequence[str]]],
        cuts: Sequence[Cut | None],
        outputs: Sequence[Tensor],
    ) -> tuple[str, ...] | None:
        """States of the outputs; None where something would be sent."""
        held = {id(tensor): cut for (tensor, _), cut in zip(free, cuts, strict=True)}
        kinds = {(cut.parts, cut.scores) for cut in cuts if cut is not None}
        if len(kinds) > 1:
            return None
        ((parts, scores),) = kinds
        first = args[0] if args else None
        cut = held.get(id(first)) if isinstance(first, Tensor) else None
        if isinstance(first, Tensor) and cut is not None:
            if func in _VIEWS or func in _SQUEEZES:
                return self._view(first, cut, outputs[0])
            if func in _LOSSES:
                dim = _LOSSES[func] % first.dim()
                return (WHOLE,) * len(outputs) if scores and cut.dim == dim else None
            if scores and func is aten._log_softmax.default and args[1] % first.dim() == cut.dim:
                return (str(cut),)
            if func in _SPLITS:
                dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % first.dim()
                if dim == cut.dim:
                    return _split(first, cut, outputs)
        if func in _ATTENTION:
            return self._attention(held, args, kwargs, outputs)
        answer = self._asked(func, args, kwargs, held)
        if answer is None or len(answer) != len(outputs):
            return None
        states = []
        for state, output in zip(answer, outputs, strict=True):
            made = read_state(state)
            if made is None:
                states.append(WHOLE)
                continue
            made = Cut(made.dim, parts, scores)
            if made.dim >= output.dim():  # It has lost a dimension in place.
                return None
            if not scores and output.shape[made.dim] % (parts * self.tp):
                return None
            states.append(str(made))
        return tuple(states)

    def _view(self, whole: Tensor, cut: Cut, output: Tensor) -> tuple[str, ...] | None:
        """The cut of the same numbers in another shape, where a rank's share is one of it, too."""
        if cut.scores:
            before, size = math.prod(whole.shape[: cut.dim]), whole.shape[cut.dim]
            for dim, other in enumerate(output.shape):
                if other == size and math.prod(output.shape[:dim]) == before:
                    return (str(Cut(dim, scores=True)),)
            return None
        found = segments_after_view(whole.shape, cut.dim, cut.parts, self.tp, output.shape)
        return None if found is None else (str(Cut(*found)),)

    def _attention(
        self,
        held: dict[int, Cut | None],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        outputs: Sequence[Tensor],
    ) -> tuple[str, ...] | None:
        cuts = {held.get(id(tensor)) for tensor in args[:3]}
        if len(cuts) != 1 or (cut := cuts.pop()) is None or cut.dim not in (0, 1) or cut.parts > 1:
            return None
        mask = kwargs.get("attn_mask")
        if mask is not None and mask.dim() == args[0].dim() and mask.shape[cut.dim] > 1:
            return None  # One mask per head, of which a rank would need its own.
        return tuple(
            str(cut) if output.dim() > cut.dim and output.shape[cut.dim] else WHOLE
            for output in outputs
        )

    def _asked(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], held: dict[int, Cut | None]
    ) -> tuple[str, ...] | None:
        def spec(value: Any) -> Any:
            if isinstance(value, Tensor):
                cut = held.get(id(value))
                placement = Replicate() if cut is None else Shard(cut.dim)
                meta = TensorMeta(value.shape, value.stride(), value.dtype)
                return DTensorSpec(self._mesh, (placement,), meta)
            if isinstance(value, list | tuple):
                return type(value)(map(spec, value))
            return value

        given = tuple(map(spec, args))
        named = {key: spec(value) for key, value in kwargs.items()}
        key = (func, _described(given), _described(tuple(sorted(named.items()))))
        if key not in self._known:
            self._known[key] = self._ask(func, given, named)
        return self._known[key]

    def _ask(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[str, ...] | None:
        table = self._table
        info = table.op_to_schema_info.get(func)
        if info is None:
            info = table.op_to_schema_info_for_single_dim_strategy.get(func)
        try:
            schema = OpSchema(func, args, kwargs, schema_info=info)
            answer = table.propagate_op_sharding_non_cached(schema)
        except Exception:  # Whatever it cannot do is not a choice.
            return None
        if answer.redistribute_schema is not None:
            wanted = [s.placements for s in _specs(answer.redistribute_schema.args_schema)]
            have = [s.placements for s in _specs(args)]
            if wanted != have:
                return None
        made = answer.output_spec
        states = []
        for spec in made if isinstance(made, list | tuple) else (made,):
            if not isinstance(spec, DTensorSpec):
                continue
            (placement,) = spec.placements
            if type(placement) is Shard:
                states.append(str(Cut(placement.dim)))
            elif isinstance(placement, Replicate):
                states.append(WHOLE)
            else:
                return None
        return tuple(states)

    def _messages(
        self,
        func: Any,
        free: Sequence[tuple[Tensor, Sequence[str]]],
        cuts: Sequence[Cut | None],
    ) -> tuple[Message, ...]:
        """A loss on cut scores: maxima and sums of exponentials, then the target's score."""
        cut = cuts[0]
        if cut is None or not cut.scores:
            return ()
        scores = free[0][0]
        size = float(scores.numel() // scores.shape[cut.dim])
        if func is aten._log_softmax.default:
            return (Message("sum", size), Message("sum", size))
        return (Message("sum", size),) if func in _LOSSES else ()


def _split(whole: Tensor, cut: Cut, outputs: Sequence[Tensor]) -> tuple[str, ...] | None:
    """Of a dimension that is several parts side by side, into groups of such parts."""
    sizes = {output.shape[cut.dim] for output in outputs}
    part, rest = divmod(whole.shape[cut.dim], cut.parts)
    if len(sizes) != 1 or rest or (size := sizes.pop()) % part:
        return None
    return (str(Cut(cut.dim, size // part)),) * len(outputs)


def _specs(value: Any) -> Iterator[DTensorSpec]:
    if isinstance(value, DTensorSpec):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _specs(item)


def _described(value: Any) -> Hashable:
    if isinstance(value, DTensorSpec):
        meta = value.tensor_meta
        assert meta is not None
        return (value.placements, tuple(meta.shape), tuple(meta.stride), meta.dtype)
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return repr(value)
