"""The first half of a backward: input gradients, and all that does not wait.

One masked run of torch's engine. Heavy nodes find that nobody asks for their weight gradient and
compute only the other one; what they would have needed is taken from them on the way. Everything
else runs as in a full backward, once, and frees its saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

from strategies.models.split_backward.autograd_graph import Graph, walk
from strategies.models.split_backward.pending import Deferred, Meanwhile, PendingWeights
from strategies.models.split_backward.recipe import Recipe, Unit, recipe_of
from strategies.models.split_backward.rule import Access, access_of, is_plain, packs
from strategies.models.split_backward.rules import agrees

if TYPE_CHECKING:
    from strategies.models.tensor_parallel.tensor_ranks import TensorRanks


def input_backward(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    *,
    meanwhile: Meanwhile | None = None,
) -> PendingWeights:
    """Computes the gradients of a stage's inputs and leaves those of its heavy weights for later.

    Afterwards ``.grad`` of every input, and of every parameter that is not deferred, holds what a
    full backward would have put there, hooks included; saved tensors are freed except the data
    operands of deferred products. Hooks on the accumulation node of a deferred parameter, which
    Python cannot see, are not called.

    Args:
        outputs: What the stage handed on, or its loss; those that need no gradient are skipped.
        gradients: Of the outputs, in order; None stands for 1 and needs a scalar.
        inputs: The stage's input leaves that require grad; empty for the first stage.
        meanwhile: Gets weight gradients as soon as they can be computed, for nodes further down
            that have to wait; what is left there in the end is for its own ``run``.

    Returns:
        The second half. It refers to its saved operands, to the gradients that met them, and to
        the parameters, but not to the graph.
    """
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad
    ]
    roots = [output for output, _ in pairs]
    incoming = [gradient for _, gradient in pairs]
    reached: list[Deferred] = []
    if roots:
        graph = walk(roots, inputs)
        recipe, deferred = _plan(graph)
        if deferred:
            targets: list[Any] = [graph.nodes[number].variable for number in recipe.leaves]
            targets += [GradientEdge(graph.nodes[number], 0) for number in recipe.ends]
            if meanwhile is not None:
                meanwhile.expect(deferred)
            reached = _run(deferred, roots, incoming, targets, meanwhile)
        else:
            torch.autograd.backward(roots, incoming)
    return PendingWeights(reached)


def run_backward(
    outputs: Sequence[Tensor], incoming: Sequence[Tensor], *, retain_graph: bool = False
) -> None:
    """``torch.autograd.backward``, straight to its engine where it would only compare shapes.

    Which the engine does again. On CPU, since it runs there in this thread, whose context
    variables it then needs no copy of.
    """
    if any(type(tensor) is not Tensor or not tensor.is_cpu for tensor in outputs):
        torch.autograd.backward(outputs, incoming, retain_graph=retain_graph)
        return
    engine: Any = Variable._execution_engine
    engine.run_backward(
        tuple(outputs), tuple(incoming), retain_graph, False, (),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip


def backward_under_sums(
    ranks: TensorRanks, outputs: list[Tensor], incoming: list[Tensor], inputs: list[Tensor]
) -> None:
    """A whole backward whose weight gradients run while input gradients are added up over ranks."""
    meanwhile = ranks.meanwhile = Meanwhile()
    try:
        rest = input_backward(outputs, incoming, inputs, meanwhile=meanwhile)
    finally:
        ranks.meanwhile = None
    meanwhile.run()
    rest.run()


def _plan(graph: Graph) -> tuple[Recipe, list[Deferred]]:
    """What waits. Where anything about a node is uncertain, it does not."""
    excluded: frozenset[int] = frozenset()
    while True:
        recipe = recipe_of(graph.shape, excluded)
        deferred = [_defer(unit, graph) for unit in recipe.units]
        kept = [item for item in deferred if item is not None]
        if len(kept) == len(deferred):
            return recipe, kept
        # What such nodes lead to is another graph to look at.
        excluded |= {
            unit.node for unit, item in zip(recipe.units, deferred, strict=True) if item is None
        }


def _defer(unit: Unit, graph: Graph) -> Deferred | None:
    rule = unit.rule
    node = graph.nodes[unit.node]
    if not rule.accepts(node):
        return None
    if rule.watches_hooks:
        access = access_of(node, unit.names)
    else:
        access = Access.NEVER if any(map(packs, graph.nodes)) else Access.NOW
    if access is Access.NEVER:
        return None
    deferred = Deferred(unit, graph)
    if access is Access.NOW:
        tensors = deferred.read().tensors.values()
        if not all([is_plain(tensor) for tensor in tensors]):
            return None
        device = next(iter(tensors)).device
    else:
        metadata = node._input_metadata[0]
        if metadata.dtype.is_complex:
            return None
        device = metadata.device
    return deferred if agrees(rule.node, device) else None


def _run(
    deferred: list[Deferred],
    roots: list[Tensor],
    incoming: list[Tensor | None],
    targets: list[Any],
    meanwhile: Meanwhile | None,
) -> list[Deferred]:
    """Runs the engine; returns what it passed with a gradient, in the order of the backward."""
    handles: list[Any] = []
    reached: list[Deferred] = []
    try:
        for item in deferred:
            item.wait()
            handles.append(item.node.register_prehook(_catch(item, reached, meanwhile)))
        torch.autograd.backward(roots, incoming, inputs=targets)
    finally:
        # A hook refers to the node that it hangs on: left behind, neither would ever go.
        for handle in handles:
            handle.remove()
        for item in deferred:
            item.node = None
    return reached


def _catch(
    deferred: Deferred, reached: list[Deferred], meanwhile: Meanwhile | None
) -> Callable[[tuple[Tensor | None, ...]], None]:
    def caught(gradients: tuple[Tensor | None, ...]) -> None:
        incoming = gradients[0]
        if incoming is not None:
            deferred.catch(incoming)
            if meanwhile is None or not meanwhile.take(deferred):
                reached.append(deferred)

    return caught
