"""A heavy node's weight gradients, from the plan until they are computed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from strategies.runtime.split_backward.graph import Graph, Node
from strategies.runtime.split_backward.path import swaps_last, takes_gradients_directly
from strategies.runtime.split_backward.recipe import EdgeRecipe, Unit
from strategies.runtime.split_backward.rule import Saved
from strategies.runtime.split_backward.saved import is_plain, read_saved


class WeightEdge(NamedTuple):
    """Where a deferred gradient goes.

    Attributes:
        recipe: The edge's.
        child: The node there. Never the heavy one, whose descendants are the rest of the graph.
        leaves: The parameters below.
        turned: Whether the operand is the only leaf turned.
        direct: Whether the gradient can be added to that leaf without the engine.
    """

    recipe: EdgeRecipe
    child: Node
    leaves: tuple[Tensor, ...]
    turned: bool
    direct: bool

    @property
    def shape(self) -> torch.Size:
        """Of the gradient."""
        if self.direct and not self.turned:
            return self.leaves[0].shape
        shape: torch.Size = self.child._input_metadata[self.recipe.number].shape
        return shape


class Deferred:
    """A heavy node whose weight gradients wait.

    Attributes:
        node: None once the engine has passed it.
        rule: How the gradients are computed.
        edges: To the weights, and to the bias.
        saved: What the gradients need; None until it has been read.
        incoming: The gradient of the node's output, from the engine.
    """

    __slots__ = ("_names", "_versions", "edges", "incoming", "node", "rule", "saved")

    def __init__(self, unit: Unit, graph: Graph) -> None:
        self.node: Node = graph.nodes[unit.node]
        self.rule = unit.rule
        self._names = unit.names
        self.edges = tuple(_edge(recipe, graph) for recipe in unit.edges)
        self.saved: Saved | None = None
        self.incoming: Tensor | None = None
        self._versions: tuple[int, ...] = ()

    def read(self) -> Saved:
        """Takes the saved values."""
        edges = self.edges
        shaped = self.rule.shaped
        self.saved = read_saved(
            self.node,
            self.rule,
            self._names,
            shapes={e.recipe.position: e.shape for e in edges if e.recipe.position in shaped},
            flipped=[e.recipe.position for e in edges if e.recipe.flipped],
        )
        return self.saved

    def catch(self, incoming: Tensor) -> None:
        """Keeps the gradient that has arrived; nobody may change it or the saved tensors now."""
        saved = self.read() if self.saved is None else self.saved
        self.incoming = incoming
        self._versions = (incoming._version, *[t._version for t in saved.tensors.values()])

    def operands(self) -> tuple[Saved, Tensor]:
        """What the gradients are computed from.

        Raises:
            RuntimeError: Something has changed it in place.
        """
        saved, incoming = self.saved, self.incoming
        assert saved is not None
        assert incoming is not None
        versions = (incoming._version, *[t._version for t in saved.tensors.values()])
        if versions != self._versions:
            names = ["the incoming gradient", *saved.tensors]
            pairs = zip(names, self._versions, versions, strict=True)
            changed = ", ".join(name for name, before, now in pairs if before != now)
            raise RuntimeError(
                f"a weight gradient of {self.rule.node} needs a tensor that was changed in place "
                f"after the input gradients had been computed ({changed}): buffers of a microbatch "
                "must be left alone until its W has run"
            )
        return saved, incoming

    def is_direct(self) -> bool:
        """Whether the gradients can be added to their parameters without the engine."""
        assert self.saved is not None
        assert self.incoming is not None
        return (
            all([edge.direct for edge in self.edges])
            and is_plain(self.incoming)
            and all([is_plain(tensor) for tensor in self.saved.tensors.values()])
        )


def _edge(recipe: EdgeRecipe, graph: Graph) -> WeightEdge:
    leaves = tuple([graph.nodes[number].variable for number in recipe.leaves])
    turned, direct = recipe.turned, recipe.simple
    for number in recipe.turns:
        turned = not turned
        direct = direct and swaps_last(graph.nodes[number])
    return WeightEdge(
        recipe,
        graph.nodes[recipe.child],
        leaves,
        turned,
        direct and takes_gradients_directly(leaves[0]),
    )
