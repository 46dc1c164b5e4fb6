"""Decides which weight gradients wait, before the engine runs.

Three kinds of nodes lie behind a stage's outputs. The *data path* starts at the outputs and goes
on through everything but the weight operands of heavy nodes; the engine walks it in the first
step. What hangs below a weight operand is the *weight path* and runs in the second step: mostly a
transposition and a parameter, but it may be a merged adapter or a normalised weight. A parameter
belongs to one step alone. One that the data path touches anywhere (norms, whatever has no rule)
belongs to the first step, and heavy nodes that lead to it do all their work there, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from strategies.runtime.split_backward.deferred import Deferred, WeightEdge
from strategies.runtime.split_backward.graph import (
    Graph,
    Leaves,
    Node,
    kind_of,
    leaf_of,
    refuses_inputs,
)
from strategies.runtime.split_backward.heavy import agrees, rule_of
from strategies.runtime.split_backward.path import path_of
from strategies.runtime.split_backward.rule import Rule
from strategies.runtime.split_backward.saved import Access, access_of, is_plain, packs


@dataclass(slots=True)
class Plan:
    """What the first step does.

    Attributes:
        deferred: Heavy nodes whose weight gradients are left to the second step.
        leaves: What gets its gradient in the first step.
        ends: Nodes that the engine must reach although none of those leaves is below them.
    """

    deferred: list[Deferred] = field(default_factory=list)
    leaves: dict[int, Tensor] = field(default_factory=dict)
    ends: list[Node] = field(default_factory=list)


def plan(graph: Graph, inputs: Sequence[Tensor]) -> Plan:
    """Splits a graph; nothing is deferred where anything about it is unknown."""
    result = Plan()
    if any(refuses_inputs(kind_of(node)) for node in graph.order):
        return result
    below = Leaves(graph)
    wanted = {id(tensor) for tensor in inputs}
    active = _active(graph, wanted)
    data: set[Node] = set(graph.roots)
    for node in reversed(graph.order):
        if node not in data:
            continue
        leaf = leaf_of(node)
        if leaf is not None:
            result.leaves[id(leaf)] = leaf
            continue
        weights = _weight_edges(graph, node, active)
        deferred = _defer(graph, node, weights, active, below) if weights else None
        if deferred is None:
            followed = [child for child, _ in graph.edges[node] if child is not None]
            if not followed:
                result.ends.append(node)
        else:
            result.deferred.append(deferred)
            taken = {edge.position for edge in deferred.edges}
            followed = [
                child
                for position, (child, _) in enumerate(graph.edges[node])
                if child is not None and position not in taken
            ]
            deferred.anchored = bool(followed)
        data.update(followed)
    _settle(result)
    return result


def _active(graph: Graph, wanted: set[int]) -> set[Node]:
    """Nodes above a stage input or above a heavy node that eats data without a gradient."""
    active: set[Node] = set()
    for node in graph.order:
        leaf = leaf_of(node)
        if leaf is not None:
            if id(leaf) in wanted:
                active.add(node)
            continue
        following = graph.edges[node]
        if any(child in active for child, _ in following if child is not None):
            active.add(node)
            continue
        rule = rule_of(kind_of(node))
        if rule is not None and (
            not rule.takes_data
            or any(following[position][0] is None for position in _operands(rule))
        ):
            active.add(node)
    return active


def _operands(rule: Rule) -> range:
    """The positions of the operands whose product is heavy."""
    return range(0 if rule.bias != 0 else 1, rule.weight + 1)


def _weight_edges(graph: Graph, node: Node, active: set[Node]) -> tuple[int, ...]:
    """The positions of operands that are weights; none where the node is not heavy."""
    rule = rule_of(kind_of(node))
    if rule is None:
        return ()
    following = graph.edges[node]
    passive = [
        position
        for position in _operands(rule)
        if following[position][0] is not None and following[position][0] not in active
    ]
    passive = [position for position in passive if position in rule.operands]
    if not passive:
        return ()
    if not rule.takes_data or any(following[position][0] in active for position in _operands(rule)):
        return tuple(passive)
    # No operand comes from this stage's inputs. One that is a parameter, but for its layout, is
    # the weight. Where both or none are, it is the one in the weight's usual place.
    direct = [p for p in passive if path_of(graph, following[p][0]) is not None]
    if len(direct) == 1:
        return tuple(direct) if len(passive) > 1 or direct[0] == rule.weight else ()
    if len(direct) > 1 or len(passive) == 1:
        return tuple(position for position in passive if position == rule.weight)
    return ()


def _defer(
    graph: Graph, node: Node, weights: tuple[int, ...], active: set[Node], below: Leaves
) -> Deferred | None:
    """The node's deferred part; None if what it takes is not certain."""
    rule = rule_of(kind_of(node))
    assert rule is not None
    metadata = node._input_metadata[0]
    if (
        metadata.dtype.is_complex
        or not rule.accepts(node)
        or not agrees(rule.node, metadata.device)
    ):
        return None
    names = [name for position in weights for name in rule.operands[position]]
    if rule.watches_hooks:
        access = access_of(node, names)
    else:
        access = Access.NEVER if any(packs(other) for other in graph.order) else Access.NOW
    if access is Access.NEVER:
        return None
    positions = list(weights)
    addend = None if rule.bias is None else graph.edges[node][rule.bias][0]
    if addend is not None and addend not in active and path_of(graph, addend) is not None:
        assert rule.bias is not None
        positions.append(rule.bias)
    edges = []
    for position in positions:
        child, number = graph.edges[node][position]
        assert child is not None
        edges.append(WeightEdge(position, child, number, path_of(graph, child), below.below(child)))
    deferred = Deferred(node, rule, tuple(edges), anchored=False)
    if access is Access.NOW:
        deferred.read()
        assert deferred.saved is not None
        if not all(is_plain(tensor) for tensor in deferred.saved.tensors.values()):
            return None
    return deferred


def _settle(result: Plan) -> None:
    """Gives every parameter to one step: the first one takes what it touches anywhere."""
    while True:
        kept = []
        for deferred in result.deferred:
            leaves = {key: leaf for edge in deferred.edges for key, leaf in edge.leaves.items()}
            if leaves and result.leaves.keys().isdisjoint(leaves):
                kept.append(deferred)
            else:
                result.leaves.update(leaves)
        if len(kept) == len(result.deferred):
            break
        result.deferred = kept
    result.ends.extend(d.node for d in result.deferred if not d.anchored)
