"""The autograd graph behind a stage's outputs: its nodes, and its shape without them.

The shape is the same for every microbatch that takes the same way through the model, so what
follows from it is worked out once (``recipe``). It holds types and numbers only, no node, no
tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

# torch types its nodes as opaque; saved values are attributes that differ from type to type.
Node = Any
Kind = Any


@dataclass(frozen=True, slots=True)
class Shape:
    """A graph without its nodes, which are numbered so that gradients flow to smaller numbers.

    Attributes:
        nodes: For each node its type, then for each of its edges the number of the node that the
            gradient flows to (-1 where nobody wants it) and which of that node's inputs it is.
        roots: The nodes of the outputs.
        inputs: The nodes that accumulate for the stage's inputs.
    """

    nodes: tuple[tuple[Any, ...], ...]
    roots: tuple[int, ...]
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes that the outputs depend on, by number, and their shape."""

    nodes: tuple[Node, ...]
    shape: Shape


def walk(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> Graph:
    """The graph of tensors that require grad; inputs are leaves, outputs may be."""
    roots = dict.fromkeys(get_gradient_edge(output).node for output in outputs)
    edges: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
    numbers: dict[Node, int] = {}
    entries: list[tuple[Any, ...]] = []
    stack = list(roots)
    while stack:
        node = stack[-1]
        following = edges.get(node)
        if following is None:
            edges[node] = following = node.next_functions
            for child, _ in following:
                if child is not None and child not in edges:
                    stack.append(child)
            if stack[-1] is not node:
                continue
        stack.pop()
        if node in numbers:
            continue
        numbers[node] = len(entries)
        entry: list[Any] = [type(node)]
        for child, number in following:
            entry += (-1, 0) if child is None else (numbers[child], number)
        entries.append(tuple(entry))
    wanted = dict.fromkeys(get_gradient_edge(leaf).node for leaf in inputs)
    shape = Shape(
        tuple(entries),
        tuple(numbers[node] for node in roots),
        tuple(numbers[node] for node in wanted if node in numbers),
    )
    return Graph(tuple(numbers), shape)


@functools.cache
def accumulates(kind: Kind) -> bool:
    """Whether nodes of this type end the graph at a leaf."""
    return str(kind.__name__) == "AccumulateGrad"


@functools.cache
def refuses_inputs(kind: Kind) -> bool:
    """Whether nodes run only in a backward without ``inputs=``.

    These are checkpoint functions that call the engine again: torch's with ``use_reentrant=True``
    and those that others derived from it. All ask torch whether they may.
    """
    if "CheckpointFunction" in kind.__name__:
        return True
    forward = getattr(kind, "_forward_cls", None)
    backward = getattr(forward, "backward", None)
    code = getattr(backward, "__code__", None)
    return code is not None and "_is_checkpoint_valid" in code.co_names
