"""Decides from a graph's shape which weight gradients wait.

Three kinds of nodes lie behind a stage's outputs. The *data path* starts at the outputs and goes
on through everything but the weight operands of heavy nodes; the engine walks it in the first
step. What hangs below a weight operand is a *weight path* and runs in the second step: mostly a
transposition and a parameter, but it may be a merged adapter or a normalised weight. A parameter
belongs to one step alone. One that the data path touches anywhere (norms, whatever has no rule)
belongs to the first step, and heavy nodes that lead to it do all their work there, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from strategies.models.split_backward.autograd_graph import Node, Shape, accumulates, refuses_inputs
from strategies.models.split_backward.rule import Rule, signed
from strategies.models.split_backward.rules import rule_of

# Nodes on the way from a heavy node's weight edge to its parameter that change no values.
_TURN_OF_TWO = "TBackward0"
_TURN = "TransposeBackward0"
_CAST = "ToCopyBackward0"
_NAMES = """
    TBackward0 TransposeBackward0 ToCopyBackward0
    AsStridedBackward0 CloneBackward0 ExpandBackward0 PermuteBackward0 ReshapeAliasBackward0
    SelectBackward0 SliceBackward0 SplitBackward0 SplitWithSizesBackward0 SqueezeBackward0
    SqueezeBackward1 UnbindBackward0 UnflattenBackward0 UnsafeViewBackward0 UnsqueezeBackward0
    ViewBackward0
"""
_LAYOUT = frozenset(_NAMES.split())


@dataclass(frozen=True, slots=True)
class EdgeRecipe:
    """An edge of a heavy node, at ``position``, whose gradient waits; nodes are numbers.

    Attributes:
        number: Which of the child's inputs.
        leaves: Accumulation nodes below.
        simple: Nothing but one leaf below, cast or turned at most.
        turned: The matrix is turned on the way to that leaf, as far as types tell.
        turns: Nodes below that turn the matrix if they swap its last dimensions.
        flipped: The first node below turns the matrix, so its gradient is best computed turned.
    """

    position: int
    child: int
    number: int
    leaves: tuple[int, ...]
    simple: bool
    turned: bool
    turns: tuple[int, ...]
    flipped: bool


@dataclass(frozen=True, slots=True)
class Unit:
    """The heavy node of number ``node``, whose weight gradients wait.

    Attributes:
        edges: To weights, and to the bias.
        names: Of the saved tensors that the gradients need.
        anchored: Some other edge leads on, so that the engine comes by on its own.
    """

    node: int
    rule: Rule
    edges: tuple[EdgeRecipe, ...]
    names: tuple[str, ...]
    anchored: bool


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the first step does.

    Attributes:
        units: What is left to the second step.
        leaves: Accumulation nodes that run in the first step.
        ends: Nodes that the engine must reach although it has no reason to.
    """

    units: tuple[Unit, ...] = ()
    leaves: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


@functools.lru_cache(maxsize=128)
def recipe_of(shape: Shape, excluded: frozenset[int] = frozenset()) -> Recipe:
    """The recipe for a graph; the gradients of ``excluded`` heavy nodes cannot wait."""
    if any(refuses_inputs(entry[0]) for entry in shape.nodes):
        return Recipe()
    search = _Search(shape)
    data = set(shape.roots)
    units: list[Unit] = []
    leaves: set[int] = set()
    ends: set[int] = set()
    for node in range(len(shape.nodes) - 1, -1, -1):
        if node not in data:
            continue
        if accumulates(shape.nodes[node][0]):
            leaves.add(node)
            continue
        unit = None if node in excluded else search.unit(node)
        taken: set[int] = set()
        if unit is not None:
            units.append(unit)
            taken = {edge.position for edge in unit.edges}
        followed = [child for at, (child, _) in search.wanted(node) if at not in taken]
        data.update(followed)
        if unit is None and not followed:
            ends.add(node)
    units = _settle(units, leaves)
    ends.update(unit.node for unit in units if not unit.anchored)
    return Recipe(tuple(units), tuple(sorted(leaves)), tuple(sorted(ends)))


def _settle(units: list[Unit], leaves: set[int]) -> list[Unit]:
    """Gives every leaf to one step: the first step takes what it touches anywhere."""
    while True:
        kept = []
        for unit in units:
            below = {leaf for edge in unit.edges for leaf in edge.leaves}
            if below and leaves.isdisjoint(below):
                kept.append(unit)
            else:
                leaves |= below
        if len(kept) == len(units):
            return units
        units = kept


class _Search:
    def __init__(self, shape: Shape) -> None:
        self._kinds = [entry[0] for entry in shape.nodes]
        self._edges = [tuple(zip(entry[1::2], entry[2::2], strict=True)) for entry in shape.nodes]
        self._rules = [rule_of(kind) for kind in self._kinds]
        self._active = self._find_active(set(shape.inputs))

    def wanted(self, node: int) -> Iterator[tuple[int, tuple[int, int]]]:
        for position, edge in enumerate(self._edges[node]):
            if edge[0] >= 0:
                yield position, edge

    def _find_active(self, inputs: set[int]) -> set[int]:
        """Nodes above a stage input or above a heavy node that eats data without a gradient."""
        active = set(inputs)
        for node, edges in enumerate(self._edges):
            rule = self._rules[node]
            eats = rule is not None and (
                not rule.takes_data or any(edges[position][0] < 0 for position in rule.factors)
            )
            if eats or any(child in active for child, _ in edges):
                active.add(node)
        return active

    def unit(self, node: int) -> Unit | None:
        """The node's part that can wait; None if it is not heavy or nothing of it is a weight."""
        rule = self._rules[node]
        if rule is None:
            return None
        weights = self._weights(node, rule)
        if not weights:
            return None
        positions = list(weights)
        if rule.bias is not None and self._is_parameter(self._edges[node][rule.bias][0]):
            positions.append(rule.bias)
        names = dict.fromkeys(name for at in weights for name in rule.operands[at])
        return Unit(
            node=node,
            rule=rule,
            edges=tuple(self._edge(node, rule, position) for position in positions),
            names=tuple(names),
            anchored=any(position not in positions for position, _ in self.wanted(node)),
        )

    def _weights(self, node: int, rule: Rule) -> tuple[int, ...]:
        children = {position: self._edges[node][position][0] for position in rule.factors}
        passive = [
            position
            for position, child in children.items()
            if child >= 0 and child not in self._active and position in rule.operands
        ]
        if not rule.takes_data or any(child in self._active for child in children.values()):
            return tuple(passive)
        # No factor comes from this stage's inputs. One that is a parameter, but for its layout, is
        # the weight. Where that does not tell, it may only be the one in the weight's usual place.
        direct = [position for position in passive if self._is_parameter(children[position])]
        if len(passive) == 2 and len(direct) == 1:
            return tuple(direct)
        if len(passive) == 2 and not direct:
            return ()
        return tuple(position for position in passive if position == rule.weight)

    def _is_parameter(self, node: int) -> bool:
        """Whether a node leads to one leaf of the model through layout and type changes only."""
        while node >= 0 and node not in self._active:
            if accumulates(self._kinds[node]):
                return True
            if self._kinds[node].__name__ not in _LAYOUT or len(self._edges[node]) != 1:
                return False
            node = self._edges[node][0][0]
        return False

    def _edge(self, node: int, rule: Rule, position: int) -> EdgeRecipe:
        child, number = self._edges[node][position]
        turned, simple, turns = False, True, []
        at = child
        while simple and not accumulates(self._kinds[at]):
            name = self._kinds[at].__name__
            if name == _TURN_OF_TWO:
                turned = not turned
            elif name == _TURN:
                turns.append(at)
            elif name != _CAST:
                simple = False
            if len(self._edges[at]) != 1 or self._edges[at][0][0] < 0:
                simple = False
            else:
                at = self._edges[at][0][0]
        if position == rule.bias and (turned or turns):
            simple = False
        return EdgeRecipe(
            position=position,
            child=child,
            number=number,
            leaves=self._below(child),
            simple=simple,
            turned=turned,
            turns=tuple(turns),
            flipped=self._kinds[child].__name__ in (_TURN, _TURN_OF_TWO),
        )

    def _below(self, start: int) -> tuple[int, ...]:
        seen = {start}
        stack = [start]
        while stack:
            for _, (child, _) in self.wanted(stack.pop()):
                if child not in seen:
                    seen.add(child)
                    stack.append(child)
        return tuple(sorted(node for node in seen if accumulates(self._kinds[node])))


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
