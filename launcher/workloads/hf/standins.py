"""What takes the place of modules that a stage does not have, inside transformers' own forward.

A stage never repeats what the library does between layers (masks, positions, scalings): it runs the
library's forward with these in the places of layers and weights, and looks at what comes by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Call:
    """How the forward called one layer.

    Attributes:
        hidden: The residual stream that it was given.
        positional: Whether that was the first argument, or ``hidden_states=``.
        args: All further positional arguments.
        kwargs: All keyword arguments but ``hidden_states``.
    """

    hidden: Tensor
    positional: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """The layer's output for another residual stream and the same arguments."""
        if self.positional:
            output = layer(hidden, *self.args, **self.kwargs)
        else:
            output = layer(*self.args, hidden_states=hidden, **self.kwargs)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def tensors(self) -> list[tuple[str, Tensor]]:
        """All tensors but the residual stream, with a name for messages."""
        found: list[tuple[str, Tensor]] = []
        numbered = ((f"argument {i + 1}", value) for i, value in enumerate(self.args))
        for name, value in (*numbered, *self.kwargs.items()):
            for entry in value if isinstance(value, tuple | list) else (value,):
                if isinstance(entry, Tensor):
                    found.append((name, entry))
        return found


class LayerStandIn(nn.Module):
    """Stands for a decoder layer: remembers how it was called and hands its input on.

    Args:
        original: Its plain attributes are copied: some forwards ask a layer for its kind.
        returns_tuple: Whether the layer's callers expect a tuple.
    """

    def __init__(self, original: nn.Module, *, returns_tuple: bool) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if isinstance(value, str | int | float) and name not in vars(self):
                setattr(self, name, value)
        self._returns_tuple = returns_tuple
        self.call: Call | None = None
        self.answer: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The answer that was put in, else the residual stream as it came."""
        positional = "hidden_states" not in kwargs
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        hidden = args[0] if positional else kwargs["hidden_states"]
        self.call = Call(hidden, positional, args[1:] if positional else args, rest)
        answer = hidden if self.answer is None else self.answer
        return (answer, None) if self._returns_tuple else answer


class WeightStandIn(nn.Module):
    """Stands for an embedding, norm or projection: the right shape, and no weights.

    Args:
        width: Of the residual stream.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width
        self.dtype = torch.float32

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Vectors as they are; zeros of ``dtype`` for ids and positions, once per element."""
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if given and given[0].is_floating_point() and given[0].dim() >= 3:
            return given[0]
        ids = bool(given) and given[0].dtype in (torch.int32, torch.int64)
        zero = torch.zeros((), dtype=self.dtype, device=given[0].device if given else None)
        return zero.expand(*given[0].shape, self._width) if ids else zero
