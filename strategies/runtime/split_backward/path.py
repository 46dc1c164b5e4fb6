"""Nodes on the way from a heavy node's weight edge to its parameter that change no values.

Hooks on a weight's transposed or cast version are invisible from Python. Where one is known to be
there, ``through_engine`` hands the gradient to torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strategies.runtime.split_backward.graph import Node
from strategies.runtime.split_backward.saved import signed

TURN_OF_TWO = "TBackward0"
TURN = "TransposeBackward0"
CAST = "ToCopyBackward0"
LAYOUT = frozenset(
    {
        TURN_OF_TWO,
        TURN,
        CAST,
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


def swaps_last(node: Node) -> bool:
    """Whether a transposition turns matrices."""
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
