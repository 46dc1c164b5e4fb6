"""The first half of a backward: input gradients, and all that does not wait.

One masked run of torch's engine. Heavy nodes find that nobody asks for their weight gradient and
compute only the other one; what they would have needed is taken from them on the way. Everything
else runs as in a full backward, once, and frees its saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from strategies.runtime.split_backward.deferred import Deferred
from strategies.runtime.split_backward.graph import walk
from strategies.runtime.split_backward.pending import PendingWeights
from strategies.runtime.split_backward.plan import Plan, plan


def input_backward(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    *,
    exact: bool = False,
    through_engine: bool = False,
) -> PendingWeights:
    """Computes the gradients of a stage's inputs and leaves those of its heavy weights for later.

    Afterwards ``.grad`` of every input, and of every parameter that is not deferred, holds what a
    full backward would have put there, hooks included; saved tensors are freed except the data
    operands of deferred products.

    Args:
        outputs: What the stage handed on, or its loss; those that need no gradient are skipped.
        gradients: Of the outputs, in order; None stands for 1 and needs a scalar.
        inputs: The stage's input leaves that require grad; empty for the first stage.
        exact: Compute each weight gradient before adding it, bit for bit as a full backward does.
            Otherwise the product is accumulated in one call, which is rounded once less and needs
            no memory for the product.
        through_engine: Hand deferred gradients to torch's engine, for parameters whose
            accumulation node was given hooks: Python cannot see those.

    Returns:
        The second half. It refers to its saved operands, to the gradients that met them, and to
        the parameters, but not to the graph.
    """
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad
    ]
    if not pairs:
        return PendingWeights((), exact=exact, through_engine=through_engine)
    roots = [output for output, _ in pairs]
    incoming = [gradient for _, gradient in pairs]
    found = plan(walk(roots), inputs)
    if not found.deferred:
        torch.autograd.backward(roots, incoming)
        return PendingWeights((), exact=exact, through_engine=through_engine)
    _run(found, roots, incoming)
    return PendingWeights(
        [deferred for deferred in found.deferred if deferred.incoming is not None],
        exact=exact,
        through_engine=through_engine,
    )


def _run(found: Plan, roots: list[Tensor], incoming: list[Tensor | None]) -> None:
    handles: list[Any] = []
    reached: list[Deferred] = []
    try:
        for deferred in found.deferred:
            handles.append(deferred.node.register_prehook(_catch(deferred, reached)))
        targets: list[Any] = list(found.leaves.values())
        targets.extend(GradientEdge(node, 0) for node in found.ends)
        torch.autograd.backward(roots, incoming, inputs=targets)
    finally:
        # A hook refers to the node that it hangs on: left behind, neither would ever go.
        for handle in handles:
            handle.remove()
        for deferred in found.deferred:
            deferred.node = None
        found.ends.clear()
    # In the order of the backward: parameters get ready for their reduction as they usually do.
    found.deferred[:] = reached


def _catch(
    deferred: Deferred, reached: list[Deferred]
) -> Callable[[tuple[Tensor | None, ...]], None]:
    def caught(gradients: tuple[Tensor | None, ...]) -> None:
        incoming = gradients[0]
        if incoming is None:
            return
        if deferred.saved is None:
            deferred.read()
        deferred.catch(incoming)
        reached.append(deferred)

    return caught
