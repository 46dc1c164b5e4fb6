"""The autograd graph behind a stage's outputs, leaves first."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

# torch types its nodes as opaque; saved values are attributes that differ from type to type.
Node = Any
Edge = tuple[Node, int]


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes that the outputs depend on.

    Attributes:
        roots: The nodes of the outputs, each once.
        order: Every node once, each after all the nodes that its gradients flow to.
        edges: Node -> where its gradients flow to, by position; None where nobody wants one.
    """

    roots: tuple[Node, ...]
    order: tuple[Node, ...]
    edges: Mapping[Node, tuple[tuple[Node | None, int], ...]]


def walk(outputs: Iterable[Tensor]) -> Graph:
    """The graph of tensors that require grad."""
    roots = tuple(dict.fromkeys(root_of(output).node for output in outputs))
    edges: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
    finished: dict[Node, None] = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node in edges:
            finished[stack.pop()] = None
            continue
        following = edges[node] = node.next_functions
        for child, _ in following:
            if child is not None and child not in edges:
                stack.append(child)
    return Graph(roots, tuple(finished), edges)


def root_of(output: Tensor) -> GradientEdge:
    """Where the gradient of a tensor enters the graph; a leaf's own accumulation node, too."""
    return get_gradient_edge(output)


def leaf_of(node: Node) -> Tensor | None:
    """The leaf tensor that a node accumulates for, None for every other node."""
    return node.variable if _accumulates(kind_of(node)) else None


def kind_of(node: Node) -> Any:
    """A node's type; one per operation of torch, one per function of a user."""
    return type(node)


@functools.cache
def _accumulates(kind: type) -> bool:
    return kind.__name__ == "AccumulateGrad"


@functools.cache
def refuses_inputs(kind: type) -> bool:
    """True for nodes that run only in a backward without ``inputs=``.

    These are checkpoint functions that call the engine again: torch's with ``use_reentrant=True``
    and those that others derived from it. All ask torch whether they may.
    """
    if "CheckpointFunction" in kind.__name__:
        return True
    forward = getattr(kind, "_forward_cls", None)
    backward = getattr(forward, "backward", None)
    code = getattr(backward, "__code__", None)
    return code is not None and "_is_checkpoint_valid" in code.co_names


class Leaves:
    """Looks up the leaves below a node, keeping what it has found."""

    def __init__(self, graph: Graph) -> None:
        self._edges = graph.edges
        self._known: dict[Node, dict[int, Tensor]] = {}

    def below(self, node: Node) -> dict[int, Tensor]:
        """Id -> leaf, for all that the node's gradients end in."""
        known = self._known.get(node)
        if known is None:
            known = self._known[node] = self._find(node)
        return known

    def _find(self, start: Node) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        seen = {start}
        stack = [start]
        while stack:
            node = stack.pop()
            leaf = leaf_of(node)
            if leaf is not None:
                found[id(leaf)] = leaf
            for child, _ in self._edges[node]:
                if child is not None and child not in seen:
                    seen.add(child)
                    stack.append(child)
        return found
