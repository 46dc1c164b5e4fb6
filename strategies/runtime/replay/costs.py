"""Cost of what runs under it, from shapes: floating point operations, else elements written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from strategies.runtime.replay.structure import tensors


class CostCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up cost; also notices whether random numbers were drawn.

    Attributes:
        cost: FLOPs of matrix products, convolutions and attention, plus one per element that
            any other operation writes.
        random: Set by every operation that draws random numbers; reset by whoever reads it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cost = 0.0
        self.random = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", None)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.random = True
        if packet in flop_registry:
            self.cost += flop_registry[packet](*args, **kwargs, out_val=result)
        elif args and not getattr(func, "is_view", False) and packet is not torch.ops.aten.empty:
            self.cost += sum(tensor.numel() for tensor in tensors(result))
        return result
