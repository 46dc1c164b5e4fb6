"""Ways from a heavy node's weight edge to the parameter that are short enough to go by hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strategies.runtime.split_backward.graph import Graph, Node, leaf_of
from strategies.runtime.split_backward.saved import signed


@dataclass(frozen=True, slots=True)
class Path:
    """A weight edge that leads to one leaf, through casts and at most turns of the matrix.

    Attributes:
        leaf: The parameter.
        transposed: Whether the operand is the parameter with its last two dimensions swapped.
        plain: False where the engine must carry the gradient to the leaf.
    """

    leaf: Tensor
    transposed: bool
    plain: bool


def path_of(graph: Graph, node: Node) -> Path | None:
    """The path below a node; None where more than layout and dtype changes on the way.

    Hooks on a weight's transposed or cast version are invisible from here. Those of the leaf are
    looked at where the path is used.
    """
    transposed = False
    plain = True
    while True:
        leaf = leaf_of(node)
        if leaf is not None:
            return Path(leaf, transposed, plain)
        kind = type(node).__name__
        if kind == "TBackward0":
            # .t() of a vector changes nothing.
            transposed ^= len(node._input_metadata[0].shape) == 2
        elif kind == "TransposeBackward0":
            if _swaps_last(node):
                transposed = not transposed
            else:
                plain = False
        elif kind in _LAYOUT:
            plain = False
        elif kind != "ToCopyBackward0":
            return None
        following = graph.edges[node]
        if len(following) != 1 or following[0][0] is None:
            return None
        node = following[0][0]


_LAYOUT = frozenset(
    {
        "AsStridedBackward0",
        "CloneBackward0",
        "ExpandBackward0",
        "PermuteBackward0",
        "ReshapeAliasBackward0",
        "SelectBackward0",
        "SliceBackward0",
        "SplitBackward0",
        "SplitWithSizesBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "UnbindBackward0",
        "UnflattenBackward0",
        "UnsafeViewBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
    }
)


def _swaps_last(node: Node) -> bool:
    num_dims = len(node._input_metadata[0].shape)
    dims = {signed(dim) % num_dims for dim in (node._saved_dim0, node._saved_dim1)}
    return dims == {num_dims - 2, num_dims - 1}


def takes_gradients_directly(leaf: Tensor) -> bool:
    """Whether adding to ``leaf.grad`` is all that the engine would do."""
    return (
        type(leaf) in (Tensor, torch.nn.Parameter)
        and leaf.layout is torch.strided
        and not leaf._backward_hooks
    )
