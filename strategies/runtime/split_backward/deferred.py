"""A heavy node's weight gradients, from the plan until they are computed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from strategies.runtime.split_backward.graph import Node
from strategies.runtime.split_backward.path import Path, takes_gradients_directly
from strategies.runtime.split_backward.rule import Rule, Saved
from strategies.runtime.split_backward.saved import is_plain, read_saved

_TURNED = ("TBackward0", "TransposeBackward0")


@dataclass(frozen=True, slots=True)
class WeightEdge:
    """Where a deferred gradient goes.

    Attributes:
        position: Among the heavy node's edges.
        child: The node there. Never the heavy one, whose descendants are the rest of the graph.
        number: Which of the child's gradients.
        path: To the parameter, where it is short.
        leaves: Id -> parameter, for all that lie below.
    """

    position: int
    child: Node
    number: int
    path: Path | None
    leaves: dict[int, Tensor]


@dataclass(slots=True)
class Deferred:
    """A heavy node whose weight gradients wait.

    Attributes:
        node: None once the engine has passed it.
        rule: How the gradients are computed.
        edges: To the weights, and to the bias.
        anchored: Whether any other edge leads on, so that the engine comes by on its own.
        saved: What the gradients need; None until a checkpoint has computed it again.
        incoming: The gradient of the node's output, from the engine.
    """

    node: Node
    rule: Rule
    edges: tuple[WeightEdge, ...]
    anchored: bool
    saved: Saved | None = None
    incoming: Tensor | None = None
    _versions: tuple[int, ...] = ()

    def read(self) -> None:
        """Takes the saved values."""
        edges = self.edges
        self.saved = read_saved(
            self.node,
            self.rule,
            [edge.position for edge in edges],
            shapes={e.position: e.child._input_metadata[e.number].shape for e in edges},
            transposed=frozenset(e.position for e in edges if type(e.child).__name__ in _TURNED),
        )

    def catch(self, incoming: Tensor) -> None:
        """Keeps the gradient that has arrived; nobody may change it or the saved tensors now."""
        self.incoming = incoming
        self._versions = tuple(tensor._version for tensor in self._needed())

    def operands(self) -> tuple[Saved, Tensor]:
        """What the gradients are computed from.

        Raises:
            RuntimeError: Something has changed it in place.
        """
        assert self.saved is not None
        assert self.incoming is not None
        versions = tuple(tensor._version for tensor in self._needed())
        if versions != self._versions:
            names = ["the incoming gradient", *self.saved.tensors]
            pairs = zip(names, self._versions, versions, strict=True)
            changed = ", ".join(name for name, before, now in pairs if before != now)
            raise RuntimeError(
                f"a weight gradient of {self.rule.node} needs a tensor that was changed in place "
                f"after the input gradients had been computed ({changed}): buffers of a microbatch "
                "must be left alone until its W has run"
            )
        return self.saved, self.incoming

    def _needed(self) -> tuple[Tensor, ...]:
        assert self.saved is not None
        assert self.incoming is not None
        return (self.incoming, *self.saved.tensors.values())

    def is_direct(self) -> bool:
        """Whether the gradients can be added to their parameters without the engine."""
        return all(
            edge.path is not None and edge.path.plain and takes_gradients_directly(edge.path.leaf)
            for edge in self.edges
        ) and all(is_plain(tensor) for tensor in self._needed())
